"""Offload: what does not fit waits in far memory, beside everything there, and recompute.

    python -m bench.offload [--json] [--quick] [--rounds N]

The GPT of examples/gpt.py on one rank of this machine, which has one core more for copies.  Runs of
a few steps take turns; every plan computes the same step, and what is held is real.  Far memory is
a mapped file in the folder for temporary files, as fast as this machine's is.

case        what does not fit the cap: "state", the optimizer's; "activations", of micro-batches
            eight times as large; "weights", with cap_bytes below what weights alone take
cap_bytes   the most that the rank may hold
free_s      the best plan that the search finds without the cap
ours_s      the best that it finds under the cap
all_or_nothing_s   the best of plans with state, activations, weights, or all of these of every
            stage in far memory, copied between computes, that is predicted to fit
recompute_s   the best that it finds under the cap with nothing in far memory; null: none fits
predicted_s, predicted_bytes, ours_peak_bytes   of ours: predicted, and measured
weights_bytes, all_bytes   of the model: its weights, and with gradients and state
*_awake_s   seconds of a step less those in which the computing thread waited for a core: what
            other programs on a machine in use do not change but by sharing caches and memory
*_cpu_s     processor seconds of a step, over the rank's threads
slower      ours_s / free_s: the median of the rounds' ratios; slower_awake: likewise
far_bytes_per_s   of a copy to far memory or back, as measured for the prediction
plan        ours, in words
Seconds are of a step: medians over the rounds; low and high of ours are its spread.
"""

import argparse
import json
import resource
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.machine import machine
from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.graph.merge import merged
from penstock.graph.trace import Capture, capture
from penstock.job import Job, load_job
from penstock.plan import Offloaded, Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile import Profile
from penstock.profile.measure import awake_s, measure
from penstock.runtime.launch import run_processes
from penstock.runtime.windows import repeated
from penstock.runtime.worker import RankResult, Report, StepResult, Task, work
from penstock.search import Fixed, search
from penstock.search.judge import Judge
from penstock.search.sharded import in_units
from penstock.transport import Transport
from penstock.units import format_bytes, format_seconds

_ROOM = 10**12
_WORDS: tuple[Offloaded, ...] = ("state", "activations", "both", "weights", "all")
_ERROR = 0.05  # of a prediction, as `penstock plan` takes it
_LARGER = 8  # micro-batches of the job in one, where activations are what does not fit
CASES = "state", "activations", "weights"


class Setting(NamedTuple):
    """A job, traced and measured."""

    job: Job
    captured: Capture
    profile: Profile

    def judge(self, cap: int) -> Judge:
        return Judge(self.captured.graph, self.profile, cluster(self.profile, cap))

    def found(self, cap: int) -> tuple[Plan, Plan | None]:
        """Return the best plan under a cap, and the best of those with nothing in far memory."""
        found = search(
            *(self.captured.graph, self.profile, cluster(self.profile, cap)),
            micro_batches=self.job.micro_batches,
            clip=self.job.clip_norm is not None,
            fixed=Fixed(ranks=1),
            error=_ERROR,
        )
        near = [each for each in found.candidates if not (each.refused or each.plan.offloads)]
        return found.plan, min(near, key=lambda each: each.step_s).plan if near else None

    def everything(self, cap: int) -> Plan | None:
        """Return the best plan with all of a kind in far memory; None where none fits."""
        judge, graph, found = self.judge(cap), self.captured.graph, []
        clip = self.job.clip_norm is not None
        count = self.job.micro_batches
        whole = plan_by_hand(graph, [], "one_f_one_b", num_micro_batches=count, clip=clip)
        for plan in (whole, in_units(judge, whole)):
            for word in _WORDS:
                away = plan.changed(offload=(word,) * plan.num_stages)
                found.append(judge.candidate(away))
        fits = [each for each in found if not each.refused]
        return min(fits, key=lambda each: each.step_s).plan if fits else None


def cluster(profile: Profile, cap: int) -> Cluster:
    kind = DeviceKind(profile.basis.device, cap, (), 1.0)
    return Cluster((kind,), (Host("here", kind.name, 1, cores=2),), inside=Link(1e-4, 2e9))


def setting(job: Job) -> Setting:
    captured = capture(job)
    return Setting(job, captured, measure(captured, job, beside=0))


def sizes(made: Setting) -> tuple[int, int]:
    """Return the bytes of the weights, and with gradients and the optimizer's state."""
    graph = made.captured.graph
    parameters = [at for at, node in enumerate(graph.nodes) if node.kind == "parameter"]
    weights = sum(map(graph.kept_bytes, parameters))
    return weights, int(weights * (2 + made.profile.update.state_bytes_per_byte))


def cap_of(case: str, made: Setting) -> int:
    """Return a cap that what the case names does not fit; all else would."""
    judge, (weights, all_) = made.judge(_ROOM), sizes(made)
    free, _ = made.found(_ROOM)
    peak = judge.candidate(free).peak_bytes[0]
    if case == "state":
        return peak - (all_ - 2 * weights) // 2
    if case == "activations":
        return all_ + (peak - all_) // 2
    return int(0.95 * weights)


# -- runs -----------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A run: what the rank tells, and seconds of a step, the first one left out."""

    told: RankResult
    awake_s: float
    cpu_s: float

    @property
    def step_s(self) -> float:
        return statistics.fmean(self.told.window_s[1:])


def _work(task: Task, transport: Transport, report: Report) -> RankResult:
    """Run a task; its window's seconds are awake ones, its last two figures those of the processor.

    Steps but the first are looked at.
    """
    awake, cpu = list[float](), list[float]()

    def told(step: StepResult) -> None:
        awake.append(awake_s())
        cpu.append(_cpu_s())
        report(step)

    result = work(task, transport, told)
    each = [
        (last - first) / (len(row) - 1)
        for row in (awake, cpu)
        for first, last in [row[:: len(row) - 1]]
    ]
    return replace(result, window_s=(*result.window_s, *each))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ran(made: Setting, plan: Plan, steps: int, *, profiled: bool = False) -> Run:
    graph = made.captured.graph
    program = lower_plan(plan, graph)
    task = Task(made.captured, stages_of(plan, graph), made.job, repeated(program, range(steps)))
    task = replace(task, memory_window=1 if profiled else None)
    (result,) = run_processes(partial(_work, task), 1, lambda step: None, groups=task.groups)
    *window_s, awake, cpu = result.window_s
    return Run(replace(result, window_s=tuple(window_s)), awake, cpu)


def words_of(plan: Plan) -> str:
    """Return in words the values that wait in far memory, and those that are repeated."""
    counts = Counter(word for word in plan.offload if word != "none")
    parts = [f"{word} of {count}" for word, count in sorted(counts.items())]
    again = sum(map(bool, plan.recompute))
    parts += [f"{again} repeated"] * bool(again)
    how = "beside" if plan.overlap.beside else "between"
    return f"{plan.num_stages} stages; {', '.join(parts) or 'all near'}; {how} computes"


def row(case: str, made: Setting, steps: int, rounds: int) -> dict[str, Any]:
    cap = cap_of(case, made)
    (free, _), (ours, recompute) = made.found(_ROOM), made.found(cap)
    plans: dict[str, Plan | None] = {
        "free": free,
        "ours": ours,
        "all_or_nothing": made.everything(cap),
        "recompute": recompute,
    }
    runs: dict[str, list[Run]] = {way: [] for way in plans}
    for number in range(rounds):
        for way, plan in list(plans.items())[:: 1 if number % 2 == 0 else -1]:
            if plan is not None:
                runs[way].append(ran(made, plan, steps))
    judged, (weights, all_) = made.judge(cap).candidate(ours), sizes(made)
    pairs = [*zip(runs["ours"], runs["free"], strict=True)]
    spent = {f"{way}_awake_s": _median(r.awake_s for r in found) for way, found in runs.items()}
    spent |= {f"{way}_cpu_s": _median(r.cpu_s for r in found) for way, found in runs.items()}
    return {
        "case": case,
        "cap_bytes": cap,
        **{f"{way}_s": _median(r.step_s for r in found) for way, found in runs.items()},
        "predicted_s": judged.step_s,
        "predicted_bytes": judged.peak_bytes[0],
        "ours_peak_bytes": ran(made, ours, 3, profiled=True).told.peak_bytes,
        "far_bytes_per_s": 1 / made.profile.copying.far_s_per_byte,
        "weights_bytes": weights,
        "all_bytes": all_,
        **spent,
        "slower": statistics.median(own.step_s / free.step_s for own, free in pairs),
        "slower_awake": statistics.median(own.awake_s / free.awake_s for own, free in pairs),
        "low_s": min(own.step_s for own in runs["ours"]),
        "high_s": max(own.step_s for own in runs["ours"]),
        "plan": words_of(ours),
    }


def _median(values: Iterator[float] | Any) -> float | None:
    found = [*values]
    return statistics.median(found) if found else None


def rows(job: Job, steps: int, rounds: int) -> Iterator[dict[str, Any]]:
    own = setting(job)
    larger = setting(replace(merged(job, _LARGER), micro_batches=2))
    made: Mapping[str, Setting] = {"state": own, "activations": larger, "weights": own}
    for case in CASES:
        yield row(case, made[case], steps, rounds)


def shown(one: dict[str, Any]) -> str:
    def seconds(way: str) -> str:
        return "none fits" if one[f"{way}_s"] is None else format_seconds(one[f"{way}_s"])

    held = " / ".join(format_bytes(one[name]) for name in ("predicted_bytes", "ours_peak_bytes"))
    ways = ", ".join(f"{way} {seconds(way)}" for way in ("free", "all_or_nothing", "recompute"))
    names = "ours_awake", "free_awake", "all_or_nothing_awake", "recompute_awake"
    awake = ", ".join(seconds(way) for way in names)
    left = f"{one['case']:<12} cap {format_bytes(one['cap_bytes'])}, held {held}:"
    predicted = format_seconds(one["predicted_s"])
    own = f"ours {seconds('ours')} ({predicted} predicted, {one['slower']:.2f} of free)"
    own += f"; awake {awake} ({one['slower_awake']:.2f})"
    return f"{left} {own}; {ways}; {one['plan']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--quick", action="store_true", help="one run of each way, three steps")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way takes its turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    steps, rounds = (3, 1) if given.quick else (5, given.rounds)
    for one in rows(load_job("examples/gpt.py"), steps, rounds):
        found.append(one)
        if not given.json:
            print(shown(one), flush=True)
    if given.json:
        print(json.dumps({"machine": machine(), "rows": found}))


if __name__ == "__main__":
    main()
