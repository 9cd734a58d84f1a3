"""What a loss puts into a container that comes again is found; what it does to its own is not."""

import itertools
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock as ps
from penstock.errors import JobError
from penstock.examine import data_check, kept_containers
from penstock.examine.data_check import check_data
from penstock.examine.kept_containers import WRITTEN, writes_kept_containers

STEPS = 6


def at(number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


@dataclass
class Record:
    x: Any
    calls: int = 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def job_of(data: Any, loss: Any, steps: int = STEPS) -> ps.Job:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return ps.Job(model, loss, data, optimizer, micro_batches=2, num_steps=steps)


def rows(make: Callable[[Tensor], Any], count: int = 3) -> Any:
    """Return data of a few objects that are made once, over and over."""
    made = [make(at(number)) for number in range(count)]

    def data(start: int) -> Iterator[Any]:
        return (made[number % count] for number in itertools.count(start))

    return data


def beside(kept: Any) -> Any:
    """Return data of fresh tuples with one object in each."""
    return lambda start: ((at(number), kept) for number in itertools.count(start))


def named(x: Tensor) -> dict[str, Any]:
    return {"x": x}


def fresh(start: int) -> Iterator[Any]:
    return (named(at(number)) for number in itertools.count(start))


def once(start: int) -> Iterator[Any]:
    """Yield objects that are made once, each in its turn."""
    return iter(ONCE[start:])


ONCE = [named(at(number)) for number in range(2 * STEPS)]


def refilled(start: int) -> Iterator[Any]:
    """Yield one dict with another tensor in it each time."""
    held = dict[str, Any]()
    for number in itertools.count(start):
        held["x"] = at(number)
        yield held


def mean_square(net: nn.Module, x: Tensor, scale: Any = 1.0) -> Tensor:
    return (net(x).square() * scale).mean()


def counts(net: nn.Module, batch: Any) -> Tensor:
    batch["calls"] = batch.get("calls", 0) + 1
    return mean_square(net, batch["x"], batch["calls"])


def counts_record(net: nn.Module, batch: Any) -> Tensor:
    batch.calls += 1
    return mean_square(net, batch.x, batch.calls)


def grows(net: nn.Module, batch: Any) -> Tensor:
    batch["x"] = 1.1 * batch["x"]
    return mean_square(net, batch["x"])


def keeps_features(net: Any, batch: Any) -> Tensor:
    if "features" not in batch:
        batch["features"] = net[0](batch["x"]).detach()
    return net[1:](batch["features"]).square().mean()


def appends(net: nn.Module, batch: Any) -> Tensor:
    batch[1].append(1)
    return mean_square(net, batch[0], len(batch[1]))


def averages(net: nn.Module, batch: Any) -> Tensor:
    told, bag = net(batch[0]), batch[1]["inner"]
    bag["mean"] = 0.9 * bag.get("mean", 0.0) + told.detach().mean()
    return (told - bag["mean"]).square().mean()


def widens(net: nn.Module, batch: Any) -> Tensor:
    batch["x"] = batch["x"].float()
    return mean_square(net, batch["x"])


def sets_default(net: nn.Module, batch: Any) -> Tensor:
    scale = batch.setdefault("scale", batch["x"].abs())
    return mean_square(net, batch["x"].float(), scale.mean())


def notes(net: nn.Module, batch: Any) -> Tensor:
    """Write what nobody reads before it is written again."""
    batch["out"] = net(batch["x"])
    return batch["out"].square().mean()


def takes_out(net: nn.Module, batch: Any) -> Tensor:
    return mean_square(net, batch.pop("x"))


def reads(net: nn.Module, batch: Any) -> Tensor:
    return mean_square(net, batch["x"])


def refills(net: nn.Module, batch: Any) -> Tensor:
    batch["x"] *= 2
    return counts(net, batch)


def doubled(x: Tensor) -> Any:
    return named(x.double())


FOUND = {
    "a count in a dict": (rows(named), counts),
    "a count in a UserDict": (rows(lambda x: UserDict(x=x)), counts),
    "a count in an OrderedDict": (rows(lambda x: OrderedDict(x=x)), counts),
    "a count in a dataclass": (rows(Record), counts_record),
    "an entry that grows": (rows(named), grows),
    "features of older weights": (rows(named), keeps_features),
    "a list beside": (beside([]), appends),
    "a dict in a dict": (beside({"inner": {}}), averages),
    "one dict, refilled": (refilled, counts),
    "an entry that is gone": (rows(named), takes_out),
    "a count, first read after nine others": (rows(named, 10), counts),
}
FINE = {
    "nothing written": (rows(named), reads),
    "another dtype": (rows(doubled), widens),
    "a default of the batch alone": (rows(named), sets_default),
    "what is written before it is read": (rows(named), notes),
    "a count in what is made each time": (fresh, counts),
    "an entry taken out of what is made each time": (fresh, takes_out),
    "a count in what comes once": (once, counts),
    "an entry of what is refilled": (refilled, grows),
    "arrays of another dtype": (rows(lambda x: named(x.double().numpy())), widens),
    "a tuple": (rows(lambda x: (x, ())), lambda net, batch: mean_square(net, batch[0])),
}


@pytest.mark.parametrize(("data", "loss"), FOUND.values(), ids=FOUND)
def test_what_the_loss_puts_into_a_container_that_comes_again_is_found(data, loss):
    told = check_data(job_of(data, loss), per_step=2)
    assert WRITTEN in told.problem
    assert "dict(batch)" in told.problem
    assert "test_kept_containers.py:" in told.keeps
    assert WRITTEN in told.keeps


@pytest.mark.parametrize(("data", "loss"), FINE.values(), ids=FINE)
def test_what_makes_no_difference_when_it_comes_again_is_let_pass(data, loss):
    told = check_data(job_of(data, loss), per_step=2)
    assert told.problem is None
    assert told.keeps == ""


def test_what_is_lost_with_arrays_is_refused():
    """A dict with arrays is copied, as tensors, in one process too."""
    data = rows(lambda x: named(x.numpy()))
    with pytest.raises(JobError) as problem:
        check_data(job_of(data, counts), per_step=2)
    assert problem.value.message == WRITTEN
    assert "dict(batch)" in problem.value.hint


@pytest.mark.parametrize("loss", [counts, lambda net, batch: mean_square(net, batch["x"])])
def test_the_authors_own_module_stays_as_it_is_where_nothing_can_be_forked(loss, monkeypatch):
    for room in data_check, kept_containers:
        monkeypatch.setattr(room, "can_fork", lambda: False)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    job = replace(job_of(rows(named), loss), model=lambda: net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with suppress(JobError):
        check_data(job, per_step=2)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_dict_without_arrays_beside_one_with_some_is_the_data_s_own():
    bag = dict[str, Any]()
    data = lambda start: ((at(n).numpy(), {"inner": bag}) for n in itertools.count(start))  # noqa: E731
    assert WRITTEN in check_data(job_of(data, averages), per_step=2).problem


def test_tensors_written_in_place_are_told_as_memory():
    told = check_data(job_of(rows(named), refills), per_step=2).problem
    assert "memory" in told
    assert WRITTEN not in told


@given(st.integers(1, 9), st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_a_container_counts_only_if_the_run_comes_to_it_twice(count, left):
    kept = writes_kept_containers(job_of(rows(named, count), counts), 0, left)
    assert kept == (left > count)


def test_objects_of_a_large_dataset_come_again_where_data_begins_anew():
    data = rows(named, 100)
    assert writes_kept_containers(job_of(data, counts), 0, 120)
    assert not writes_kept_containers(job_of(data, widens), 0, 120)


def plain(data: Any, loss: Any) -> list[float]:
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    told, batches = list[float](), data(0)
    for _ in range(STEPS):
        parts = [loss(net, next(batches)) / 2, loss(net, next(batches)) / 2]
        sum(parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(float(sum(parts).detach()))
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_whose_loss_counts_in_its_dataset_trains_as_the_plain_loop_does(ranks, tmp_path):
    found = list[float]()
    job = job_of(rows(named), counts)
    trained = ps.train(
        job, ranks=ranks, out=tmp_path, on_step=lambda row: found.append(row["loss"]), listener=None
    )
    assert trained.plan is None
    assert found == pytest.approx(plain(rows(named), counts), rel=1e-5)
    with pytest.raises(JobError, match="keeps in Python"):
        ps.train(job, out=tmp_path, resume=True, num_steps=2 * STEPS, listener=None)
