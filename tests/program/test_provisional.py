"""What is provisional can be done again: forwards, and what they read is provisional too."""

from functools import cache

from hypothesis import given

from penstock.program.program import Compute, Offload, Receive, Reload, Reshard, Send, Unshard
from penstock.program.provisional import provisional_ends, sent_until
from penstock.schedule import gpipe, one_f_one_b, zb_h2
from tests.program.lowering import lower_schedule
from tests.program.programs import programs


def expected(program) -> list[int]:
    """Return how many instructions of each rank are provisional, by asking back from each one."""
    codes = [list(code) for code in program.code]
    if any(isinstance(i, Offload | Reload | Unshard | Reshard) for code in codes for i in code):
        return [0] * len(codes)
    forward = {number for number, edge in enumerate(program.edges) if edge.kind == "F"}

    def reads(rank, at):
        """Return (edge, micro-batch, sender) of all that has to be there for a forward."""
        action, found = codes[rank][at].action, []
        ways = {}
        for one in codes[rank]:
            if isinstance(one, Receive) and one.edge in forward:
                ways.setdefault((one.edge, one.peer), []).append(one.of.micro_batch)
        for (edge, peer), numbers in ways.items():
            if program.edges[edge].target == action.stage and action.micro_batch in numbers:
                until = numbers.index(action.micro_batch) + 1
                found += [(edge, number, peer) for number in numbers[:until]]
        return found

    @cache
    def is_provisional(rank, at) -> bool:
        one = codes[rank][at]
        if at and not is_provisional(rank, at - 1):
            return False
        if isinstance(one, Receive):
            return True
        if isinstance(one, Send):
            return one.edge in forward
        if not isinstance(one, Compute) or one.action.kind != "F":
            return False
        for edge, number, sender in reads(rank, at):
            sent = next(
                place
                for place, other in enumerate(codes[sender])
                if isinstance(other, Send)
                and (other.edge, other.of.micro_batch, other.peer) == (edge, number, rank)
            )
            if not is_provisional(sender, sent):
                return False
        return True

    return [
        sum(is_provisional(rank, at) for at in range(len(code))) for rank, code in enumerate(codes)
    ]


@given(programs())
def test_ends_are_those_found_by_asking_back(program):
    ends = provisional_ends(program)
    assert (ends - program.code.offsets[:-1]).tolist() == expected(program)


@given(programs())
def test_all_that_provisional_forwards_read_is_sent_before(program):
    ends = provisional_ends(program)
    sent = sent_until(program, ends)
    for rank, code in enumerate(program.code):
        own = code[: int(ends[rank] - program.code.offsets[rank])]
        done = {one.action for one in own if isinstance(one, Compute)}
        for one in code:
            if isinstance(one, Receive) and program.edges[one.edge].kind == "F":
                target = program.edges[one.edge].target
                if any(a.stage == target and a.micro_batch == one.of.micro_batch for a in done):
                    assert sent[one.edge, one.peer, rank] > 0


def test_ranks_run_on_as_far_as_their_first_backward():
    for made, forwards in (
        (one_f_one_b(4, 8), [4, 3, 2, 1]),
        (gpipe(4, 8), [8, 8, 8, 8]),
        (zb_h2(4, 8), [7, 5, 3, 1]),
    ):
        program = lower_schedule(made)
        ends = provisional_ends(program) - program.code.offsets[:-1]
        own = [code[:end] for code, end in zip(program.code, ends.tolist(), strict=True)]
        assert [sum(isinstance(i, Compute) for i in code) for code in own] == forwards
