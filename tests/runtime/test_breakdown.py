"""A run says where its wall time goes, and names what holds it up.

Faults are sleeps.  That each counts for its part holds on a busy machine too; that they are longer
than all else, so that a verdict names them, does not, and is asked for by `make soak`.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.checkpoints.snapshot import Snapshot
from penstock.job import Job
from penstock.plan import is_asynchronous
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime import eager, worker
from penstock.runtime.launch import as_json, from_json, run_processes, run_threads
from penstock.runtime.run import Steps, outcome_of
from penstock.runtime.worker import Task, work
from penstock.simulate import simulate
from penstock.timeline import PARTS, Bottleneck, Breakdown, bottleneck, breakdown_of
from penstock.transport import Transport
from tests.parity.models import captured, data, job_of, plan_of
from tests.parity.training import listed

MICRO_BATCHES, BASE_S, FAULT_S = 2, 0.001, 0.05
Wrap = Callable[[Transport], Any]


@dataclass(frozen=True)
class Case:
    """A schedule on some ranks, and where it runs."""

    schedule: str = "one_f_one_b"
    stages: int = 2
    replicas: int = 1
    launcher: Callable[..., Any] = run_threads
    windows: int = 2
    base_s: float = BASE_S
    clip: float | None = None


SYNCHRONOUS = [Case(name, 4 if name == "interleaved" else 2) for name in ("gpipe", "zb_h1")]
SYNCHRONOUS += [Case("one_f_one_b"), Case("interleaved", 4)]
EVERYWHERE = [*SYNCHRONOUS, Case("double_buffered")]


def run_case(
    case: Case,
    job: Callable[[Job], Job] = lambda job: job,
    end: Callable[[Transport], Any] = lambda end: end,
    slow: dict[int, float] | None = None,
    **options: Any,
) -> tuple[Breakdown, Breakdown]:
    """Run with `end` around every transport and computes of `slow` ranks that take so long."""
    made = captured("frozen", torch.float32)
    plan = plan_of(
        made.graph, case.schedule, case.stages, MICRO_BATCHES, replicas=case.replicas,
        clip=case.clip is not None,
    )  # fmt: skip
    length = 2 if is_asynchronous(plan) else 1
    program = lower_plan(plan, made.graph, num_steps=length)
    first = options.pop("first_step", 0)
    windows = tuple((program, first + n * length) for n in range(case.windows))
    own = job(job_of("frozen", torch.float32, clip_norm=case.clip))
    task = Task(made, stages_of(plan, made.graph), own, listed(windows), **options)

    def live(transport, report):
        seconds = (slow or {}).get(transport.rank, case.base_s)
        sleeping = task.remade(function_of=partial(sleepy, seconds))
        return from_json(as_json(work(sleeping, end(transport), report)))

    results = case.launcher(live, program.num_ranks, lambda step: None)
    steps = Steps(MICRO_BATCHES * case.replicas)
    found = outcome_of(results, steps, {}).breakdown
    predicted = breakdown_of(simulate(program, lambda action: case.base_s))
    assert found is not None
    assert predicted is not None
    check_sums(found, results)
    return found, predicted


def check_sums(found: Breakdown, results: list[worker.RankResult]) -> None:
    for rank, result in enumerate(results):
        assert sum(found.seconds[rank]) == pytest.approx(result.spent.wall_s, rel=0.02)
        assert min(found.seconds[rank]) > -1e-6


def verdict(pair: tuple[Breakdown, Breakdown]) -> Bottleneck:
    found = bottleneck(*pair)
    assert str(found).startswith(f"bottleneck: {found.title}: ")
    assert bool(found.hint) == found.is_named
    return found


def sleepy(seconds: float, segment: Any, capture: Any, **options: Any) -> Any:
    function = worker.function_of(segment, capture, **options)

    def run(given: list[Any], seed: int) -> Any:
        time.sleep(seconds)
        return function.run(given, seed)

    return replace(function, run=run)


# --- faults ------------------------------------------------------------------------------------


class Slow:
    """A transport whose messages, or sums, take `seconds`."""

    def __init__(self, inner: Transport, seconds: float, what: str) -> None:
        self.inner, self.seconds, self.what = inner, seconds, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def bind_send(self, *where: Any, **options: Any) -> Any:
        send = self.inner.bind_send(*where, **options)

        def slow(tensors: Any) -> None:
            time.sleep(self.seconds)
            send(tensors)

        return slow if self.what == "send" else send

    def bind_receive(self, *where: Any, **options: Any) -> Any:
        post, wait = self.inner.bind_receive(*where, **options)

        def slow() -> Any:
            message = wait()
            time.sleep(self.seconds)
            return message

        return post, slow if self.what == "receive" else wait

    def all_reduce(self, tensor: Any, ranks: tuple[int, ...]) -> None:
        if self.what == "sum":
            time.sleep(self.seconds)
        self.inner.all_reduce(tensor, ranks)


def slow(what: str, seconds: float = FAULT_S) -> Wrap:
    return lambda end: Slow(end, seconds, what)


def slow_loader(job: Job) -> Job:
    def dripping(start: int) -> Iterator[Any]:
        for batch in data(start):
            time.sleep(FAULT_S)
            yield batch

    return replace(job, data=dripping)


def slow_optimizer(job: Job) -> Job:
    """Slow once data is read: not where it is tried, with a call for every parameter and step."""
    read: list[int] = []

    class SlowSGD(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            time.sleep(3 * FAULT_S if read else 0.0)
            super().step()

    def noted(start: int) -> Iterator[Any]:
        for batch in data(start):
            read.append(start)
            yield batch

    return replace(job, optimizer=lambda parameters: SlowSGD(parameters, lr=0.1), data=noted)


def named(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda c: f"{c.schedule}-{c.stages}")


@pytest.mark.long
@named([*EVERYWHERE, Case(stages=1, schedule="gpipe")])
def test_slow_loader_is_named(case):
    assert verdict(run_case(case, slow_loader)).cause == "loader"


@pytest.mark.long
@named(EVERYWHERE)
def test_slow_link_is_named_with_its_ends(case):
    found = verdict(run_case(case, end=slow("receive")))
    assert (found.cause, found.ranks) == ("link", (0, 1))


@pytest.mark.long
def test_link_that_holds_up_its_sender_is_named_with_its_ends():
    found = verdict(run_case(Case(), end=slow("send")))
    assert (found.cause, found.ranks) == ("link", (0, 1))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
@named([Case("one_f_one_b"), Case("zb_h1")])
def test_slow_rank_is_named(case, rank):
    found = verdict(run_case(case, slow={rank: FAULT_S}))
    assert (found.cause, found.ranks) == ("slow rank", (rank,))


@pytest.mark.long
@named([Case("gpipe"), Case("interleaved", 4), Case("double_buffered")])
def test_slow_last_rank_is_named(case):
    found = verdict(run_case(case, slow={1: FAULT_S}))
    assert (found.cause, found.ranks) == ("slow rank", (1,))


@pytest.mark.long
def test_slow_link_among_three_ranks_is_named_with_its_ends():
    case = Case("gpipe", 3)

    def end(transport):
        return Slow(transport, FAULT_S, "receive") if transport.rank == 2 else transport

    found = verdict(run_case(case, end=end))
    assert (found.cause, found.ranks) == ("link", (1, 2))


@pytest.mark.long
def test_slow_rank_holds_up_other_replicas_and_is_named():
    found = verdict(run_case(Case(stages=1, schedule="gpipe", replicas=3), slow={1: 0.1}))
    assert (found.cause, found.ranks) == ("slow rank", (1,))


@pytest.mark.long
def test_all_ranks_slower_than_predicted_is_no_single_rank():
    found = verdict(run_case(Case(), slow={0: FAULT_S, 1: FAULT_S}))
    assert (found.cause, found.ranks, found.is_named) == ("compute", (), True)


@pytest.mark.long
@named([Case("zb_h1"), Case("gpipe", 1)])
def test_slow_optimizer_is_named(case):
    assert verdict(run_case(case, slow_optimizer)).cause == "optimizer"


@pytest.mark.long
@pytest.mark.parametrize("case", [Case("gpipe", 1, 2), Case("one_f_one_b", 2, clip=1.0)])
def test_slow_sums_are_named(case):
    """Of replicas; and of the norm that gradients are clipped to."""
    assert verdict(run_case(case, end=slow("sum", 0.15))).cause == "collectives"


@named([Case(windows=3), Case("double_buffered", windows=3)])
def test_slow_checkpoints_count_as_such_unless_there_is_only_the_last(case, tmp_path, monkeypatch):
    """Of one that is written beside the steps the copy, of the last one all of it."""

    def slowed(call):
        def slow_call(*where):
            time.sleep(0.2)
            return call(*where)

        return slow_call

    for place, name in ((checkpoint, "finish"), (Snapshot, "take")):
        monkeypatch.setattr(place, name, slowed(getattr(place, name)))
    every = 2 if case.schedule == "double_buffered" else 1
    often, _ = run_case(case, policy=SavePolicy(tmp_path / "often", every))
    assert max(often.of("checkpoint")) >= 0.2 / often.num_steps
    last, _ = run_case(case, policy=SavePolicy(tmp_path / "once"))
    assert last.of("checkpoint") == (0.0,) * last.num_ranks
    assert min(last.of("once")) > 0.2


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "cause", "ranks"),
    [
        ({"end": slow("receive")}, "link", (0, 1)),
        ({"slow": {1: FAULT_S}}, "slow rank", (1,)),
        ({"job": slow_loader}, "loader", None),
    ],
    ids=["link", "slow rank", "loader"],
)
def test_faults_are_named_where_ranks_are_processes(fault, cause, ranks):
    found = verdict(run_case(Case(launcher=run_processes), **fault))
    assert found.cause == cause
    assert ranks is None or found.ranks == ranks


def test_run_that_is_resumed_counts_its_own_steps(tmp_path):
    run_case(Case(), policy=SavePolicy(tmp_path))
    newest = checkpoint.latest(tmp_path)
    more = {"resume": newest, "first_step": 2}
    found, _ = run_case(Case(), slow={0: FAULT_S}, **more)
    assert found.num_steps == 1
    assert found.of("F")[0] >= MICRO_BATCHES * FAULT_S


@pytest.mark.long
def test_run_without_a_fault_has_nothing_to_name():
    """A busy machine may delay a run; not each of five."""
    case = Case(base_s=0.1)
    tries = (verdict(run_case(case)) for _ in range(5))
    assert any((found.cause, found.is_named) == ("compute", False) for found in tries)


@pytest.mark.parametrize(
    ("fault", "part", "least_s"),
    [
        ({"job": slow_loader}, "data", MICRO_BATCHES * FAULT_S),
        ({"job": slow_optimizer}, "optimizer", 3 * FAULT_S),
        ({"end": slow("receive")}, "messages", MICRO_BATCHES * FAULT_S),
        ({"end": slow("send")}, "messages", MICRO_BATCHES * FAULT_S),
        ({"slow": {0: FAULT_S}}, "F", MICRO_BATCHES * FAULT_S),
    ],
    ids=["loader", "optimizer", "receive", "send", "rank"],
)
@pytest.mark.parametrize("launcher", [run_threads, run_processes])
@pytest.mark.sampled(3)
def test_what_is_slow_counts_as_what_it_is(fault, part, least_s, launcher):
    """However busy the machine is: a sleep takes as long as it says, or longer."""
    found, _ = run_case(Case("one_f_one_b", launcher=launcher), **fault)
    assert found.of(part)[0] >= least_s


@pytest.mark.parametrize("case", [Case("gpipe", 1, 2), Case("one_f_one_b", 2, clip=1.0)])
def test_slow_sums_count_as_such(case):
    """Of replicas; and of the norm that gradients are clipped to."""
    found, _ = run_case(case, end=slow("sum", 0.15))
    assert found.of("collectives")[0] + found.of("meeting")[0] >= 0.15


# --- what is counted ---------------------------------------------------------------------------


def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock go on by one second whenever it is read."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        ("gpipe", {"data": 6, "F": 2, "B": 2, "optimizer": 2}),
        ("zb_h1", {"data": 6, "F": 2, "I": 2, "W": 2, "optimizer": 2}),
    ],
)
def test_each_call_counts_for_its_part(schedule, seconds, monkeypatch, tmp_path):
    """A call is a second, and more where it looks at the clock itself: reading twice, an update."""
    ticking(monkeypatch)
    found, _ = run_case(Case(schedule, 1, windows=4), policy=SavePolicy(tmp_path, 2))
    assert found.num_steps == 3  # the first one is warm-up
    own = {part: found.of(part)[0] for part in PARTS}
    assert {part: own[part] for part in seconds} == seconds
    assert own["checkpoint"] == pytest.approx(1 / 3)  # after the second step
    assert own["once"] == 2 + sum(seconds.values()) + 2  # around warm-up, in it, for checkpoints
    others = {"messages", "waiting", "collectives", "meeting"}
    assert all(own[part] == 0 for part in others)


@pytest.mark.parametrize(
    ("windows", "profiled", "steps"), [(1, 0, 1), (2, 1, 1), (2, 0, 1), (4, 1, 2), (4, None, 3)]
)
def test_first_and_profiled_windows_are_once_where_others_are_left(windows, profiled, steps):
    found, _ = run_case(Case("gpipe", 1, windows=windows), memory_window=profiled)
    assert found.num_steps == steps
    assert found.of("F")[0] >= MICRO_BATCHES * BASE_S


def test_waiting_for_a_late_rank_is_told_from_handing_over():
    found, _ = run_case(Case("gpipe"), slow={0: FAULT_S})
    assert found.of("waiting")[1] > found.of("messages")[1]
    found, _ = run_case(Case("gpipe", 1, 2), slow={0: FAULT_S})
    assert found.of("meeting")[1] > found.of("collectives")[1]


def test_eager_run_is_broken_down_too(tmp_path):
    job = replace(slow_loader(job_of("frozen", torch.float32)), micro_batches=4)
    task = eager.EagerTask(job, 0, 3, policy=SavePolicy(tmp_path, 1))
    results = run_processes(partial(eager.work_eagerly, task), 2, lambda step: None)
    found = outcome_of(results, Steps(4), {}).breakdown
    check_sums(found, results)
    assert found.num_steps == 2
    assert found.of("data")[0] > 2 * FAULT_S
    assert found.of("B")[0] > 0
    assert found.of("checkpoint")[0] > 0


def test_rank_that_cannot_tell_leaves_no_breakdown(monkeypatch):
    """The clock of a thread that only queues work says nothing of it."""
    monkeypatch.setattr(worker.WindowRunner, "_spent", lambda *_: None)
    with pytest.raises(AssertionError, match="None"):
        run_case(Case("gpipe", 1))
