"""Ways of a job that are searched beside each other: what is found is what one after another finds.

On machines of estimated seconds, so that both have the same profiles.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.choose import choose, other_machines
from penstock.choose.choose import Machines, SearchAim, Searched, best
from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import MemoryShortError, PlanError
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.listener import Listener
from penstock.profile.estimate import estimated
from penstock.search import Fixed
from penstock.units import KiB
from tests.choose.test_degrees import wide_job
from tests.choose.test_sliced import job_of
from tests.runtime.test_launch import children

FAST, SLOW = Link(1e-6, 50e9), Link(1e-3, 1e8)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before


class Notes(Listener):
    """Notes what is said and begun, and how far what is searched is told to be."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.far: list[tuple[int, int]] = []

    def say(self, words: str) -> None:
        self.said.append(words)

    @contextmanager
    def progress(self, what: str) -> Iterator[object]:
        yield lambda done, total: self.far.append((done, total))


def machines(hands: int, link: Link = FAST, ranks: int = 2, memory: int = 1 << 30) -> Machines:
    kind = DeviceKind("small", memory, (("float32", 1e11),), 2e10, 1.0)
    cluster = Cluster((kind,), (Host("host", "small", ranks),), inside=link)

    def profiled(captured, job, cluster, listener):
        return (estimated(captured.graph, kind, 2.0),)

    return Machines(cluster, profiled, Notes(), hands)


def layered(micro_batches: int = 4, samples: int = 4) -> Job:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Tanh(), nn.Linear(16, 4))

    def data(start: int):
        while True:
            yield torch.randn(samples, 16, generator=torch.Generator().manual_seed(start))
            start += 1

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(batch), batch[:, :4])

    return Job(make, loss, data, lambda p: torch.optim.AdamW(p), micro_batches=micro_batches)


def told(found: Searched) -> str:
    """Return all that is told of what was found, as text."""
    rows = [found.choice.plan, *(option.found.plan for option in found.options)]
    parts = [json.dumps(plan.to_json(), sort_keys=True) for plan in rows]
    parts += [repr(found.front), repr(found.tally)]
    ways = [(o.way.joined, o.way.captured.graph.digest) for o in found.options]
    every = [option.found.candidates for option in found.options]
    return "\n".join([*parts, repr(ways), repr(every), repr(found.profiles)])


WHOLE = Fixed(recompute=False).needing(state_stays=True)  # what lacks memory has slices
CASES = {
    "ways that are joined": (layered(), Fixed(), {}),
    "ways that are divided": (layered(micro_batches=1), Fixed(), {}),
    "degrees": (wide_job(), Fixed(tensor=None), {}),
    "slices": (job_of(), WHOLE, {"memory": 2304 * KiB, "ranks": 1}),
    "more slices": (job_of(), WHOLE, {"memory": 2150 * KiB, "ranks": 1}),
    "too little for slices": (job_of(), WHOLE, {"memory": 1900 * KiB, "ranks": 1}),
    "little memory": (layered(2, samples=2), Fixed(), {"memory": 7 * KiB, "ranks": 1}),
    "what is fixed": (layered(), Fixed(ranks=2, replicas=2, recompute=False), {"link": SLOW}),
}


def found_by(hands: int, case: str) -> tuple[str, list[str]]:
    job, fixed, about = CASES[case]
    there = machines(hands, **about)
    try:
        text = told(best(job, fixed, capture(job), there, SearchAim(with_front=True)))
    except PlanError as problem:
        text = f"{type(problem).__name__}: {problem.message} {problem.hint}"
    return text, there.listener.said


@pytest.mark.parametrize("case", CASES)
def test_choice_is_that_of_searches_one_after_another(case, monkeypatch):
    expected = found_by(1, case)
    here, searched = os.getpid(), []
    usual = choose.search

    def noted(*args, **named):
        searched.append(os.getpid())
        return usual(*args, **named)

    monkeypatch.setattr(choose, "search", noted)
    assert found_by(3, case) == expected
    assert (here in searched) == (case == "degrees"), "all others are searched in forks"


def test_a_refusal_is_told_as_one_after_another_tells_it():
    job, fixed, problems = layered(2, samples=2), replace(WHOLE, ranks=2, replicas=2), []
    for hands in (1, 3):
        with pytest.raises(MemoryShortError) as caught:
            best(job, fixed, capture(job), machines(hands, memory=KiB))
        problems.append((caught.value.message, caught.value.hint))
    assert problems[0] == problems[1]


def test_a_short_run_begins_no_way_before_it_knows_the_one_before(monkeypatch):
    pids = []
    usual = choose.search
    monkeypatch.setattr(
        choose, "search", lambda *a, **k: (pids.append(os.getpid()), usual(*a, **k))[1]
    )
    job = layered()
    found = best(job, Fixed(), capture(job), machines(3), SearchAim(num_steps=3))
    assert pids == [os.getpid()]
    assert {option.way.joined for option in found.options} == {1}


@pytest.mark.parametrize("hands", [1, 2, 4])
def test_with_no_time_each_way_has_the_first_plan_that_can_be_used(hands):
    job = layered()
    found = best(job, Fixed(), capture(job), machines(hands), SearchAim(limit_s=0.0))
    assert found.choice.plan.predicted is not None
    assert found.tally.late > 0
    (line,) = [each for each in found.choice.plan.decisions if each.what == "search"]
    assert line.by == "user"


def test_the_bar_is_of_all_that_is_searched():
    job, there = layered(), machines(3)
    found = best(job, Fixed(), capture(job), there)
    total = sum(sum(option.found.tally[k] for k in (0, 3, 4)) for option in found.options)
    assert there.listener.far[-1] == (total, total)


def test_an_interrupt_ends_all_searches(monkeypatch):
    class Interrupts(Notes):
        @contextmanager
        def progress(self, what: str) -> Iterator[object]:
            def interrupt(done: int, total: int) -> None:
                raise KeyboardInterrupt

            yield interrupt

    monkeypatch.setattr(choose, "search", lambda *a, **k: signal.pause())
    job, there = layered(), machines(3)._replace(listener=Interrupts())
    with pytest.raises(KeyboardInterrupt):
        best(job, Fixed(), capture(job), there)


def test_searches_are_beside_each_other_only_where_nothing_is_measured_and_a_fork_can(monkeypatch):
    def cores(count):
        here = other_machines.detect()._replace(cores=count)
        monkeypatch.setattr(other_machines, "detect", lambda: here)

    there = machines(1).cluster
    cores(4)
    monkeypatch.setattr(other_machines.threading, "active_count", lambda: 1)
    assert other_machines.hands(there) == 4
    monkeypatch.setattr(other_machines, "_data_bytes", lambda: 1 << 30)
    for free, hands in ((1 << 60, 4), (3 << 30, 2), (1 << 29, 1)):
        monkeypatch.setattr(other_machines, "free_bytes", lambda free=free: free)
        assert other_machines.hands(there) == hands
    monkeypatch.setattr(other_machines, "free_bytes", lambda: 1 << 60)
    assert other_machines.hands(Cluster.here(1)) == 1  # it is measured
    monkeypatch.setattr(other_machines.threading, "active_count", lambda: 2)
    assert other_machines.hands(there) == 1
    monkeypatch.setattr(other_machines.threading, "active_count", lambda: 1)
    monkeypatch.setattr(other_machines, "can_fork", lambda: False)
    assert other_machines.hands(there) == 1
    monkeypatch.setattr(other_machines, "can_fork", lambda: True)
    cores(1)
    assert other_machines.hands(there) == 1
