"""What-ifs against real runs: from the trace of one run, the step of others; then these are run.

    python -m bench.replay [--json] [--quick] [--emulated X] [--rounds N] [--steps N]

A small GPT on two ranks of this machine.  A source is run and its measured timeline replayed; from
that alone the step is predicted with another schedule, another number of micro-batches, or messages
that are longer under way (in the real run, a transport that holds them back).  Then that is run.
The two runs follow each other, targets take turns, for some rounds.

Computes that are emulated sleep for X times their profiled seconds, with real messages and sums;
messages are held back X times as long.  That shows the error of the replay on a machine that others
use too, where real computes show its noise; the larger X, the better.

error         median over the rounds of predicted / measured - 1; low, high: the extremes
same          the same of the source's own step in place of the prediction
replay_error  the largest of the sources, replayed unchanged
agreement     of all pairs of targets of one source whose measured times per micro-batch differ by
              more than 3 %, how many the prediction puts in the right order
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from bench.machine import machine
from bench.zoo import JOBS
from penstock.graph.trace import Capture, capture
from penstock.plan import Plan, is_asynchronous, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.runtime.launch import Groups, Launcher, Work, run_processes
from penstock.runtime.run import Outcome, run
from penstock.runtime.worker import RankResult, Report
from penstock.search.balance import balanced_cuts
from penstock.simulate.what_if import WINDOW, Change, Run, changed, measured_run, what_if
from penstock.timeline import step_s
from penstock.transport import TensorSpec, Transport
from penstock.units import format_seconds

RANKS = 2
STEPS, ROUNDS = 16, 5
LATER_S = 0.004
MODEL = "small gpt"


class Case(NamedTuple):
    """A plan to be run, with messages that are so much longer under way."""

    name: str
    plan: Plan
    latency_s: float = 0.0


class Source(NamedTuple):
    """A run whose trace is replayed, and what is asked of it."""

    case: Case
    changes: tuple[Change, ...]


def sources(captured: Capture, profile: Profile, later_s: float) -> Iterator[Source]:
    """Yield the runs to be traced: two stages, four stages on two ranks, two replicas."""
    graph = captured.graph
    later = Change(latency_s=later_s)
    for name, stages, replicas, others in (
        ("one_f_one_b", 2, 1, ("gpipe", "zb_h1", "zb_h2", "double_buffered")),
        ("interleaved", 4, 1, ("breadth_first", "hanayo", "zb_v")),
        ("one_f_one_b", 1, 2, ()),
    ):
        cuts = balanced_cuts(graph, profile.op_s, stages)
        count = 8 // replicas
        plan = plan_by_hand(
            graph, cuts, name, num_micro_batches=count, num_ranks=RANKS // replicas,
            replicas=replicas,
        )  # fmt: skip
        changes = [Change(schedule=other) for other in others]
        changes += [Change(num_micro_batches=m) for m in (count // 2, 2 * count)]
        where = f"{stages} stages" if replicas == 1 else f"{replicas} replicas"
        yield Source(Case(f"{name}, {where}", plan), (*changes, *((later,) * (replicas == 1))))


def target(source: Case, change: Change, traced: Run) -> Case:
    """Return the case that a change makes of a source that was traced."""
    return Case(f"{source.name} -> {change}", changed(traced, change), change.latency_s)


# -- messages that are longer under way ------------------------------------------------------------


@final
class Later:
    """A transport whose messages are there `latency_s` seconds later; clocks of one host agree."""

    def __init__(self, inner: Transport, latency_s: float) -> None:
        self.inner, self.latency_s = inner, latency_s

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def bind_send(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> Callable[[Sequence[Tensor]], None]:
        """Send when with each message."""
        send = self.inner.bind_send(edge, peer, (*specs, _WHEN), ahead=ahead)

        def later(tensors: Sequence[Tensor]) -> None:
            send([*tensors, torch.tensor([time.perf_counter()], dtype=torch.float64)])

        return later

    def bind_receive(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> tuple[Callable[[], None] | None, Callable[[], list[Tensor]]]:
        """Wait until a message may be there."""
        post, wait = self.inner.bind_receive(edge, peer, (*specs, _WHEN), ahead=ahead)

        def later() -> list[Tensor]:
            *tensors, when = wait()
            left_s = float(when) + self.latency_s - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)
            return tensors

        return post, later


_WHEN = TensorSpec((1,), torch.float64)


def launcher(latency_s: float) -> Launcher:
    """Return a launcher of processes whose messages are under way for longer."""
    if not latency_s:
        return run_processes

    def launch(
        work: Work, num_ranks: int, report: Report, *, groups: Groups = ()
    ) -> list[RankResult]:
        later = partial(_work_later, work, latency_s)
        return run_processes(later, num_ranks, report, groups=groups)

    return launch


def _work_later(work: Work, latency_s: float, transport: Transport, report: Report) -> RankResult:
    return work(Later(transport, latency_s), report)  # type: ignore[arg-type]


# -- rounds ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """One source and one of its targets, run one after the other."""

    source_s: float
    replay_error: float
    predicted_s: float
    measured_s: float


def run_case(case: Case, captured: Capture, steps: int, emulate: Profile | None) -> Outcome:
    """Run one case for some steps."""
    graph = captured.graph
    window = WINDOW if is_asynchronous(case.plan) else 1
    return run(
        lower_plan(case.plan, graph, num_steps=window),
        captured,
        stages_of(case.plan, graph),
        JOBS[MODEL],
        num_steps=steps if window == 1 else 2 * window,
        launcher=launcher(case.latency_s),
        emulate=emulate,
    )


def rows_of(rounds: int, steps: int, *, emulated: float) -> list[dict[str, float | int | str]]:
    """Return one row for each target of each source; `emulated` is 0 for real computes."""
    job = JOBS[MODEL]
    captured = capture(job)
    profile = measure(captured, job, beside=RANKS - 1)
    sleep = slower(profile, emulated) if emulated else None
    later_s = LATER_S * (emulated or 1.0)
    asked = [
        (source.case, change)
        for source in sources(captured, profile, later_s)
        for change in source.changes
    ]
    seen: list[list[Pair]] = [[] for _ in asked]
    for turn in range(rounds):
        for at in range(len(asked))[:: 1 if turn % 2 == 0 else -1]:
            source, change = asked[at]
            outcome = run_case(source, captured, steps, sleep)
            traced = measured_run(source.plan, captured.graph, outcome.timeline, profile)
            own = traced.replayed_s * traced.program.num_steps / step_s(outcome.timeline) - 1
            other = run_case(target(source, change, traced), captured, steps, sleep)
            predicted_s = what_if(traced, change).step_s
            seen[at].append(Pair(outcome.step_s, own, predicted_s, other.step_s))
    return [_row(*one, pairs) for one, pairs in zip(asked, seen, strict=True)]


def slower(profile: Profile, times: float) -> Profile:
    """Return a profile of everything taking `times` times as long."""
    return replace(
        profile,
        op_s=tuple(times * seconds for seconds in profile.op_s),
        call_s=times * profile.call_s,
        update=profile.update.times(times),
    )


def _row(source: Case, change: Change, pairs: list[Pair]) -> dict[str, float | int | str]:
    errors = [pair.predicted_s / pair.measured_s - 1 for pair in pairs]
    return {
        "source": source.name,
        "change": str(change),
        "num_micro_batches": change.num_micro_batches or source.plan.num_micro_batches,
        "source_s": statistics.median(pair.source_s for pair in pairs),
        "measured_s": statistics.median(pair.measured_s for pair in pairs),
        "predicted_s": statistics.median(pair.predicted_s for pair in pairs),
        "error": statistics.median(errors),
        "low": min(errors),
        "high": max(errors),
        "same": statistics.median(pair.source_s / pair.measured_s - 1 for pair in pairs),
        "replay_error": max((pair.replay_error for pair in pairs), key=abs),
    }


def agreement(rows: list[dict[str, float | int | str]]) -> tuple[int, int]:
    """Return the number of clearly different pairs in the right order, and of all of them."""
    right = pairs = 0
    for a, b in itertools.combinations(rows, 2):
        if a["source"] != b["source"]:
            continue
        measured, predicted = (
            float(a[key])
            * int(b["num_micro_batches"])
            / float(b[key])
            / int(a["num_micro_batches"])
            for key in ("measured_s", "predicted_s")
        )
        if not 1 / 1.03 < measured < 1.03:
            pairs += 1
            right += (predicted > 1) == (measured > 1)
    return right, pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one round of few steps")
    parser.add_argument("--emulated", type=float, default=0.0, metavar="X", help="computes sleep")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a run; default: {STEPS}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds, steps = (1, 4) if options.quick else (max(1, options.rounds), max(3, options.steps))
    rows = rows_of(rounds, steps, emulated=options.emulated)
    right, pairs = agreement(rows)
    errors = [abs(float(row["error"])) for row in rows]
    summary: dict[str, float] = {
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "median_same": statistics.median(abs(float(row["same"])) for row in rows),
        "replay_error": max(abs(float(row["replay_error"])) for row in rows),
        "right_pairs": right,
        "pairs": pairs,
    }
    if options.json:
        print(json.dumps({"rows": rows, **summary, "machine": machine()}))
        return
    for row in rows:
        times = (format_seconds(float(row[key])) for key in ("predicted_s", "measured_s"))
        error, low, high = (100 * float(row[key]) for key in ("error", "low", "high"))
        print(
            f"{row['source']:24} {row['change']:32} {' / '.join(times):20}"
            f" {error:+6.1f} % ({low:+.1f} .. {high:+.1f})"
        )
    print({key: round(value, 4) for key, value in summary.items()}, machine())


if __name__ == "__main__":
    main()
