"""Sides take turns, quiet blocks are kept, and ranks of a bench answer or fail together."""

import os
import signal

import pytest

from bench.measure import Block, Turns, chosen_of, figure, in_ranks, quiet, take_turns
from penstock.transport.threads import thread_transports

ALWAYS, NEVER = float("inf"), -1.0


def alone():
    (end,) = thread_transports(1)
    return end


def played(turns: Turns, seldom: tuple[str, ...] = ()):
    """Let three sides that note their names take turns; return (order of calls, blocks)."""
    order: list[str] = []

    def side(name):
        return lambda: order.append(name) or f"{name} {len(order)}"

    sides = {name: side(name) for name in "abc"}
    return order, take_turns(sides, alone(), turns, seldom)


def blocks_of(calls: list[str]) -> str:
    """Return the order of blocks, the two steps of warm-up of each side left out."""
    rest = calls[6:]
    return "".join(now for now, last in zip(rest, ["", *rest], strict=False) if now != last)


def test_sides_go_there_and_back_until_each_has_enough():
    order, blocks = played(Turns(wanted=3, limit=9, block_s=0.0, max_other=ALWAYS))
    assert order[6:] == list("abccbaabc")
    assert {name: len(row) for name, row in blocks.items()} == {"a": 3, "b": 3, "c": 3}
    assert blocks_of(order) == "abcbabc"


def test_noise_ends_after_the_limit_of_turns():
    _, blocks = played(Turns(wanted=1, limit=4, block_s=0.0, max_other=NEVER))
    assert {len(row) for row in blocks.values()} == {4}


def test_seldom_sides_sit_out_two_turns_of_three():
    turns = Turns(wanted=6, limit=9, block_s=0.0, max_other=ALWAYS)
    _, blocks = played(turns, seldom=("c",))
    assert {name: len(row) for name, row in blocks.items()} == {"a": 6, "b": 6, "c": 2}


def test_block_holds_a_time_and_a_note_for_each_step():
    _, blocks = played(Turns(wanted=2, limit=2, block_s=1e-3, max_other=ALWAYS))
    for block in blocks["b"]:
        assert len(block.step_s) == len(block.notes) >= 1
        assert all(seconds >= 0 for seconds in block.step_s)
        assert all(note.startswith("b ") for note in block.notes)
        assert block.cpu_s >= 0
        assert block.other >= 0


def block(step_s: float, other: float, cpu_s: float = 1.0) -> Block:
    return Block((step_s,), cpu_s, other, (step_s,))


def test_figure_is_of_quiet_blocks_only():
    rows = [block(1.0, 0.05), block(2.0, 0.1), block(3.0, 0.0, cpu_s=5.0), block(99.0, 0.2)]
    found = figure(rows, Turns(max_other=0.1))
    assert found == (2.0, 1.0, 3.0, 1.0, 3, 4)


def test_tenths_of_many_steps():
    one = Block(tuple(float(k) for k in range(101)), 1.0, 0.0, ())
    assert figure([one], Turns())[:3] == (50.0, 10.0, 90.0)


def test_quietest_quarter_stands_in_where_nothing_was_quiet():
    rows = [block(float(k), other=1.0 - k / 10) for k in range(8)]
    turns = Turns(max_other=0.1)
    assert quiet(rows, turns) == []
    assert chosen_of(rows, turns) == [rows[7], rows[6]]
    assert figure(rows, turns)[4:] == (0, 8)


def test_ranks_answer_in_their_order():
    assert in_ranks(lambda rank, folder: [rank, folder.is_dir()], 3) == [
        [r, True] for r in range(3)
    ]


def test_ranks_share_a_folder_that_is_gone_afterwards():
    first, second = in_ranks(lambda rank, folder: str(folder), 2)
    assert first == second
    assert not os.path.exists(first)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_rank_that_fails_ends_the_others(how, capfd):
    def work(rank, folder):
        if rank == 0:
            while True:
                signal.pause()
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such luck")

    with pytest.raises(SystemExit, match="rank 1 of the bench failed"):
        in_ranks(work, 2)
    assert ("no such luck" in capfd.readouterr().err) == (how == "raises")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
