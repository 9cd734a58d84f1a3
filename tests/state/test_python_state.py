"""What a job keeps in Python goes into a checkpoint, and back into the very objects."""

import random
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from penstock.batches import InOrder
from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.errors import CheckpointError, JobError
from penstock.job import Job
from penstock.prove.plain import Plain
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes
from penstock.state.optimizer.optimizer import undividable
from penstock.state.python_state import packed, put_named, take_named
from tests.parity.optimizing import MICRO_BATCHES, STEPS, Net, data, loss, run_of, windows_from
from tests.parity.training import differing, train


class Counter:
    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(2)

    def state_dict(self) -> dict:
        return {"calls": self.calls, "mean": self.mean}

    def load_state_dict(self, state: dict) -> None:
        self.calls = state["calls"]
        self.mean.copy_(state["mean"])

    def next(self) -> int:
        self.calls += 1
        self.mean += self.calls
        return self.calls


class Telling(Net):
    """It tells its own extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict) -> None:
        self.calls = state["calls"]


def job_of(state=None, loss=loss, optimizer=None, model=Net, **options) -> Job:
    make = optimizer or (lambda weights: SGD(weights, lr=0.1))
    about = {"micro_batches": MICRO_BATCHES, "seed": 5, "state": state or {}}
    return Job(model, loss, data, make, **about, **options)


def things() -> dict[str, object]:
    return {
        "counter": Counter(),
        "torch": torch.Generator().manual_seed(3),
        "python": random.Random(3),
        "numpy": np.random.default_rng(3),
        "older": np.random.RandomState(3),
        "tensor": torch.ones(3),
        "dict": {"h": torch.zeros(2), "n": 1, 3: (1, [2.5, float("inf")])},
        "list": [torch.zeros(2), torch.zeros(())],
        "deque": deque([1, 2]),
        "module": nn.Linear(2, 2),
    }


def move(state: dict) -> list:
    """Move all of them, and return what they give."""
    with torch.no_grad():
        state["tensor"].add_(1)
        state["dict"]["h"] = state["dict"]["h"] + 1
        state["dict"]["n"] += 1
        state["list"][0].add_(1)
        state["deque"].append(len(state["deque"]))
        state["module"].weight.add_(1)
    return [
        state["counter"].next(),
        torch.rand(2, generator=state["torch"]).tolist(),
        state["python"].random(),
        float(state["numpy"].random()),
        float(state["older"].random()),
        state["tensor"].tolist(),
        [
            value.tolist() if isinstance(value, torch.Tensor) else value
            for value in state["dict"].values()
        ],
        [value.tolist() for value in state["list"]],
        list(state["deque"]),
        state["module"].weight.tolist(),
    ]


@pytest.mark.parametrize("way", ["file", "message"])
def test_everything_that_may_be_named_goes_on(way, tmp_path):
    state, model = things(), Net()
    move(state)
    tensors, plain = {}, {}
    if way == "file":
        put_named(job_of(state), model, tensors, plain)
        checkpoint.write_part(tmp_path, 1, 0, (tensors, plain))
        plain = msgspec.json.decode(msgspec.json.encode(plain))
        tensors = {key: value.detach().clone() for key, value in tensors.items()}
    else:
        plain = msgspec.json.decode(msgspec.json.encode(packed(job_of(state))))
    new = things()
    held = new["tensor"], new["list"][0], new["dict"], new["module"].weight
    take_named(job_of(new), model, tensors, plain)
    assert move(new) == move(state)
    assert all(
        one is other
        for one, other in zip(
            held, (new["tensor"], new["list"][0], new["dict"], new["module"].weight), strict=True
        )
    )


def test_what_has_no_state_is_refused_with_a_way_to_keep_it():
    for one in (iter([1]), Counter, 3, None):
        with pytest.raises(JobError, match=r'Job.state\["calls"\]') as refused:
            job_of({"calls": one})
        assert "state_dict()" in refused.value.hint
    with pytest.raises(JobError, match="which is none"):
        job_of({"a/b": Counter()})
    with pytest.raises(JobError, match="not objects by name"):
        job_of([Counter()])


def test_what_cannot_be_saved_is_named():
    with pytest.raises(CheckpointError, match="state/seen of the job holds a function"):
        put_named(job_of({"seen": {"f": test_what_cannot_be_saved_is_named}}), Net(), {}, {})


# -- runs -----------------------------------------------------------------------------------------


def eagerly(make, folder: Path, parts=((0, 3), (3, STEPS - 3))) -> checkpoint.Checkpoint:
    """Train in parts, each with a job of its own."""
    for first, steps in parts:
        task = EagerTask(make(), first, steps, checkpoint.latest(folder), policy=SavePolicy(folder))
        run_processes(partial(work_eagerly, task), 1, lambda step: None)
    return checkpoint.load(checkpoint.latest(folder))


def counting() -> Job:
    counter = Counter()
    return job_of({"calls": counter}, lambda m, b: loss(m, b) / (1 + counter.next() / 20))


def carrying() -> Job:
    carried = {"last": torch.zeros(())}

    def carries(model, batch):
        found = loss(model, batch)
        result = found + 0.1 * found * carried["last"]
        carried["last"] = found.detach()
        return result

    return job_of({"carried": carried}, carries)


def drawing() -> Job:
    source = torch.Generator().manual_seed(3)
    return job_of({"noise": source}, lambda m, b: loss(m, b + torch.rand(1, generator=source)))


def drawing_from_all() -> Job:
    random.seed(3)
    np.random.seed(3)
    return job_of(None, lambda m, b: loss(m, b) * (random.random() + np.random.rand()))


def telling() -> Job:
    def counts(model, batch):
        model.calls += 1
        return loss(model, batch) / model.calls

    return job_of(None, counts, model=Telling)


@pytest.mark.parametrize("make", [counting, carrying, drawing, drawing_from_all, telling])
def test_a_resumed_run_in_one_process_is_the_unbroken_one(make, tmp_path):
    whole = eagerly(make, tmp_path / "whole", ((0, STEPS),))
    broken = eagerly(make, tmp_path / "part")
    assert differing(broken.tensors, whole.tensors) == []
    assert broken.plain == whole.plain


def by_a_hook() -> Job:
    """The rate and an average that a hook of the optimizer keeps."""
    counter, average = Counter(), [torch.zeros(6)]

    def optimizer(weights):
        made = SGD(weights, lr=0.1)

        def after(*_: object) -> None:
            average[0].lerp_(weights[1].detach(), 0.1)
            with torch.no_grad():
                weights[1].add_(average[0], alpha=counter.next() / 100)

        made.register_step_post_hook(after)
        return made

    return job_of({"calls": counter, "average": average}, optimizer=optimizer)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_resumed_plan_goes_on_with_what_hooks_keep(replicas, tmp_path):
    folder = tmp_path / "part"
    for first, steps in ((0, 3), (3, STEPS - 3)):
        run = run_of(by_a_hook(), 1, replicas=replicas)
        windows, newest = windows_from(run, first)[:steps], checkpoint.latest(folder)
        train(run, folder, launcher=run_processes, windows=windows, resume=newest)
    run = run_of(by_a_hook(), 1, replicas=replicas)
    train(run, tmp_path / "whole", (1,) * STEPS, run_processes)
    whole, broken = (checkpoint.load(checkpoint.latest(at)) for at in (tmp_path / "whole", folder))
    assert differing(broken.tensors, whole.tensors) == []
    assert broken.plain["state/calls"] == whole.plain["state/calls"]
    assert 'calls", 6' in msgspec.json.encode(whole.plain["state/calls"]).decode().replace(
        ",", ", "
    )


def test_a_trial_of_the_optimizer_leaves_it_where_it_was():
    job = by_a_hook()
    captured = run_of(job, 1).captured
    assert undividable(job, captured) is not None
    assert job.state["calls"].calls == 0
    assert job.state["average"][0].eq(0).all()


def test_the_plain_loop_goes_on_with_it(tmp_path):
    found = eagerly(counting, tmp_path, ((0, 3),))
    plain = Plain(counting())
    plain.load(found.tensors, found.plain)
    assert plain.job.state["calls"].calls == 3 * MICRO_BATCHES


# -- data that is read from its beginning ---------------------------------------------------------


def test_data_that_draws_where_the_loss_draws_too_is_refused(tmp_path):
    def shuffled(start: int):
        random.seed(3)
        for number, batch in enumerate(data(0)):
            yield batch * random.random() if number >= start else batch

    def make(source=shuffled) -> Job:
        draws = job_of(None, lambda m, b: loss(m, b) * (1 + random.random()))
        return replace(draws, data=InOrder(source))

    with pytest.raises(Exception, match="draw from the same generator"):
        eagerly(make, tmp_path)


def test_data_that_draws_alone_goes_on_where_it_was(tmp_path):
    def shuffled(start: int):
        order, source = list(range(6)), data(0)
        batches = [next(source) for _ in range(12)]
        random.seed(3)
        for number in range(start, 10**6):
            if number % 4 == 0:
                random.shuffle(order)
            yield batches[order[number % 4]]

    def make() -> Job:
        return replace(job_of(), data=InOrder(shuffled))

    whole = eagerly(make, tmp_path / "whole", ((0, STEPS),))
    assert differing(eagerly(make, tmp_path / "part").tensors, whole.tensors) == []
