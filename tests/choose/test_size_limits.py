"""Possible: what sizes alone decide is decided first, and nothing that could be is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.choose.joined_counts import ways_to_divide, ways_to_join
from penstock.choose.size_limits import check_sizes, check_soon
from penstock.cluster import Cluster
from penstock.errors import PlanError
from penstock.listener import SILENT
from penstock.search.shapes import Fixed, shapes
from tests.cli import mlp
from tests.search.chains import chain

GRAPH = chain([3, 3, 3], [5, 6, 7])
sizes = st.one_of(st.none(), st.integers(1, 7))


def test_ranks_that_no_plan_has_are_refused_by_a_trace_alone() -> None:
    with pytest.raises(PlanError, match=r"no plan fits ranks 500: 500 ranks, \d+ cut points"):
        check_soon(mlp.job(), Fixed(ranks=500), SILENT)


def test_job_is_not_moved_by_that() -> None:
    built = list[int]()

    def model() -> object:
        built.append(1)
        return mlp.job().model()

    job = mlp.job()
    object.__setattr__(job, "model", model)
    with pytest.raises(PlanError):
        check_soon(job, Fixed(stages=99), SILENT)
    assert built == []


def test_nothing_is_traced_where_there_are_micro_batches_for_all_ranks() -> None:
    def fails(*given: object) -> object:
        raise AssertionError

    job = ps.Job(fails, fails, fails, fails, micro_batches=8)  # pyright: ignore[reportArgumentType]
    check_soon(job, Fixed(ranks=8, stages=2), SILENT)
    check_soon(job, Fixed(), SILENT)


@given(ranks=sizes, replicas=sizes, stages=sizes, micro_batches=st.sampled_from([1, 2, 4, 6]))
def test_what_is_refused_is_refused_by_the_search_too(
    ranks: int | None, replicas: int | None, stages: int | None, micro_batches: int
) -> None:
    job = mlp.job()
    object.__setattr__(job, "micro_batches", micro_batches)
    fixed = Fixed(ranks, replicas, stages)
    there = Cluster.here(ranks)
    joined = [micro_batches // k for k in ways_to_join(job)]
    parts = ways_to_divide(job, fixed, GRAPH.samples, there.num_ranks)
    counts = [*joined, *(int(micro_batches / part) for part in parts)]
    fits = any(next(shapes(GRAPH, there, count, fixed), None) for count in counts)
    try:
        check_sizes(job, GRAPH, fixed)
    except PlanError:
        assert not fits
    else:
        assert fits
