"""What ranks over gloo promise beyond what every transport does."""

import gc
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from penstock._compat import memory_profile
from penstock.transport import TensorSpec, torch_distributed
from tests.transport.transport_ranks import Outcome, run_gloo, values

SPEC = (TensorSpec((4,), torch.float32),)


@pytest.mark.parametrize("how", ["receive", "send", "sum", "pair"])
@pytest.mark.sampled(2)
def test_killed_rank_fails_all_others(how):
    def body(end):
        if end.rank == 2:
            end.bind_send(0, 0, SPEC)
            end.bind_receive(1, 0, SPEC)
            end.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if end.rank == 1:  # waits for rank 0, which waits for the dead
            _, wait = end.bind_receive(2, 0, SPEC)
            end.barrier()
            wait()
        end.bind_send(2, 1, SPEC)
        _, wait = end.bind_receive(0, 2, SPEC)
        send = end.bind_send(1, 2, SPEC)
        end.barrier()
        if how == "receive":
            wait()
        elif how == "send":
            for _ in range(9):
                send([torch.zeros(4)])
        elif how == "sum":
            end.all_reduce(torch.zeros(4), (0, 1, 2))
        else:
            end.all_reduce(torch.zeros(4), (0, 2))

    outcomes = run_gloo(3, body, groups=[(0, 2)])
    assert outcomes[2] == Outcome(signal=signal.SIGKILL)
    for outcome in outcomes[:2]:
        assert outcome.error.startswith("TransportError: rank "), outcome
        if how != "sum":
            assert outcome.error.startswith("TransportError: rank 2 died or cannot be reached")


def test_as_many_messages_as_slots_are_sent_without_a_receive():
    def body(end):
        send, (_, wait) = (
            end.bind_send(0, 1 - end.rank, SPEC),
            end.bind_receive(0, 1 - end.rank, SPEC),
        )
        end.barrier()
        for number in range(6):
            send([torch.full((4,), float(number))])
        got = [wait()[0][0].item() for _ in range(6)]
        end.barrier()
        end.close()
        return got

    assert values(run_gloo(2, body, slots=6)) == [list(range(6))] * 2


def test_groups_that_overlap_are_connected_on_all_ranks() -> None:
    """As two replicas of two stages need them."""
    groups = [(0, 1), (0, 1, 2, 3), (0, 2), (1, 3), (2, 3)]

    def body(end):
        found = []
        for ranks in groups:
            if end.rank in ranks:
                own = torch.tensor([float(end.rank)])
                end.all_reduce(own, ranks)
                found.append(own.item())
        if end.rank == 0:
            with pytest.raises(ValueError, match=r"the ranks \(0, 3\) are none of the groups"):
                end.all_reduce(torch.zeros(1), (0, 3))
        end.barrier()
        return found

    sums = [[sum(ranks) for ranks in groups if rank in ranks] for rank in range(4)]
    assert values(run_gloo(4, body, groups=groups)) == sums


def test_torch_distributed_goes_on_after_close():
    def body(end):
        end.barrier()
        end.close()
        own = torch.ones(2)
        dist.all_reduce(own)
        dist.destroy_process_group()
        return own.tolist()

    assert values(run_gloo(2, body)) == [[2.0, 2.0]] * 2


def test_message_that_nobody_reads_does_not_keep_ranks_from_leaving():
    def body(end):
        send = end.bind_send(0, 1 - end.rank, SPEC)
        end.barrier()
        send([torch.zeros(4)])
        end.close()

    values(run_gloo(2, body))


def test_message_moves_when_its_receive_is_posted_and_not_only_when_it_is_waited_for():
    specs = (TensorSpec((2**21,), torch.float32),)  # 8 MiB: more than sockets hold

    def body(end):
        if end.rank == 0:
            send = end.bind_send(0, 1, specs)
            end.barrier()
            send([torch.ones(2**21)])
            send([torch.zeros(2**21)])  # there is one slot: the first message has left it
            end.barrier()
            end.barrier()
            return 0.0
        post, wait = end.bind_receive(0, 0, specs)
        end.barrier()
        post()
        end.barrier()
        total = float(wait()[0].sum() + wait()[0].sum())
        end.barrier()
        return total

    assert values(run_gloo(2, body, slots=1)) == [0.0, 2.0**21]


@pytest.mark.long
def test_message_that_is_begun_under_a_profiler_may_outlive_it():
    specs = (TensorSpec((16,), torch.float32),)

    def body(end):
        send = end.bind_send(0, 1 - end.rank, specs)
        _, wait = end.bind_receive(0, 1 - end.rank, specs)
        end.barrier()
        with memory_profile():
            send([torch.ones(16)])
            total = float(wait()[0].sum())
        del send, wait
        end.close()
        end._sent.clear()
        gc.collect()
        return total

    assert values(run_gloo(2, body)) == [16.0, 16.0]


class Endless:
    """A sum whose connections broke as it began: it never ends, and nobody says so."""

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def test_a_sum_that_a_failure_leaves_without_an_end_is_not_waited_for():
    def body(end):
        end.barrier()
        end.abort("a member was lost")
        end._await_sum(Endless())

    for outcome in run_gloo(2, body):
        assert "a member was lost" in str(outcome.error)


def test_a_sum_that_is_looked_at_before_it_ends_is_still_a_sum(monkeypatch):
    """However often, and if it ends just as it is looked at."""
    monkeypatch.setattr(torch_distributed, "_STUCK", timedelta(milliseconds=2))
    monkeypatch.setattr(Endless, "is_completed", lambda work: True)

    def body(end):
        if end.rank == 1:
            time.sleep(0.1)
        own = torch.full((100_000,), float(end.rank + 1))
        end.all_reduce(own, (0, 1))
        end._await_sum(Endless())
        texts = end.all_gather_bytes(b"%d" % end.rank, (0, 1))
        end.barrier()
        end.close()
        return [own.unique().tolist(), [text.decode() for text in texts]]

    assert values(run_gloo(2, body)) == [[[3.0], ["0", "1"]]] * 2
