"""Results: what a run leaves in its folder when its last step is done."""

import json
import os
import shlex
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import face, view
from penstock.cli.choose import Choice
from penstock.cluster import Cluster
from penstock.errors import RunError
from penstock.files import write_text
from penstock.job import Job
from penstock.report import report_of
from penstock.timeline import bottleneck, parts_table

if TYPE_CHECKING:
    from penstock.runtime.run import Outcome


def finished(
    folder: Path, job: Job, num_steps: int, outcome: "Outcome", choice: Choice | None
) -> dict[str, object]:
    """Write timeline, summary and report of a run into `folder`; return the summary.

    choice:  the plan that it followed, None for eager modules.
    """
    outcome.timeline.save(folder / "measured.trace.json")
    predicted = choice.plan.predicted if choice else None
    measured = outcome.breakdown
    expected = view.expected(folder / "predicted.trace.json", measured)
    found = None if measured is None else bottleneck(measured, expected)
    last = statistics.fmean(s.loss for s in outcome.steps[-10:] if s.loss is not None)
    summary: dict[str, object] = {
        "val_loss": _validated(job, outcome, choice),
        "train_loss": last,
        "steps": num_steps,
        "step_s_predicted": predicted.step_s if predicted else None,
        "step_s_measured": outcome.step_s,
        "peak_bytes_predicted": list(predicted.peak_bytes) if predicted else None,
        "peak_bytes_measured": list(outcome.peak_bytes),
        "cap_bytes": _caps(folder / "cluster.toml", choice),
        "live_versions": list(outcome.live_versions),
        "breakdown": measured.to_json() if measured else None,
        "bottleneck": found.to_json() if found else None,
        **(dict(job.facts()) if job.facts else {}),
    }
    strict = face.finite(json.loads(json.dumps(summary)))
    write_text(folder / "summary.json", json.dumps(strict, indent=2, allow_nan=False) + "\n")
    report_of(folder).save(folder / "report.html")
    view.show_outcome(outcome, choice.plan if choice else None)
    if measured is not None:
        face.say(f"\n{parts_table(measured, expected)}\n{found}\n")
    face.say(f"written to {folder}: open {folder / 'report.html'}")
    return summary


def explained(folder: Path, job: Job, problem: RunError) -> RunError:
    """Return the error that ended a run; of a number that is not finite, with where it came from.

    job:  with its micro-batches joined, as the run has them.
    """
    from penstock.runtime import autopsy, finite
    from penstock.runtime.checkpoint import latest

    found = finite.left(folder / "checkpoints")
    if found is None:
        return problem
    with face.busy("looking for the first number that is not finite"):
        error = autopsy.explained(job, *found)
    newest = latest(folder / "checkpoints")
    if newest is not None:
        error.hint += f"; --resume goes on from {newest.name}"
    return error


def resumption(job: str, folder: Path, num_steps: int | None) -> str:
    """Return how a run that was stopped goes on; `num_steps` where they are not the job's own."""
    from penstock.runtime.checkpoint import latest

    command = ["penstock", "train", job, "--out", str(folder), "--resume"]
    command += [] if num_steps is None else ["--steps", str(num_steps)]
    return f"stopped with {latest(folder / 'checkpoints')}; go on with: {shlex.join(command)}"


def _caps(place: Path, choice: Choice | None) -> list[int] | None:
    """Return the memory of every rank's device."""
    if choice is None or not place.exists():
        return None
    cluster = Cluster.load(place)
    ranks = range(min(choice.plan.total_ranks, cluster.num_ranks))
    return [cluster.device_of(rank).memory_bytes for rank in ranks]


def _validated(job: Job, outcome: "Outcome", choice: Choice | None) -> float | None:
    """Return the mean loss over the validation micro-batches, in evaluation mode."""
    import torch

    from penstock.graph.trace import build, loss_of, on_device
    from penstock.runtime.eager import load_model

    if job.validation is None:
        return None
    model = choice.captured.model if choice else build(job)[0]
    load_model(model, outcome.weights)
    batches = list(job.validation())
    was_training = model.training
    model.eval()
    torch.set_num_threads(os.cpu_count() or 1)
    losses: list[float] = []
    with torch.no_grad(), face.progress("validating") as update:
        for number, batch in enumerate(batches, 1):
            losses.append(float(loss_of(job, model, on_device(batch))))
            update(number, len(batches))
    torch.set_num_threads(1)
    model.train(was_training)
    return statistics.fmean(losses) if losses else None
