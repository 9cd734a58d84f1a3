"""penstock replay: what a measured step consists of, and what it would be with a change."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

from penstock.choose.flag_text import schedule_asked
from penstock.cli import face
from penstock.cli.of_flags import of_flags
from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError, ProfileError, ScheduleError, TimelineError
from penstock.files import Json, read_json
from penstock.plan.plan import Plan
from penstock.schedule.orders import KINDS, Kind
from penstock.schedule.recipe import AnySchedule, name_of, trains
from penstock.timeline.breakdown import PARTS, breakdown_from_json
from penstock.timeline.timeline import Timeline, step_s
from penstock.training import saved
from penstock.training.read_store import of_summary
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.simulate.critical_path import Hop
    from penstock.simulate.what_if import Answer, Change, Run

Which = TypeVar("Which")


class ReplayFlags(NamedTuple):
    """Of which run, and what of it would be otherwise."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `penstock train` wrote.")]
    schedule: Annotated[list[str] | None, typer.Option(help="Another order of work.")] = None
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches per step of each replica.")
    ] = None
    faster_link: Annotated[float | None, typer.Option(metavar="X", help="inf: free.")] = None
    latency: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Messages take this much longer.")
    ] = None
    cluster: Annotated[Path | None, typer.Option(help="Links of these machines (TOML).")] = None
    faster_data: Annotated[
        float | None, typer.Option(metavar="X", help="Waiting for data; inf: none.")
    ] = None
    faster_rank: Annotated[list[str] | None, typer.Option(metavar="R=X")] = None
    faster_stage: Annotated[list[str] | None, typer.Option(metavar="S=X")] = None
    faster_kind: Annotated[list[str] | None, typer.Option(metavar="K=X", help="F B I W U")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@of_flags
def replay(flags: ReplayFlags) -> None:
    """Show what a measured step consists of, and what it would be with a change.

    Without flags, the usual questions are answered, best first.  X is how many times faster; 0.5
    is half as fast.  Several flags are answered one at a time, then together.

    Example: penstock replay runs/gpt --schedule zb_h1 --faster-rank 0=1.5
    """
    from penstock.simulate.what_if import Change

    whole = Change(
        ranks=_pairs("--faster-rank", flags.faster_rank, int),
        stages=_pairs("--faster-stage", flags.faster_stage, int),
        kinds=_pairs("--faster-kind", flags.faster_kind, _kind),
        links=1.0 if flags.faster_link is None else flags.faster_link,
        latency_s=flags.latency or 0.0,
        data=1.0 if flags.faster_data is None else flags.faster_data,
        cluster=None if flags.cluster is None else Cluster.load(flags.cluster),
        num_micro_batches=flags.micro_batches,
    )
    orders = [_order_asked(text) for text in flags.schedule or ()]
    run = load(flags.folder)
    asked = list(_asked(whole, orders))
    with face.progress("replaying") as tell:
        answers = _answered(run, asked, tell) if asked else _usual(run, tell)
    waits = [] if asked else list(_store_waits(flags.folder))
    if flags.as_json:
        face.show_json({**_document(run, answers), "store": [each._asdict() for each in waits]})
    else:
        _show(run, answers)
        _show_waits(waits)


def _order_asked(text: str) -> AnySchedule:
    """Return the schedule that a text names.

    Raises:   PlanError: it does not train.
    """
    asked = schedule_asked(text)
    if not trains(asked):
        hint = "take one of the others that `penstock schedule` lists"
        raise PlanError(f"{name_of(asked)} has no backward pass: it cannot train", hint=hint)
    return asked


def load(folder: Path) -> "Run":
    """Return the run of `penstock train` that left its files in `folder`.

    Raises:   PlanError, TimelineError: no run, an unfinished one, or no plan; files of
              two runs.  GraphError, ProfileError, ClusterError: a file is damaged.
    """
    from penstock.simulate.what_if import measured_run

    plan, trace = folder / "plan.json", folder / "measured.trace.json"
    if not folder.is_dir():
        hint = "give the --out of a run of `penstock train`"
        raise PlanError(f"there is no folder {folder}", hint=hint)
    if not trace.exists():
        hint = "only a finished run has one: `penstock train` writes it, `penstock plan` does not"
        raise TimelineError(f"{folder} holds no measured.trace.json", hint=hint)
    if not plan.exists():
        hint = "a model that cannot be traced runs without a plan, and is not replayed"
        raise PlanError(f"{folder} holds no plan.json", hint=hint)
    chosen = Plan.load(plan)
    basis = saved.load_basis(plan, chosen)
    timeline = Timeline.load(trace)
    try:
        return measured_run(
            chosen,
            basis.graph,
            timeline,
            basis.profiles,
            basis.cluster,
            data_s=_data_s(folder),
        )
    except TimelineError as problem:
        hint = "the folder holds files of two runs: train again"
        message = f"{trace} does not belong to the plan beside it: {problem.message}"
        raise TimelineError(message, hint=hint) from problem


def _data_s(folder: Path) -> tuple[float, ...]:
    """Return the seconds of a step that each rank waited for data; empty: it is not known.

    Raises:   TimelineError: the summary is damaged.
    """
    summary = _summary(folder)
    if summary.get("breakdown") is None:
        return ()
    measured = breakdown_from_json(summary["breakdown"])
    at = PARTS.index("data")
    return tuple(row[at] / measured.num_steps for row in measured.seconds)


def _summary(folder: Path) -> dict[str, Json]:
    path = folder / "summary.json"
    summary = read_json(path, TimelineError, "summary") if path.exists() else None
    return summary if isinstance(summary, dict) else {}


# -- what is asked ---------------------------------------------------------------------------------


def _pairs(
    flag: str, texts: Sequence[str] | None, which: Callable[[str], Which]
) -> tuple[tuple[Which, float], ...]:
    """Return the pairs in texts like "0=1.5".

    Raises:   PlanError: one is malformed.
    """
    found: list[tuple[Which, float]] = []
    for text in texts or ():
        name, _, times = text.partition("=")
        try:
            found.append((which(name), float(times)))
        except ValueError as problem:
            hint = f"write which, =, and how many times faster: {flag} {_EXAMPLES[flag]}=1.5"
            raise PlanError(f"{flag} is {text!r}", hint=hint) from problem
    return tuple(found)


_SEEN = 0.01  # of a step, or of what it waits
_EXAMPLES = {"--faster-rank": "0", "--faster-stage": "0", "--faster-kind": "F"}


def _kind(name: str) -> Kind:
    for kind in KINDS:
        if kind == name:
            return kind
    raise ValueError(name)


def _asked(whole: "Change", schedules: Sequence[AnySchedule]) -> "Iterator[tuple[str, Change]]":
    """Yield each change alone, then all together, if there are several and at most one schedule."""
    nothing = type(whole)()
    parts = [replace(nothing, schedule=name) for name in schedules]
    parts += [replace(nothing, ranks=(pair,)) for pair in whole.ranks]
    parts += [replace(nothing, stages=(pair,)) for pair in whole.stages]
    parts += [replace(nothing, kinds=(pair,)) for pair in whole.kinds]
    parts += [replace(nothing, links=whole.links), replace(nothing, latency_s=whole.latency_s)]
    parts += [replace(nothing, data=whole.data)]
    parts += [replace(nothing, cluster=whole.cluster)]
    parts += [replace(nothing, num_micro_batches=whole.num_micro_batches)]
    parts = [part for part in parts if part != nothing]
    yield from ((str(part), part) for part in parts)
    if len(parts) > 1 and len(schedules) < 2:
        together = replace(whole, schedule=schedules[0] if schedules else None)
        yield "all of these together", together


class _Answered(NamedTuple):
    """A question in words, and its answer, or why there is none."""

    words: str
    answer: "Answer | None"
    refused: str = ""


def _answered(
    run: "Run", asked: "Sequence[tuple[str, Change]]", tell: Callable[[int, int], None]
) -> list[_Answered]:
    from penstock.simulate.what_if import what_if

    found: list[_Answered] = []
    for words, change in asked:
        found.append(_Answered(words, what_if(run, change)))
        tell(len(found), len(asked))
    return found


def _usual(run: "Run", tell: Callable[[int, int], None]) -> list[_Answered]:
    """Return the answers to the usual questions, best first; then what is impossible."""
    from penstock.simulate.again import copies_again
    from penstock.simulate.what_if import usual_changes, what_if

    found: list[_Answered] = []
    questions = [*usual_changes(run), *copies_again(run)]
    for words, change in questions:
        is_same = change.schedule is None and change.recompute is None
        refused = "" if is_same else _too_large(run, change)
        try:
            answer = None if refused else what_if(run, change)
            found.append(_Answered(words, answer, refused))
        except (PlanError, ScheduleError, ProfileError) as problem:
            found.append(_Answered(words, None, problem.message))
        tell(len(found), len(questions))
    return sorted(found, key=lambda said: said.answer.ratio if said.answer else float("inf"))


class _StoreWait(NamedTuple):
    """What a step waits for a store, and takes with that, as predicted."""

    what_if: str
    wait_s: float
    step_s: float


def _store_waits(folder: Path) -> Iterator[_StoreWait]:
    """Yield what a step waits for the store that a run reads, and would, were it read otherwise.

    Only where it waits at all, and what makes a difference.
    """
    use = of_summary(_summary(folder))
    if use is None or use.wait_s < _SEEN * use.compute_s:
        return
    for words, other in (("nothing else", use), *use.otherwise()):
        if other is use or other.wait_s < (1 - _SEEN) * use.wait_s:
            yield _StoreWait(words, other.wait_s, use.compute_s + other.wait_s)


def _too_large(run: "Run", change: "Change") -> str:
    """Return why a change of the plan does not fit in memory, or ""."""
    from penstock.search.search import evaluate
    from penstock.simulate.what_if import changed

    if run.profiles is None or run.cluster is None:
        return ""
    candidate, _ = evaluate(run.graph, run.profiles, run.cluster, changed(run, change))
    for rank, peak in enumerate(candidate.peak_bytes):
        cap = run.cluster.memory_of(rank)
        if peak > cap:
            return f"rank {rank} would hold {format_bytes(peak)} of {format_bytes(cap)}"
    return ""


# -- what is said ----------------------------------------------------------------------------------


def _shares(run: "Run") -> list[tuple[str, float]]:
    """Return what the critical path consists of, in words, with seconds; the most first."""
    from penstock.simulate.critical_path import critical_path

    seconds: defaultdict[str, float] = defaultdict(float)
    for hop in critical_path(run.program, run.timeline).hops:
        seconds[_words(hop)] += hop.end_s - hop.start_s
    for rank, each_s in enumerate(run.data_s):
        unknown, left_s = f"nothing, on rank {rank}", each_s * run.program.num_steps
        for words in (unknown, f"handling messages on rank {rank}"):
            part_s = min(left_s, seconds.get(words, 0.0))
            if part_s > 0:
                seconds[f"waiting for data on rank {rank}"] += part_s
                seconds[words] -= part_s
                left_s -= part_s
    return sorted(seconds.items(), key=lambda pair: -pair[1])


def _words(hop: "Hop") -> str:
    match hop.reason:
        case "compute":
            return f"{hop.kind} of stage {hop.stage} on rank {hop.rank}"
        case "update":
            return f"update of stage {hop.stage} on rank {hop.rank}"
        case "copy":
            return f"{hop.kind} of stage {hop.stage} on rank {hop.rank}"
        case "message" if hop.rank == hop.peer:
            return f"handling messages on rank {hop.rank}"
        case "message":
            return f"messages from rank {hop.rank} to rank {hop.peer}"
        case "collective":
            return f"sums, last reached by rank {hop.rank}"
        case "idle":
            return f"nothing, on rank {hop.rank}"


def _shared(answers: Sequence[_Answered]) -> "list[tuple[str, Answer]]":
    """Return the answers in words; schedules with the same step here are grouped."""
    told: list[tuple[str, Answer]] = []
    for words, answer, _ in answers:
        if answer is None:
            continue
        if told and str(answer.change) == words and _is_like(told[-1][1], answer):
            words = f"{told.pop()[0]}, {words}"
        told.append((words, answer))
    return told


def _is_like(a: "Answer", b: "Answer") -> bool:
    figures = ((each.ratio, each.rests_on, each.change.schedule is None) for each in (a, b))
    return len(set(figures)) == 1


def _document(run: "Run", answers: Sequence[_Answered]) -> dict[str, Json]:
    whole_s = step_s(run.timeline)
    path: list[Json] = [
        {"what": what, "seconds": seconds, "share": seconds / whole_s}
        for what, seconds in _shares(run)
    ]
    found: list[Json] = []
    for said in answers:
        row: dict[str, Json] = {"what_if": said.words, "refused": said.refused or None}
        if said.answer is not None:
            row |= {"step_s": said.answer.step_s, "ratio": said.answer.ratio}
            row["rests_on"] = list(said.answer.rests_on)
        found.append(row)
    return {
        "measured_s": whole_s / run.program.num_steps,
        "replayed_s": run.replayed_s,
        "steps": run.program.num_steps,
        "critical_path": path,
        "what_if": found,
    }


def _show_waits(waits: Sequence[_StoreWait]) -> None:
    if waits:
        rows = [(w, format_seconds(s), format_seconds(step_s)) for w, s, step_s in waits]
        head = "what if, of the store", "waiting for data", "step"
        face.show("\n" + face.table(head, rows))


def _show(run: "Run", answers: Sequence[_Answered]) -> None:
    whole_s, steps = step_s(run.timeline), run.program.num_steps
    measured_s = whole_s / steps
    face.show(str(run.plan).splitlines()[0])
    window = f", in a window of {steps}" if steps > 1 else ""
    error = f"{100 * (run.replayed_s / measured_s - 1):+.1f} %"
    face.show(
        f"measured: {format_seconds(measured_s)} per step{window};"
        f" replayed: {format_seconds(run.replayed_s)} ({error})\n"
    )
    rows = [
        (what, format_seconds(seconds), f"{100 * seconds / whole_s:.1f} %")
        for what, seconds in _shares(run)
    ]
    face.show(face.table(("critical path", "seconds", "of the time"), rows) + "\n")
    told = _shared(answers)
    cells = [
        (words, format_seconds(answer.step_s), f"{answer.ratio:.3f}", "; ".join(answer.rests_on))
        for words, answer in told
    ]
    if cells:
        face.show(face.table(("what if", "step", "ratio", "also rests on"), cells))
    for said in answers:
        if said.refused:
            face.show(f"left out: {said.words}: {said.refused}")
    if any(answer.change.num_micro_batches is not None for _, answer in told):
        face.say("with another number of micro-batches, the ratio is of seconds per micro-batch")
