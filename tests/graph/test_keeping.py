"""What stages can choose to keep or to repeat."""

from penstock.graph.keeping import keepings_of
from tests.search.chains import chain


def test_stage_can_repeat_what_it_made_and_only_keep_what_it_received() -> None:
    graph = chain([1] * 6, [10, 20, 30, 40, 50, 60])
    y = [i for i, node in enumerate(graph.nodes) if node.name[0] == "y"]
    first, second = keepings_of(graph, [2])
    assert (first.asked, second.asked) == ({y[0], y[1]}, {y[2], y[3], y[4], y[5] + 1})
    assert second.made == {y[2]: None} | {op: op for op in (*y[3:], y[5] + 1)}
    assert second.reads[y[3]] == (y[2],)
    assert second.followed([y[4]]) == ({y[4]}, {y[2], y[3], y[5] + 1})
    assert second.held_bytes({y[2], y[3]}) == 30 + 40
    assert second.followed([y[5]]) == (set(), second.asked)  # nobody reads it


def test_what_crosses_the_ends_of_blocks_is_only_kept() -> None:
    graph = chain([1] * 6, [10] * 6)
    (whole,), (parted,) = (keepings_of(graph, (), ends) for ends in ((), (1, 3)))
    apart = {v for v in parted.made if parted.made[v] is None and whole.made[v] is not None}
    assert {graph.nodes[v].name for v in apart} == {"y1", "y3"}
