"""Replan: a rank that becomes slower gets less to do, in the same run, to the same bits."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.examine.examine import Examined
from penstock.examine.unsaved import Unsaved
from penstock.pilot.replan_log import replanned, replans_in, words_of
from penstock.plan import Plan
from penstock.runtime import sampler
from penstock.runtime.rank import Rank
from penstock.runtime.worker import Task
from penstock.training.session import Session
from tests.runtime.as_torchrun import as_torchrun

LAYERS, MICRO_BATCHES = 6, 3
PRODUCT_S = 0.001  # that each product of matrices takes here, at least
PRODUCTS = MICRO_BATCHES * (3 * LAYERS - 1)  # of a step: nobody asks for a gradient of the input
SHORT_S = 1e-5  # that all but computing and waiting takes
OWN = ("compute", "data", "update")  # what waits for nobody


def batches(start: int) -> Iterator[Tensor]:
    number = start
    while True:
        yield torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        number += 1


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers[:2], torch.nn.BatchNorm1d(8), *layers[2:])


JOB = ps.Job(
    model=model,
    loss=lambda model, batch: model(batch).square().sum(),
    data=batches,
    optimizer=lambda weights: torch.optim.AdamW(weights, 1e-2),
    micro_batches=MICRO_BATCHES,
)


def plain(num_steps: int) -> dict[str, Tensor]:
    """Return the weights of the loop that a script would have."""
    own, data = model(), batches(0)
    optimizer = torch.optim.AdamW(own.parameters(), 1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            (own(next(data)).square().sum() / MICRO_BATCHES).backward()
        optimizer.step()
    found = {f"weights/{name}": value.detach() for name, value in own.named_parameters()}
    return found | {f"buffers/{name}": value for name, value in own.named_buffers()}


class Paced:
    """Lets products of matrices take their time: by `factor(rank, step)` more of it.

    What is sampled is that alone, and how long a rank waits for the other one by that: a machine in
    use may add to it what it likes.
    """

    def __init__(self, factor: Callable[[int, int], float]) -> None:
        self.factor, self.now, self.is_again = factor, (0, 0), False
        self.products: list[int] = []  # of each compute of a window, one after another
        self.slept_s: list[float] = []

    def install(self, patched: pytest.MonkeyPatch) -> None:
        run, make, guide = Rank.run, Task.make.fget, Session._guide
        window = sampler.Sampler.window
        assert make is not None

        def hasty(session: Session, *about, **more):
            found = guide(session, *about, **more)
            assert found is not None
            found._search_s = 0.01  # the first search of a process takes longer than later ones
            return found

        def noting(rank: Rank, calls, first_step: int):
            self.now, self.is_again = (rank.rank, first_step), rank.first_edge > 0
            self.products.clear()
            self.slept_s.clear()
            return run(rank, calls, first_step)

        def making(task: Task):
            return lambda segment, capture, **more: self.sleeping(
                make(task)(segment, capture, **more), segment, capture
            )

        def sampled(own: sampler.Sampler, calls, marks, num_steps: int, look) -> None:
            rank, step = self.now
            others = PRODUCTS * num_steps - sum(self.products)
            wait_s = others * PRODUCT_S * self.factor(1 - rank, step) - sum(self.slept_s)
            slept_s = iter(self.slept_s)
            taken_s = [next(slept_s) if each.lane == "compute" else SHORT_S for each in calls]
            last = max(at for at, each in enumerate(calls) if each.lane not in OWN)
            taken_s[last] += max(0.0, wait_s)
            window(own, calls, np.cumsum([0.0, *taken_s]), num_steps, look)

        patched.setattr(sampler.Sampler, "window", sampled)
        patched.setattr(sampler, "_SHARE", 8)  # more often than it should be
        patched.setattr(Session, "_guide", hasty)
        patched.setattr(Rank, "run", noting)
        patched.setattr(Task, "make", property(making))

    def sleeping(self, function, segment, capture):
        nodes = capture.graph.nodes
        products = sum("mm" in nodes[op].target for op in segment.ops)

        class Sleeping:
            def __getattr__(own, name):  # noqa: N805
                return getattr(function, name)

            def run(own, *arguments):  # noqa: N805
                found = function.run(*arguments)
                self.products.append(products)
                self.slept_s.append(products * PRODUCT_S * self.factor(*self.now))
                time.sleep(self.slept_s[-1])
                return found

        return Sleeping()


def train(folder: Path, num_steps: int, **more) -> int:
    """Train by a pipeline of two; return 0, as a command does."""
    about = {"ranks": 2, "schedule": "one_f_one_b", "check": False, "out": folder} | more
    ps.train(JOB, num_steps=num_steps, **about)
    return 0


@pytest.fixture(autouse=True)
def _profiles_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def slower(since: int, rank: int, step: int) -> float:
    return 3.0 if rank == 1 and step >= since else 1.0


def test_slowed_rank_gets_less_to_do_and_the_bits_stay(tmp_path, monkeypatch):
    """Weights, state of the optimizer, buffers and place in the data go along, under torchrun."""
    Paced(partial(slower, 45)).install(monkeypatch)
    folder = tmp_path / "run"
    done = as_torchrun(partial(train, folder, 130), tmp_path, nodes=2)
    assert [code for code, _, _ in done] == [0, 0], done
    made = replans_in(folder)[-1]
    assert 45 + 8 < made.step < 120
    assert made.factors == pytest.approx((1.0, 3.0), rel=1e-2)
    assert made.after_s < made.before_s
    plan, expected = Plan.load(folder / "plan.json"), plain(130)
    (why,) = (each for each in plan.decisions if each.what == "replanned")
    assert why.value == f"after {made.step} steps"
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    state = checkpoint.load(newest)
    assert state.step == 130
    for key, value in expected.items():
        assert torch.equal(state.tensors[key], value), key


@pytest.mark.parametrize("kept", [(), (Unsaved("calls", "job.py:7", by_update=True),)])
def test_what_a_hook_counts_does_not_begin_anew_with_another_plan(tmp_path, monkeypatch, kept):
    """An optimizer is made once in a run where a hook of it keeps what no checkpoint holds."""
    plan = SimpleNamespace(
        averages=False, served=None, total_ranks=2, terms=SimpleNamespace(compiled=False)
    )
    choice, basis = SimpleNamespace(plan=plan), SimpleNamespace(search_s=1.0)
    own = Session(JOB, JOB, tmp_path, 100, None, there=SimpleNamespace(), basis=basis)  # pyright: ignore
    own.knows(Examined(beside=kept))
    guide, looked = own._guide(choice, None, leads=False), []  # pyright: ignore
    assert guide is not None
    posts = [SimpleNamespace(moves=1, paces=0)] * 2
    monkeypatch.setattr(guide, "_posts", lambda: posts)
    monkeypatch.setattr(guide, "_shared", lambda *_: looked.append("shares"))
    monkeypatch.setattr(guide, "_look_for_another", lambda *_: looked.append("plans"))
    guide._weigh(10)
    assert looked == (["shares"] if kept else ["shares", "plans"])


@pytest.mark.long
def test_asynchronous_run_drains_and_goes_on_as_if_resumed_by_the_other_plan(tmp_path, monkeypatch):
    """Older versions of the weights go along; searched beside the steps, by a core to spare."""
    here = ps.Cluster.here(2)
    here = replace(here, hosts=(replace(here.hosts[0], cores=8),))
    about = {"schedule": "double_buffered", "checkpoint_every": 2, "cluster": here}
    paced, folder, texts = Paced(partial(slower, 80)), tmp_path / "run", []

    def note(row):
        text = (folder / "plan.json").read_text()
        texts.extend([text] if text not in texts[-1:] else [])

    with pytest.MonkeyPatch.context() as patched:
        paced.install(patched)
        train(folder, 190, **about, on_step=note)
    steps = [made.step for made in replans_in(folder)]
    assert steps  # one, or more on a machine in use
    assert all(step % 2 == 0 for step in steps)
    parts = {"out": tmp_path / "parts", "checkpoint_every": 2, "check": False}
    for number, (text, last) in enumerate(zip(texts, [*steps, 190], strict=True)):
        (tmp_path / "plan.json").write_text(text)
        ps.train(JOB, num_steps=last, plan=tmp_path / "plan.json", resume=number > 0, **parts)
    one, other = (checkpoint.latest(tmp_path / name / "checkpoints") for name in ("run", "parts"))
    assert one is not None
    assert other is not None
    found, expected = checkpoint.load(one).tensors, checkpoint.load(other).tensors
    assert any(key.startswith("version-1/") for key in expected)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.long
def test_plan_that_turns_out_slower_is_left_again(tmp_path, monkeypatch):
    """Whatever was predicted: by any other plan this machine takes three times as long."""
    paced = Paced(lambda rank, step: (3.0 if paced.is_again else 1.0) * slower(40, rank, step))
    paced.install(monkeypatch)
    folder = tmp_path / "run"
    train(folder, 110)
    made, back = replans_in(folder)
    assert (made.is_back, back.is_back) == (False, True)
    assert made.step + 16 <= back.step <= made.step + 30
    first, last = made.changes.split(" in place of ")[1], back.changes.split(":")[0]
    assert last == f"back to {first}"
    (row, other) = replanned(folder)
    assert row["measured_s"] > row["was_measured_s"]
    assert [line.split()[0] for line in words_of(other)] == ["made", "predicted", "measured"]
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    state = checkpoint.load(newest)
    for key, value in plain(110).items():
        assert torch.equal(state.tensors[key], value), key


@pytest.mark.long
def test_noise_is_no_reason_for_another_plan(tmp_path, monkeypatch):
    rng = random.Random(0)
    Paced(lambda rank, step: rng.uniform(0.5, 1.5) * (4.0 if rng.random() < 0.05 else 1.0)).install(
        monkeypatch
    )
    train(tmp_path / "run", 90)
    assert replans_in(tmp_path / "run") == []
