"""Referee: whose gradients are taken, in which order, and who may go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RunError
from penstock.referee import Referee, ServedAnswer, ServedUpdate
from penstock.sums import sums_way


def taken(follows):
    return [row for row in follows if isinstance(row, ServedUpdate)]


def told(follows):
    return [row.rank for row in follows if isinstance(row, ServedAnswer)]


def test_the_slowest_rank_is_left_out_and_gets_the_weights_that_are_there():
    referee = Referee(sums_way("backup:1"), 3, 0)
    assert [*referee.push(2, 0, 0)] == []
    follows = [*referee.push(0, 0, 0)]
    assert taken(follows) == [ServedUpdate(0, 0, (0, 2), 0)]
    assert told(follows) == [0, 2]
    assert taken([*referee.push(0, 1, 1), *referee.push(2, 1, 1)]) == [
        ServedUpdate(1, 1, (0, 2), 1)
    ]
    late = [*referee.push(1, 0, 0)]
    assert (taken(late), told(late), referee.version) == ([], [1], 2)
    assert taken([*referee.push(1, 2, 2), *referee.push(0, 2, 2)]) == [
        ServedUpdate(2, 2, (0, 1), 2)
    ]


def test_no_rank_begins_a_step_further_ahead_than_its_bound():
    referee = Referee(sums_way("ssp:1"), 2, 0)
    assert told([*referee.push(0, 0, 0)]) == [0]
    assert told([*referee.push(0, 1, 1)]) == []  # it is 2 steps ahead of the other one
    follows = [*referee.push(1, 0, 0)]
    assert taken(follows) == [ServedUpdate(2, 0, (1,), 0)]
    assert follows[0].staleness == 2
    assert told(follows) == [0, 1]


def test_a_rank_that_is_done_holds_nobody_up():
    referee = Referee(sums_way("ssp:0"), 2, 0)
    assert told([*referee.push(0, 0, 0)]) == []
    assert told([*referee.leave(1)]) == [0]
    assert told([*referee.push(0, 1, 1)]) == [0]


def test_checkpoints_wait_for_all_and_then_all_have_the_same_weights():
    referee = Referee(sums_way("async"), 2, 0)
    assert told([*referee.push(0, 0, 0)]) == [0]
    assert [*referee.save(0)] == []
    assert told([*referee.push(1, 0, 0)]) == [1]
    assert [*referee.save(1)] == [ServedAnswer(0, is_still=True), ServedAnswer(1, is_still=True)]


def test_a_checkpoint_where_the_other_run_wrote_none_is_refused():
    script = [
        ServedUpdate(0, 0, (0,), 0),
        ServedUpdate(1, 0, (1,), 0),
        ServedUpdate(2, 1, (1,), 2),
        ServedUpdate(3, 1, (0,), 3),
    ]
    referee = Referee(sums_way("async"), 2, 0, script)
    assert told([*referee.push(0, 0, 0)]) == []  # it is to read what comes after three updates
    assert told([*referee.push(1, 0, 0)]) == [1]
    with pytest.raises(RunError, match="a checkpoint after 2 updates") as problem:
        [*referee.save(1)]
    assert "checkpoint_every" in problem.value.hint


@given(st.sampled_from(["backup:1", "backup:2", "ssp:0", "ssp:2", "async"]), st.data())
def test_ranks_in_any_order_come_to_their_end_and_are_replayed_in_any_other(text, data):
    way, ranks, steps = sums_way(text), 4, 5
    rows = play(way, ranks, steps, (), data)
    assert [row.version for row in rows] == [*range(len(rows))]
    assert play(way, ranks, steps, rows, data) == rows
    done = [0] * ranks
    for row in rows:
        if way.kind == "backup":
            assert len(row.ranks) == ranks - way.amount
            continue
        (rank,) = row.ranks
        if way.kind == "ssp":
            assert row.step - min(done) <= way.amount
        done[rank] += 1
    assert done == [0 if way.kind == "backup" else steps] * ranks


def play(way, ranks, steps, script, data):
    """Return the decisions of a run whose ranks come in an order that is drawn."""
    referee, rows = Referee(way, ranks, 0, script), []
    at, read, ready = [0] * ranks, [0] * ranks, set(range(ranks))
    while referee.done:
        rank = data.draw(st.sampled_from(sorted(ready)))
        ready.discard(rank)
        is_over = at[rank] >= steps
        follows = referee.leave(rank) if is_over else referee.push(rank, at[rank], read[rank])
        for row in follows:
            if isinstance(row, ServedUpdate):
                rows.append(row)
                continue
            ready.add(row.rank)
            read[row.rank] = referee.version
            at[row.rank] = referee.version if way.kind == "backup" else at[row.rank] + 1
    return tuple(rows)
