"""Where a joined plan differs, one without joined micro-batches takes its place."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.cluster import Cluster
from penstock.graph.trace import capture
from penstock.search import Fixed
from penstock.training.choose import Machines, best
from penstock.training.listener import SILENT
from penstock.training.replan import SearchBasis
from penstock.training.unjoined import unjoined_choice
from tests.graph.zoo import JOBS


@pytest.fixture(scope="module")
def searched():
    there = Machines(Cluster.here(2))
    fixed = Fixed(ranks=2)
    job = replace(JOBS["blocks"], micro_batches=4)
    found = best(job, fixed, capture(job), there)
    ways = tuple(option.way for option in found.options)
    return there, SearchBasis(ways, fixed, None, 1.0), found


def test_plan_that_differs_is_made_again_without_joining(searched, tmp_path):
    there, basis, found = searched
    session = SimpleNamespace(basis=basis, there=there, folder=tmp_path, listener=SILENT)
    joined = next(o.choice for o in found.options if o.way.joined > 1)
    choice = unjoined_choice(session, joined, "the gradient of x differs")
    assert choice.plan.joined == 1
    assert choice.plan.total_ranks == joined.plan.total_ranks
    assert "the gradient of x differs" in str(choice.plan.decisions)
    assert (tmp_path / "plan.json").exists()
    assert unjoined_choice(session, choice, "") is None
