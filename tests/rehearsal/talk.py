"""Talk: two ranks over the rehearsal's NCCL, each thing tried once; rank 0 prints JSON.

Run it by torchrun, two ranks of one host.
"""

import json
from collections.abc import Callable
from typing import Any

from tests.rehearsal import cuda, nccl

# isort: split
import torch  # after the device

from penstock.runtime.launch import join_torchrun, torchrun_store
from penstock.transport import TensorSpec, Transport

ours = cuda.library
NUMBERS = 1024
nccl._LIMIT_S = 20.0


def crossing(end: Transport) -> dict[str, Any]:
    """Send each other a message before either receives one, a long compute being queued."""
    specs, peer = (TensorSpec((NUMBERS,), torch.float32),), 1 - end.rank
    send = end.bind_send(end.rank, peer, specs)
    post, wait = end.bind_receive(peer, peer, specs)
    end.barrier()
    assert post is not None
    send([torch.full((NUMBERS,), float(end.rank), device="cuda")])
    torch.ones(NUMBERS, device="cuda")  # the compute
    posted = newest_stream_of(post)
    is_behind = ours.rehearsal_is_behind(posted, cuda.current_stream().id)
    (came,) = wait()
    twice = came * 2
    del came  # its memory may be had again only once that is over
    return {"crossing": twice.tolist()[:1], "behind computes": bool(is_behind)}


def newest_stream_of(call: Callable[[], object]) -> int:
    """Return the stream of the communicator that a call gives something to do."""
    streams: list[int] = []
    issue = nccl.Communicator.issue

    def noted(own: nccl.Communicator, *given: Any) -> nccl.Work:
        streams.append(own.stream.id)
        return issue(own, *given)

    nccl.Communicator.issue = noted  # type: ignore[method-assign]
    call()
    nccl.Communicator.issue = issue  # type: ignore[method-assign]
    return streams[-1]


def extra_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that a call holds besides what was held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def collectives(end: Transport) -> dict[str, Any]:
    """Gather and sum flat tensors whose parts are alike, and not alike."""
    found, ranks = dict[str, Any](), (0, 1)
    for name, first in (("alike", NUMBERS // 2), ("unlike", NUMBERS // 4)):
        cuts = (0, first, NUMBERS)
        whole = torch.full((NUMBERS,), float(end.rank), device="cuda")
        gathered = extra_bytes(lambda whole=whole, cuts=cuts: end.all_gather(whole, cuts, ranks))
        is_whole = whole.tolist() == [0.0] * first + [1.0] * (NUMBERS - first)
        whole = torch.full((NUMBERS,), float(end.rank + 1), device="cuda")
        summed = extra_bytes(lambda whole=whole, cuts=cuts: end.reduce_scatter(whole, cuts, ranks))
        own = whole[cuts[end.rank] : cuts[end.rank + 1]]
        is_sum = own.tolist() == [3.0] * len(own)
        found[name] = {"right": is_whole and is_sum, "gather": gathered, "sum": summed}
    return found


def stopped(end: Any) -> dict[str, Any]:
    """Ask a group that was stopped for a sum: one that it had made before, and a new pair."""
    group, told = end._group((0, 1)), list[str]()
    group.abort()
    for call in (
        lambda: group.allreduce([torch.zeros(1, device="cuda")]),
        lambda: group.send([torch.zeros(1, device="cuda")], 1 - end.rank),
    ):
        try:
            call()
        except RuntimeError as problem:
            told.append(str(problem))
    return {"stopped": told}


def talk(end: Transport) -> dict[str, Any]:
    races = ours.rehearsal_races
    found = {**crossing(end), **collectives(end), **stopped(end)}
    found["races"] = [ours.rehearsal_race(number).decode() for number in range(races())]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        told = join_torchrun(lambda end: (talk(end), end.rank), torchrun_store())
    if told[1] == 0:
        print(json.dumps(told[0]))
