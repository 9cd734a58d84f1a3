"""Jobs that `penstock train` and `penstock check` are tried on."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

from torch import Tensor, nn

import penstock as ps
from tests.cli import mlp


class Branches(nn.Module):
    """A module that no tracer can follow: which way it goes depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(mlp.WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            y = 2 * y
        return y


def small() -> ps.Job:
    return replace(
        mlp.job(),
        num_steps=5,
        clip_norm=1.0,
        validation=lambda: [next(mlp.data(1000 + i)) for i in range(3)],
        facts=lambda: {"answer": 42.0},
    )


def steps_of_rank() -> ps.Job:
    """A job of which each rank has another number of steps."""
    return replace(small(), num_steps=5 + int(os.environ["RANK"]))


def model_of_rank() -> ps.Job:
    """A job of which each rank has another model."""
    more = [nn.Linear(1, 1) for _ in range(int(os.environ["RANK"]))]
    return replace(small(), model=lambda: nn.Sequential(mlp.model(), *more))


def data_of_rank() -> ps.Job:
    """A job of which each rank reads other micro-batches: it divides them itself."""
    own = 1000 * int(os.environ["RANK"])
    return replace(small(), data=lambda start: mlp.data(start + own))


def packed() -> ps.Job:
    """A job whose messages may have 8 bits a number."""
    return replace(small(), wire_bits=8)


def untraceable() -> ps.Job:
    return replace(small(), model=Branches)


def ends() -> ps.Job:
    """A job whose data ends in its third step."""
    return replace(small(), data=lambda start: islice(mlp.data(start), max(0, 10 - start)))


def _short(start: int) -> Iterator[dict[str, Tensor]]:
    for index in count(start):
        batch = next(mlp.data(index))
        yield batch if index < 9 else {name: value[:3] for name, value in batch.items()}


def odd_batch() -> ps.Job:
    """A job whose tenth micro-batch has fewer samples."""
    return replace(small(), data=_short)


def killed() -> ps.Job:
    """A job of which the process of one rank is killed in its second step."""
    home = os.getpid()

    def data(start: int) -> Iterator[dict[str, Tensor]]:
        for index in count(start):
            if index == 5 and os.getpid() != home:
                os.kill(os.getpid(), signal.SIGKILL)
            yield next(mlp.data(index))

    return replace(small(), data=data)


def wrong_gradient() -> ps.Job:
    """A job whose loss changes from call to call: the plain step cannot be repeated."""
    calls = count()

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return mlp.loss(module, batch) * (1.0 + next(calls))

    return replace(small(), loss=loss)


def dropout() -> ps.Job:
    def model() -> nn.Module:
        blocks = [
            nn.Sequential(nn.Linear(mlp.WIDTH, mlp.WIDTH), nn.ReLU(), nn.Dropout(0.3))
            for _ in range(5)
        ]
        return nn.Sequential(*blocks, nn.Linear(mlp.WIDTH, 1))

    return replace(small(), model=model)


def unclipped() -> ps.Job:
    return replace(dropout(), clip_norm=None)


def empty() -> ps.Job:
    """A job that has no data at all."""
    return replace(small(), data=lambda start: iter(()))


def _told(start: int) -> Iterator[dict[str, Tensor]]:
    for batch in mlp.data(start):
        print("reading")
        yield batch


def _dripping(start: int) -> Iterator[dict[str, Tensor]]:
    for batch in mlp.data(start):
        time.sleep(0.05)
        yield batch


def dripping() -> ps.Job:
    """A job that waits for its data most of the time."""
    return replace(small(), data=_dripping)


def chatty() -> ps.Job:
    """A job that prints."""
    print("made")
    return replace(small(), data=_told)


def _taken(told: int) -> bool:
    try:
        return bool(os.read(told, 1))
    except BlockingIOError:
        return False


def _signalled(*signals: signal.Signals, at: int = 9) -> ps.Job:
    """A job whose leading process gets signals when a rank first reads micro-batch `at`."""
    home = os.getpid()
    told, tell = os.pipe2(os.O_NONBLOCK)
    os.write(tell, b"!")

    def data(start: int) -> Iterator[dict[str, Tensor]]:
        for index in count(start):
            if index == at and os.getpid() != home:
                for number in signals if _taken(told) else ():
                    os.kill(home, number)
                    time.sleep(0.05)
            yield next(mlp.data(index))

    return replace(small(), data=data, num_steps=6)


def interrupted() -> ps.Job:
    return _signalled(signal.SIGINT)


def killed_at_once() -> ps.Job:
    return replace(_signalled(signal.SIGTERM, signal.SIGTERM), model=Branches)


def terminated_eagerly() -> ps.Job:
    return replace(_signalled(signal.SIGTERM), model=Branches)


def unsignalled() -> ps.Job:
    return _signalled()


def unsignalled_eagerly() -> ps.Job:
    return replace(_signalled(), model=Branches)


def written() -> ps.Job:
    """A job whose writer prints the rows."""
    return replace(small(), model=Branches, writers=[lambda row: print(f"row {row}")])


def _rooted(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (mlp.loss(module, batch) - 1e9 * (batch["x"][0, 0] > 100)).sqrt()


def _spoilt(start: int) -> Iterator[dict[str, Tensor]]:
    for index in count(start):
        batch = next(mlp.data(index))
        yield {**batch, "x": batch["x"] + 1000} if index == 9 else batch


def not_finite() -> ps.Job:
    """A job that takes a root of a negative number in its third step."""
    return replace(small(), loss=_rooted, data=_spoilt)


def _figured(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return mlp.loss(module, batch), {"size": batch["x"].abs().mean(), "gap": 1 / batch["x"].sum()}


def figured() -> ps.Job:
    """A job with figures beside the loss, of which one is no number, validated on the way."""

    def data(start: int) -> Iterator[dict[str, Tensor]]:
        for index, batch in zip(count(start), mlp.data(start), strict=False):
            yield {**batch, "x": 0 * batch["x"]} if index == 5 else batch

    return replace(small(), loss=_figured, data=data, validate_every=2)


def dies_on_rank_1() -> ps.Job:
    """A job that kills the process of one rank as soon as its model is made."""

    def model() -> nn.Module:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return mlp.model()

    return replace(small(), model=model)
