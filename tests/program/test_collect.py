"""Collect: in text and files, refused where it makes no sense, simulated; run: test_collects.py."""

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import ProgramError
from penstock.program.codes import COLLECT
from penstock.program.program import Collect, Collected, Edge, Program
from penstock.program.reductions import Reduction
from penstock.schedule import Action, gpipe, one_f_one_b
from penstock.schedule.grid import Grid, InnerAxis
from penstock.schedule.refine import refine
from penstock.simulate.simulate import simulate
from tests.program.lowering import lower_schedule

SUM, GATHER = Collected("sum", 8_000_000), Collected("gather", 1000)
EDGES = (Edge("F", 0, 1, 8, (SUM, GATHER)), Edge("B", 1, 0, 8, (SUM,)))


def made(edges=EDGES, *, replicas=2, tensor=2, ranks=1, **options):
    schedule = refine((one_f_one_b if ranks > 1 else gpipe)(ranks, 2), (2,) * ranks)
    axis = InnerAxis(tensor)
    return lower_schedule(schedule, edges=edges, replicas=replicas, axis=axis, **options)


def changed(program, change, *, rank=0):
    codes = [list(code) for code in program.code]
    change(codes[rank])
    return lambda: replace(program, code=codes)


def test_collects_stand_behind_what_ranks_made_in_parts():
    code = made(clip=True).code
    words = "F0.0 sum:F0.0e0r0,1 gather:F0.0e0r0,1 F1.0 F0.1 sum:F0.1e0r0,1 gather:F0.1e0r0,1 F1.1"
    words += " B1.0 sum:B1.0e1r0,1 B0.0 B1.1 sum:B1.1e1r0,1 B0.1 norm:all.0 U0.0 U1.0"
    assert [" ".join(map(str, code[rank])) for rank in range(2)] == [words, words]
    assert Collect(Action("F", 0, 1), 0, (0, 1), "gather") in code[1]


def test_replicas_sum_with_those_that_have_the_same_slices():
    program = made(replicas=4, clip=True)
    sums = [each for each in program.code[1] if isinstance(each, Reduction)]
    assert {each.bucket: each.ranks for each in sums} == {
        "stage0": (1, 3),
        "stage1": (1, 3),
        "all": (0, 1),
    }
    assert {i.ranks for i in program.code[3] if isinstance(i, Collect)} == {(2, 3)}
    assert program.grid.step_micro_batches == 4
    assert [program.grid.in_step(replica, 1) for replica in range(4)] == [(0, 1)] * 2 + [(0, 3)] * 2


def test_ranks_of_a_pipeline_collect_with_those_of_the_same_place():
    grid = Grid(3, (4,) * 4, 2)
    assert [grid.tensor_group(rank) for rank in (0, 4, 11)] == [(0, 3), (1, 4), (8, 11)]
    assert [*grid.column_of(4)] == [4, 10]
    assert grid.slice_of(4) == 1
    edges = (Edge("F", 0, 1, 8, (SUM,)), Edge("F", 1, 2, 8), Edge("F", 2, 3, 8))
    edges += (Edge("B", 3, 2, 8), Edge("B", 2, 1, 8), Edge("B", 1, 0, 8))
    program = made(edges, ranks=2)
    assert "sum:F0.0e0r0,2" in map(str, program.code[2])
    assert not any(isinstance(each, Collect) for each in program.code[1])


def test_a_file_holds_what_is_collected(tmp_path):
    program = made(clip=True)
    program.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json") == program
    other = made((EDGES[0]._replace(collects=(GATHER, SUM)), EDGES[1]), clip=True)
    assert other.code != program.code


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda code: code.pop(1), "uses the value of edge F 0->1, of which ranks have parts"),
        (lambda code: code.insert(1, code[1]), "it was collected already"),
        (lambda code: code.insert(0, code.pop(1)), "this rank has not made that value yet"),
        (
            lambda code: code.__setitem__(1, replace(code[1], ranks=(0, 2))),
            "not the ranks that divide the ops",
        ),
        (
            lambda code: code.__setitem__(1, replace(code[1], ranks=(1, 0))),
            "not the ranks that divide the ops",
        ),
        (
            lambda code: code.__setitem__(1, replace(code[1], edge=1)),
            "its edge does not carry this value",
        ),
        (
            lambda code: code.__setitem__(slice(1, 3), code[2:0:-1]),
            "do not reach their collectives in one order",
        ),
    ],
)
def test_misplaced_collects_are_refused(change, words):
    with pytest.raises(ProgramError, match=words):
        changed(made(), change)()


def test_a_scatter_takes_as_long_as_half_a_sum_and_is_in_the_text():
    kind, link = DeviceKind("d", 2**34, (("float32", 1e12),), 1e11), Link(0.0, 8e6)
    cluster = Cluster((kind,), (Host("h", "d", 2),), link)
    took = {}
    for how in ("sum", "scatter"):
        program = made((EDGES[0]._replace(collects=(Collected(how, 8_000_000),)), EDGES[1]))
        assert f"{how}:F0.0e0r0,1" in map(str, program.code[0])
        spans = simulate(program, lambda action: 1.0, cluster).spans
        took[how] = next(s.end_s - s.start_s for s in spans if (s.kind, s.rank) == ("collect", 0))
    assert 0 < took["scatter"] < took["sum"] < 2.5 * took["scatter"]


def test_what_no_edge_asks_for_is_not_collected():
    bare = made((EDGES[0]._replace(collects=(SUM,)), EDGES[1]))
    wrong = Collect(Action("F", 0, 0), 0, (0, 1), "gather")
    with pytest.raises(ProgramError, match="nothing of that edge is collected so"):
        changed(bare, lambda code: code.insert(1, wrong))()
    with pytest.raises(ProgramError, match="collects sum, sum"):
        made((EDGES[0]._replace(collects=(SUM, SUM)), EDGES[1]))
    with pytest.raises(ProgramError, match="3 replicas cannot divide the ops of stages by 2"):
        made(replicas=3)


def test_ranks_wait_for_each_other_at_a_collect_and_for_its_bytes():
    program = made((EDGES[0]._replace(collects=(SUM,)), EDGES[1]._replace(collects=())))
    waits = simulate(program, lambda action: {"F": 1.0, "B": 2.0}[action.kind])
    assert waits.spans.ends_s.max() == 12.0
    spans = [span for span in waits.spans if span.kind == "collect"]
    assert [span.start_s for span in spans if span.rank == 0] == [1.0, 3.0]
    assert (program.code.op == COLLECT).sum() == len(spans) == 4
    kind, link = DeviceKind("d", 2**34, (("float32", 1e12),), 1e11), Link(0.0, 8e6)
    cluster = Cluster((kind,), (Host("h", "d", 2),), link)
    found = simulate(program, lambda action: 1.0, cluster)
    (took_s,) = {span.end_s - span.start_s for span in found.spans if span.kind == "collect"}
    assert took_s == pytest.approx(cluster.sum_s(SUM.size_bytes, (0, 1)))
    assert found.spans.ends_s.max() == pytest.approx(8 + 2 * took_s)
