"""Collects beside computes: each when all have come and the one before is over, by recursion."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.program.program import Collect, Collected, Compute, Edge, Update
from penstock.program.reductions import Reduction
from penstock.schedule import gpipe, one_f_one_b
from penstock.schedule.grid import InnerAxis
from penstock.schedule.refine import refine
from penstock.simulate.recorded import Recorded
from penstock.simulate.simulate import simulate
from tests.program.lowering import lower_schedule

KIND = DeviceKind("d", 2**34, (("float32", 1e12),), 1e11)


def edges_of(units, drawn):
    """Return a chain whose values are partly collected, each by some of the ways."""
    ways = ("sum", "gather", "scatter", "exchange")
    pairs = [("F", at, at + 1) for at in range(units - 1)]
    pairs += [("F", 0, units - 1)] if units > 2 else []
    pairs += [("B", at, at - 1) for at in range(1, units)]
    return tuple(
        Edge(
            *pair,
            8,
            tuple(Collected(how, 1000 * n) for how, n in zip(ways, sizes, strict=True) if n),
        )
        for pair, sizes in zip(pairs, drawn, strict=False)
    )


def expected(program, seconds, taken_s, starts):
    """Return when each Compute of each rank begins: from what its definition needs, backwards."""
    codes = [[*program.code[rank]] for rank in range(2)]
    places = [[at for at, one in enumerate(code) if isinstance(one, Collect)] for code in codes]

    @cache
    def free_s(rank, at):
        """Return when the thread comes to a place of the code."""
        return starts[rank] if at == 0 else over_s(rank, at - 1)

    @cache
    def over_s(rank, at):
        one = codes[rank][at]
        return (
            began_s(rank, at) + seconds(one.action, rank)
            if isinstance(one, Compute)
            else (free_s(rank, at))
        )

    @cache
    def began_s(rank, at):
        kind, stage, number = codes[rank][at].action
        read = [
            collected_s(order)
            for order, place in enumerate(places[rank])
            if (one := codes[rank][place]).of.micro_batch == number
            and program.edges[one.edge].target == stage
            and (program.edges[one.edge].kind == "F") == (kind == "F")
        ]
        return max(free_s(rank, at), *read, 0.0)

    @cache
    def collected_s(order):
        came = [free_s(rank, places[rank][order]) for rank in range(2)]
        before = collected_s(order - 1) if order else 0.0
        return max(*came, before) + taken_s(codes[0][places[0][order]])

    return [
        [began_s(rank, at) for at, one in enumerate(code) if isinstance(one, Compute)]
        for rank, code in enumerate(codes)
    ]


@given(
    st.sampled_from([gpipe, one_f_one_b]),
    st.integers(1, 4),
    st.integers(2, 4),
    st.booleans(),
    st.lists(st.tuples(*[st.integers(0, 2)] * 4), min_size=9, max_size=9),
    st.integers(0, 99),
)
def test_computes_begin_when_what_they_read_is_collected(
    builder, micro_batches, units, woven, drawn, seed
):
    schedule = refine(builder(1, micro_batches), (units,), woven=woven)
    program = lower_schedule(schedule, edges=edges_of(units, drawn), replicas=2, axis=InnerAxis(2))
    cluster = Cluster((KIND,), (Host("h", "d", 2),), Link(1e-4, 2e6))

    def seconds(action, rank):
        kind, stage, number = action
        return (1 + (7 * stage + 3 * number + seed * (rank + 1) + (kind == "B")) % 5) * 1e-3

    def taken_s(one):
        sizes = {each.how: each.size_bytes for each in program.edges[one.edge].collects}
        size, what = sizes[one.how], {"gather": "all_gather", "scatter": "reduce_scatter"}
        if one.how == "sum":
            return cluster.sum_s(size, (0, 1))
        kind = what.get(one.how, "all_to_all")
        times = 2 if one.how == "gather" else 1
        return cluster.collective_s(kind, times * size, (0, 1)) + cluster.ends_s((0, 1))

    code = [[(one, rank) for one in program.code[rank]] for rank in (0, 1)]
    both = [*code[0], *code[1]]
    recorded = Recorded(
        np.array(
            [
                0.0 if isinstance(one, Update) else seconds(one.action, rank)
                for one, rank in both
                if isinstance(one, Compute | Update)
            ]
        ),
        np.zeros(sum(isinstance(one, Reduction) for one, _ in both)),
        None,
        np.array([0.0, seed % 3 * 1e-3]),
        np.array([taken_s(one) for one, _ in both if isinstance(one, Collect)]),
    )
    spans = simulate(program, recorded, cluster).spans
    found = [[s.start_s for s in spans if (s.rank, s.lane) == (rank, "compute")] for rank in (0, 1)]
    wanted = expected(program, seconds, taken_s, (0.0, seed % 3 * 1e-3))
    assert found == [pytest.approx(row) for row in wanted]


def test_half_a_micro_batch_computes_while_the_other_is_collected():
    edges = (Edge("F", 0, 1, 8, (Collected("sum", 1000),)), Edge("B", 1, 0, 8))
    cluster = Cluster((KIND,), (Host("h", "d", 2),), Link(0.0, 1e6))
    took = {}
    for woven in (False, True):
        schedule = refine(gpipe(1, 2), (2,), woven=woven)
        program = lower_schedule(schedule, edges=edges, replicas=2, axis=InnerAxis(2))
        took[woven] = simulate(program, lambda action: 1e-3, cluster).spans
    ends = {woven: max(span.end_s for span in spans) for woven, spans in took.items()}
    assert cluster.sum_s(1000, (0, 1)) == pytest.approx(1e-3)
    assert ends == {False: pytest.approx(10e-3), True: pytest.approx(8e-3)}
