"""Looked at: what the rehearsal device notices, each thing tried once; printed as JSON."""

import json
import os
from collections.abc import Callable

from tests.rehearsal import cuda

# isort: split
import torch  # after the device
from torch import Tensor

ours = cuda.library
found: dict[str, object] = {}


def syncs_of(call: Callable[[], object]) -> int:
    before = ours.rehearsal_syncs()
    call()
    return ours.rehearsal_syncs() - before


def pageable_of(call: Callable[[], object]) -> int:
    before = ours.rehearsal_pageable()
    call()
    return ours.rehearsal_pageable() - before


def races_of(call: Callable[[], object]) -> list[str]:
    before = ours.rehearsal_races()
    call()
    return [ours.rehearsal_race(n).decode() for n in range(before, ours.rehearsal_races())]


def problem_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as problem:
        is_short = isinstance(problem, torch.OutOfMemoryError)
        return type(problem).__name__ if is_short else str(problem)
    return ""


def on_side(then: Callable[[Tensor, torch.cuda.Stream], None]) -> Callable[[], None]:
    def call() -> None:
        side, made = torch.cuda.Stream(), torch.ones(8, device="cuda")
        then(made, side)
        torch.cuda.synchronize()

    return call


def unordered(made: Tensor, side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        made.sum()


def ordered(made: Tensor, side: torch.cuda.Stream) -> None:
    side.wait_stream(torch.cuda.current_stream())
    unordered(made, side)


def given_back(recorded: bool) -> Callable[[], None]:
    def call() -> None:
        side, kept = torch.cuda.Stream(), [torch.ones(8, device="cuda")]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept[0].sum()
        if recorded:
            kept[0].record_stream(side)
        kept.clear()
        torch.cuda.synchronize()

    return call


a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="cuda")
x = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
(x * x).sum().backward()
assert x.grad is not None
found |= {"product": (a @ a).tolist(), "gradient": x.grad.tolist(), "kind": str(a.device)}
found |= {"unordered": races_of(on_side(unordered)), "ordered": races_of(on_side(ordered))}
found |= {"freed": races_of(given_back(False)), "recorded": races_of(given_back(True))}
found |= {
    "syncs of item": syncs_of(lambda: a.sum().item()),
    "syncs of add": syncs_of(lambda: a + 1),
}
plain, pinned = torch.ones(4), torch.empty(4, pin_memory=True).fill_(1.0)
found["pageable"] = {
    "plain": pageable_of(lambda: plain.to("cuda", non_blocking=True)),
    "pinned": pageable_of(lambda: pinned.to("cuda", non_blocking=True)),
}
found["syncs of pinned"] = syncs_of(lambda: pinned.to("cuda", non_blocking=True))
found["two devices"] = problem_of(lambda: a + torch.ones(2, 2, device="cuda:1"))
found["cpu and device"] = problem_of(lambda: a + torch.ones(2, 2))
found["empty"] = str(torch.empty(1, device="cuda").item())
a = x = torch.empty(0)  # give their memory back
room = torch.zeros(1024, device="cuda")
found["live"] = [ours.rehearsal_live(0), ours.rehearsal_live(1)]
found["too large"] = problem_of(lambda: torch.empty(1 << 21, device="cuda"))


def drawn(device: str) -> Tensor:
    return torch.rand(4, device=device).cpu()


torch.manual_seed(3)
first, host = drawn("cuda:0"), torch.rand(4)
torch.manual_seed(3)
found["drawn again"] = bool((drawn("cuda:0") == first).all())
found["host's draws as before"] = bool((torch.rand(4) == host).all())
torch.cuda.manual_seed(7)
found["drawn on the other"] = bool((drawn("cuda:0") == drawn("cuda:1")).all())
receiver, sender = os.pipe()
if (child := os.fork()) == 0:
    os.write(sender, problem_of(lambda: torch.cuda.synchronize()).encode())
    os._exit(0)
os.waitpid(child, 0)
found["fork"] = os.read(receiver, 4096).decode()
print(json.dumps(found))
