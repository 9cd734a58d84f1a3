"""Which stages replicas divide, keep whole for a step or for good, and how early they gather."""

import itertools
import random

import pytest

from penstock.cluster import Link
from penstock.plan import plan_by_hand
from penstock.search import sharded
from penstock.search.field import Effort, Field
from penstock.search.judge import Judge
from tests.search.chains import chain, cluster_of, profile_of

MB = 10**6


@pytest.mark.parametrize("state", [0.0, 2.0])
def test_what_is_divided_is_the_best_of_all_choices(state):
    """Every word of every stage and every depth, on chains of three layers under two caps."""
    source = random.Random(7)
    for _ in range(3):
        megabytes = [source.choice([1, 3, 10, 30]) for _ in range(3)]
        graph = chain([size * MB for size in megabytes], [source.randint(1, 8) * MB] * 3)
        seconds = [source.randint(2, 30) / 1000 for _ in range(3)]
        profile = profile_of(graph, seconds, state_bytes_per_byte=state)
        link = Link(1e-4, source.choice([3e8, 1e9, 4e9]))
        roomy = Judge(graph, profile, cluster_of(2, link=link))
        plan = plan_by_hand(graph, [], "gpipe", num_micro_batches=2, replicas=2)
        units = sharded.in_units(roomy, plan)
        made = [
            roomy.candidate(units.changed(shard=words, prefetch=ahead))
            for words in itertools.product(("shard", "shard_keep", "replicate"), repeat=3)
            for ahead in (0, 1, 2)
            if set(words) != {"replicate"}
        ]
        least = min(max(each.peak_bytes) for each in made)
        most = max(roomy.candidate(plan).peak_bytes)
        for share in (0.3, 0.6):
            cap = int(least + share * (most - least))
            tight = Judge(graph, profile, cluster_of(2, link=link, memory_bytes=cap))
            field = Field(tight, [plan], "time", Effort())
            found = [each for each in sharded.with_shards(field) if not each.refused]
            best = min(each.step_s for each in made if max(each.peak_bytes) <= cap)
            assert min(each.step_s for each in found) <= best * (1 + 1e-9)
