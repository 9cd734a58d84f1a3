"""What compiled segments take: measured, priced, and found again."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.graph.code import function_of
from penstock.graph.cut import cut
from penstock.graph.segment_memory import peak_with_workspace
from penstock.profile import fused
from penstock.profile.fused import measure_fused
from penstock.profile.measure import inputs_of, workspaces
from penstock.profile.profile import FusedCost
from penstock.schedule.orders import KINDS
from penstock.simulate.price import Ways, costs_of, held_of
from tests.graph.test_cut import captured
from tests.graph.zoo import JOBS
from tests.search.chains import chain, profile_of

COMPILED = Ways(compiled=True)


@pytest.mark.parametrize("kinds", ["FB", "FIW"])
def test_bytes_of_segments_are_those_that_their_values_live(kinds: str, monkeypatch) -> None:
    """Measured of ops one by one, so that the lives of the values, known otherwise, are the judge.

    What is kept of the batch itself, and single numbers, are in none of both or below 1 %.
    """
    monkeypatch.setattr(fused, "_BUDGET_S", 0.0)
    made, job = captured("transformer"), JOBS["transformer"]
    stages = cut(made.graph, [len(made.graph.cut_points) // 2])
    pairs = [(stage, kind) for kind in kinds for stage in (0, 1)]
    found = measure_fused(made, job, stages, pairs, function_of)
    rows = {row.segment: row.peak_bytes for row in found}
    workspace = workspaces(made, inputs_of(made, job))
    for stage, kind in pairs:
        segment = stages.stages[stage].segment(kind)
        if segment.ops:
            expected = peak_with_workspace(made.graph, stages, stage, kind, workspace)
            assert rows[segment.digest] == pytest.approx(expected, rel=0.01), (stage, kind)


def test_a_compiled_segment_takes_its_ratio_and_bytes_and_no_other_does() -> None:
    graph = chain([4, 4, 4], [10, 10, 10])
    plain, stages = profile_of(graph, (1.0, 2.0, 4.0)), cut(graph, [0])
    first, second = (stage.forward.digest for stage in stages.stages)
    known = replace(plain, fused=(FusedCost(first, 0.25, 12345),))
    f = KINDS.index("F")
    before = costs_of(graph, stages, known).action_s
    after = costs_of(graph, stages, known, ways=COMPILED).action_s
    assert before[f, :, 0].tolist() == [1.0, 6.0]
    assert after[f, :, 0].tolist() == [0.25, 6.0]
    assert np.array_equal(np.delete(before, f, 0), np.delete(after, f, 0))
    held = held_of(graph, stages, known, ways=COMPILED).transient
    one_by_one = held_of(graph, stages, known).transient
    assert held[f, 0] == 12345 + 8  # the batch beside it
    assert np.argwhere(held != one_by_one).tolist() == [[f, 0]]
    passing = COMPILED._replace(passing=frozenset([("F", 0)]))  # its weights are made as it runs
    assert np.array_equal(costs_of(graph, stages, known, ways=passing).action_s, before)
    assert first != second
