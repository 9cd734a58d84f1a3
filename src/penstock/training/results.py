"""Results: what a run leaves in its folder after its last step, and returns."""

import json
import math
import shlex
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.best import best_of
from penstock.choose.choose import Choice
from penstock.choose.learned import learn, learn_step
from penstock.cluster.cluster import Cluster
from penstock.errors import PenstockError, RunError
from penstock.files import Json, appending, cache_folder, finite, read_json, write_text
from penstock.job import SCALED, Job
from penstock.listener import Listener, Row
from penstock.pilot.goal import Goal, GoalWatch
from penstock.pilot.phases import figures_of, until_in
from penstock.pilot.replan_log import replanned
from penstock.pilot.wishes import decisions_in
from penstock.plan.plan import Plan, Prediction
from penstock.plan.tried import headline
from penstock.profile.kinds import load_profiles
from penstock.profile.noise import noise_of, steps_needed
from penstock.prove.audits import Audited, audit_rows
from penstock.report.report import report_of
from penstock.rules.rule import Rule
from penstock.stores.store_use import StoreUse
from penstock.timeline.bottleneck import Bottleneck, bottleneck
from penstock.timeline.breakdown import Breakdown, breakdown_of
from penstock.timeline.svg import picture_of
from penstock.timeline.timeline import Timeline, num_steps
from penstock.training.events import EVENTS
from penstock.training.read_store import in_summary, of_summary, read_store, with_wait
from penstock.training.saved import kept_options
from penstock.training.used import used_rows

if TYPE_CHECKING:
    from torch import nn

    from penstock.runtime.run import Outcome


NOT_VALIDATED = "val_left_out"  # in a summary: why a validation that was asked for was not made


class Trained(NamedTuple):
    """The result of a run.

    folder:      where plan, metrics, checkpoints, timelines, summary and report are.
    plan:        that it followed; None for eager modules.
    outcome:     steps, measured timeline, bytes and final weights.
    summary:     what `summary.json` holds: losses and figures, predicted beside measured.
    predicted:   how the predicted time divides; None where nothing was predicted.
    bottleneck:  what bounds a step; None where no rank can tell.
    module:      makes the trained module, once; `model` is that.
    """

    folder: Path
    plan: Plan | None
    outcome: "Outcome"
    summary: Mapping[str, object]
    predicted: Breakdown | None
    bottleneck: Bottleneck | None
    module: "Callable[[], nn.Module]"

    def __repr__(self) -> str:
        return f"<Trained: {self}>"

    def _repr_html_(self) -> str:
        """Return the picture of a measured step and the words for a notebook."""
        return picture_of(self.outcome.timeline, str(self))

    def __str__(self) -> str:
        """Return the outcome, the plan and the folder, a line each."""
        plan = "no plan" if self.plan is None else headline(self.plan)
        return f"{self.outcome}\n{plan}\nwritten to {self.folder}: {self.folder / 'report.html'}"

    @property
    def model(self) -> "nn.Module":
        """Return the module with the weights and buffers after the last step.

        It is the very one that the job's `model` gives, where that is always the same.  Where the
        job was given as a record, that one is trained when `train` returns.
        """
        return self.module()


@contextmanager
def lines(path: Path) -> Generator[Callable[[Row], None]]:
    """Append rows to a file, one JSON object in a line, each written out at once."""
    with appending(path) as add:
        yield lambda row: add(json.dumps(finite(dict(row)), allow_nan=False))


class RunEnd(NamedTuple):
    """A run that has ended: in which folder, and by which plan.

    choice:   None: as eager modules.
    checked:  how it was compared with the plain loop; audited: what audits have found.
    goal:     the loss at which it was to end.
    """

    folder: Path
    job: Job
    num_steps: int
    outcome: "Outcome"
    choice: Choice | None
    checked: str = ""
    goal: GoalWatch | None = None
    audited: Audited = Audited()


def finished(ran: RunEnd, listener: Listener) -> Trained:
    """Write timeline, summary and report of a run into its folder; return what it gave."""
    from penstock.checkpoints.for_others import put_whole_beside

    folder, job, num_steps, outcome, choice, checked, goal, audited = ran
    outcome.timeline.save(folder / "measured.trace.json")
    options = kept_options(folder)
    put_whole_beside(folder / "checkpoints")
    predicted = choice.plan.predicted if choice else None
    measured = outcome.breakdown
    store = read_store(job, measured, choice)
    expected, why = _compared(folder, outcome, choice, store)
    summary: dict[str, object] = {
        **{**_losses(folder, job, outcome, choice, listener), **_noise(outcome, choice)},
        **{"steps": num_steps, "checked": checked, **audit_rows(audited, num_steps)},
        "step_s_predicted": predicted.step_s if predicted else None,
        "step_s_measured": outcome.step_s,
        "peak_bytes_predicted": list(predicted.peak_bytes) if predicted else None,
        "peak_bytes_measured": list(outcome.peak_bytes),
        **({} if outcome.joules is None else {"joules_per_step": outcome.joules}),
        **_of_devices(folder, outcome, choice),
        "live_versions": list(outcome.live_versions),
        "breakdown": measured.to_json() if measured else None,
        "bottleneck": why.to_json() if why else None,
        **{**in_summary(store), **_changes(folder, goal)},
        "sampling": _sampling(outcome),
        "checkpointing": _checkpointing(outcome),
        **({"options": options} if options else {}),
        **(dict(job.facts()) if job.facts else {}),
    }
    strict = finite(json.loads(json.dumps(summary)))
    write_text(folder / "summary.json", json.dumps(strict, indent=2, allow_nan=False) + "\n")
    report_of(folder).save(folder / "report.html")
    if choice is not None and measured is not None and "turns" not in options:
        _learn(folder, outcome, choice)
    return _trained(folder, job, outcome, choice, (summary, expected, why))


def _learn(folder: Path, outcome: "Outcome", choice: Choice) -> None:
    """Keep what a run has told of its links and of what a step takes.

    On a GPU no action was timed alone, and messages pass on streams of their own: nothing is kept.
    """
    if not outcome.samples:
        return
    cluster, kept = Cluster.load(folder / "cluster.toml"), cache_folder("profiles")
    learn(choice, cluster, outcome.timeline, kept)
    learn_step(choice, load_profiles(folder / "profile.json"), cluster, outcome.samples, kept)


def _compared(
    folder: Path, outcome: "Outcome", choice: Choice | None, store: StoreUse | None
) -> tuple[Breakdown | None, Bottleneck | None]:
    """Return how the predicted time divides, and what bounds a step."""
    predicted, measured = choice.plan.predicted if choice else None, outcome.breakdown
    expected = _expected(folder / "predicted.trace.json", measured, predicted)
    expected = with_wait(expected, measured, store)
    if measured is None:
        return expected, None
    steps_s = [step.seconds for step in outcome.steps[-measured.num_steps :]]
    return expected, bottleneck(measured, expected, steps_s)


def read_back(folder: Path, outcome: "Outcome", choice: Choice) -> Trained:
    """Return what a run gave that another process has `finished`.

    Raises:   RunError: its summary is damaged.
    """
    summary = read_json(folder / "summary.json", RunError, "summary")
    about = summary, *_compared(folder, outcome, choice, of_summary(summary))
    return _trained(folder, choice.job, outcome, choice, about)


def _trained(
    folder: Path,
    job: Job,
    outcome: "Outcome",
    choice: Choice | None,
    told: tuple[Mapping[str, object], Breakdown | None, Bottleneck | None],
) -> Trained:
    """Return what a run gave; `told` are the last fields of that but one."""
    module = trained_module(job, outcome, choice, folder / "checkpoints")
    return Trained(folder, choice.plan if choice else None, outcome, *told, module)


def trained_module(
    job: Job, outcome: "Outcome", choice: Choice | None, checkpoints: Path
) -> "Callable[[], nn.Module]":
    """Return what makes the trained module when it is first asked.

    checkpoints:  where what its modules keep beside tensors is.
    """
    from penstock.checkpoints import checkpoint
    from penstock.graph.trace import build_model
    from penstock.runtime.eager import load_model
    from penstock.runtime.module_aside import bring_back
    from penstock.state.python_state import take_extra, with_extra

    def make() -> "nn.Module":
        model = choice.captured.model if choice else build_model(job)
        bring_back(model)
        load_model(model, outcome.weights)
        newest = checkpoint.latest(checkpoints) if any(with_extra(model)) else None
        if newest is not None:
            kept = checkpoint.load(newest)
            take_extra(model, kept.tensors, kept.plain)
        return model

    return cache(make)


def _noise(outcome: "Outcome", choice: Choice | None) -> dict[str, float]:
    """Return the noise scale of the gradients in samples, and of how many steps; {}: not watched.

    Also the steps to a target with twice the batch, as a part of those with this one.  Left out
    where the gradient drowns in noise.
    """
    if choice is None:
        return {}
    graph, count = choice.captured.graph, choice.plan.step_micro_batches
    found = noise_of(outcome.noise, count, graph.samples)
    if found is None or not math.isfinite(found.scale):
        return {}
    return {
        "noise_scale_samples": found.scale,
        "noise_scale_steps": found.steps,
        "noise_scale_batch": found.batch,
        "copy_ranks": choice.plan.total_ranks // choice.plan.replicas,
        "noise_scale_double": steps_needed(1.0, found.batch, found.scale, other=2 * found.batch),
    }


def _changes(folder: Path, goal: GoalWatch | None) -> dict[str, object]:
    """Return plans made again, phases of a run to a loss, and generations of an elastic one."""
    found: dict[str, object] = {"replanned": replanned(folder)}
    if goal is not None:
        found["until"] = _until(folder, goal)
        if goal.by == "training" and goal.is_reached:  # not the mean of other steps
            found["train_loss"] = goal.value
    path = folder / EVENTS
    if path.exists():
        found["generations"] = [json.loads(line) for line in path.read_text().splitlines()]
    if machines := decisions_in(folder):
        found["machines"] = machines
    return found


def _until(folder: Path, goal: GoalWatch) -> dict[str, Json]:
    """Return what became of a run that was to end at a loss."""
    told = until_in(folder)
    if told is None:  # ranks and batch were not looked for
        own: dict[str, Json] = {"loss": goal.goal.loss, "by": goal.by}
        return own | {"reached": goal.is_reached, "reached_loss": goal.value}
    told = replace(told, reached=goal.is_reached, loss=goal.value)
    told.save(folder)
    return figures_of(told)


def _sampling(outcome: "Outcome") -> dict[str, float] | None:
    """Return how many windows were sampled, of how many, and what part of the time that took."""
    rows = outcome.samples
    if not rows or outcome.breakdown is None:
        return None
    wall_s = max(outcome.breakdown.wall_s)
    return {
        "sampled": max(row.sampled for row in rows),
        "windows": max(row.windows for row in rows),
        "share": max(row.took_s for row in rows) / wall_s,
    }


def _checkpointing(outcome: "Outcome") -> dict[str, object] | None:
    """Return what checkpoints took that were written while ranks trained on; None: there were none.

    Of each checkpoint the longest that a rank stood still for it, and of these the median and most.
    """
    told = outcome.saves
    if not any(saves.blocked_s for saves in told):
        return None
    newest = (reversed(saves.blocked_s) for saves in told)  # who joined has seen fewer
    blocked = [max(row) for row in zip_longest(*newest, fillvalue=0.0)][::-1]
    every = [saves.every_s for saves in told if saves.every_s is not None]
    written = [seconds for saves in told for seconds in saves.written_s]
    return {
        "beside": len(blocked),
        "bytes": sum(saves.size_bytes for saves in told),
        "blocked_s": statistics.median(blocked),
        "most_blocked_s": max(blocked),
        "written_s": statistics.median(written) if written else None,
        "waited": max(saves.waited for saves in told),
        "postponed": sum(saves.postponed for saves in told),
        "every_s": max(every) if every else None,
    }


def _expected(
    path: Path, measured: Breakdown | None, predicted: Prediction | None
) -> Breakdown | None:
    """Return how the predicted time divides; None where nothing was predicted for these ranks."""
    if measured is None or predicted is None or not path.exists():
        return None
    timeline = Timeline.load(path)
    found = breakdown_of(timeline, predicted.step_s * num_steps(timeline))
    return found if found is not None and found.num_ranks == measured.num_ranks else None


def _losses(
    folder: Path, job: Job, outcome: "Outcome", choice: Choice | None, listener: Listener
) -> dict[str, object]:
    """Return losses and figures, of validation and of the last steps."""
    last = statistics.fmean(s.loss for s in outcome.steps[-10:] if s.loss is not None)
    validations = [step.validated for step in outcome.steps if step.validated is not None]
    final: Mapping[str, object] = (
        validations[-1] if job.validate_every else _validated(job, outcome, choice, listener)
    )
    return {
        "val_loss": None,
        **{name: value for name, value in final.items() if name != "val_seconds"},
        **_best(folder, job, validations),
        "train_loss": last,
        **train_figures(outcome),
    }


def explained(folder: Path, job: Job, problem: RunError, listener: Listener) -> RunError:
    """Return the error that ended a run; of a number that is not finite, with where it came from.

    job:  with its micro-batches joined, as the run has them.
    """
    from penstock.checkpoints.checkpoint import latest
    from penstock.checkpoints.folders import wait_for_writers
    from penstock.runtime import autopsy, finite

    wait_for_writers(folder / "checkpoints")  # of the last one that was ordered
    found, newest = finite.left(folder / "checkpoints"), latest(folder / "checkpoints")
    if found is None:
        if newest is not None and "resume=True" not in problem.hint:
            hints = problem.hint, f"resume=True continues from {newest.name}"
            problem.hint = "; ".join(filter(None, hints))
        return problem
    with listener.busy("looking for the first number that is not finite"):
        error = autopsy.explained(job, *found)
    if newest is not None:
        error.hint += f"; resume=True continues from {newest.name}"
    return error


def resumption(
    job: str,
    folder: Path,
    num_steps: int | None,
    rules: Sequence[Rule] = (),
    goal: Goal | None = None,
    *,
    url: str = "",
) -> str:
    """Return how a run that was stopped goes on; `num_steps` where they are not the job's own.

    rules:    those that replace modules: they are said again; so is a goal.
    url:      where the folder is kept, too, if anywhere.
    """
    from penstock.checkpoints.checkpoint import latest

    kept = latest(folder / "checkpoints") or "no checkpoint"
    if not job:
        again = "resume=True, rules=..." if rules else "resume=True"
        again += "" if goal is None else f", until_loss={goal.loss:g}"
        return f"stopped with {kept}; continue with: {again}"
    command = ["penstock", "train", job, "--out", url or str(folder), "--resume"]
    command += [] if num_steps is None else ["--steps", str(num_steps)]
    if goal is not None:
        command += ["--set", f"until_loss={goal.loss:g}", "--set", f"objective={goal.least}"]
    for file in dict.fromkeys(rule.file for rule in rules if rule.file):
        command += ["--set", f"rules={file}"]
    return f"stopped with {kept}; continue with: {shlex.join(command)}"


def _of_devices(folder: Path, outcome: "Outcome", choice: Choice | None) -> dict[str, object]:
    """Return what a summary says of the devices: their memory, and what of them was used."""
    caps = _caps(folder / "cluster.toml", choice)
    return {"cap_bytes": caps, **used_rows(folder, outcome, choice)}


def _caps(place: Path, choice: Choice | None) -> list[int] | None:
    """Return the memory of every rank's device."""
    if choice is None or not place.exists():
        return None
    cluster = Cluster.load(place)
    ranks = range(min(choice.plan.total_ranks, cluster.num_ranks))
    return [cluster.memory_of(rank) for rank in ranks]


def train_figures(outcome: "Outcome") -> dict[str, float]:
    """Return the means of the figures beside the loss, each over the last steps that have it.

    Of its scale the last one, and the number of steps of this start that were left out.
    """
    last, rows = outcome.steps[-10:], dict[str, list[float]]()
    for step in outcome.steps:
        for name, value in step.figures.items():
            rows.setdefault(name, []).append(value)
    found = {
        f"train_{name}": statistics.fmean(values[-10:])
        for name, values in rows.items()
        if name not in SCALED
    }
    if last and SCALED[0] in last[-1].figures:
        scale, left_out = SCALED
        found |= {scale: last[-1].figures[scale]}
        found |= {f"{left_out}_steps": sum(s.figures[left_out] for s in outcome.steps)}
    return found


def _best(
    folder: Path, job: Job, validations: Sequence[Mapping[str, float]]
) -> dict[str, float | int]:
    """Return the step of the best checkpoint, its figure, and what validating took in all."""
    from penstock.checkpoints.checkpoint import best

    known = best(folder / "checkpoints", job.best)
    if not validations or known is None:
        return {}
    seconds, figure = sum(each["val_seconds"] for each in validations), best_of(job.best).figure
    return {"best_step": known[0], f"best_{figure}": known[1], "validation_s": seconds}


def _validated(
    job: Job, outcome: "Outcome", choice: Choice | None, listener: Listener
) -> Mapping[str, object]:
    """Return the mean loss and figures over the validation micro-batches, in evaluation mode.

    Of what does not end, or fails, why there are none: the run is whole, so its report is made, and
    the command ends with that.
    """
    import torch

    from penstock.graph.functional import where
    from penstock.graph.trace import build_model
    from penstock.runtime.eager import load_model
    from penstock.runtime.module_aside import bring_back
    from penstock.runtime.validate import validated, weights_of

    if job.validation is None:
        return {}
    model = choice.captured.model if choice else build_model(job)
    bring_back(model)
    load_model(model, weights_of(job, outcome.weights))
    torch.set_num_threads(1)  # as in ranks: on busy cores the threads of an op wait for each other
    try:
        with listener.progress("validating") as update:
            return validated(job, model, update, listener.say)
    except PenstockError as problem:
        why = f"{problem.message}; {problem.hint}"
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # noqa: BLE001 - whatever the job's code raises
        why = f"{where(problem, 'the validation fails')}; correct that line, and train a step more"
    listener.say(f"no val_loss: {why}")
    return {NOT_VALIDATED: why}
