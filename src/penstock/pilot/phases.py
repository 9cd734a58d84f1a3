"""Phases: the stretches of a run that looks for its ranks and batch, as `phases.json` has them.

Each trains on where the one before has ended: steps are numbered through, and the micro-batches of
the job are read one after the other, whatever the batch.  So a phase says which micro-batch its
first step begins with, and a run that is resumed finds its place in the data by that.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from penstock.errors import PlanError
from penstock.files import Json, finite, read_json, write_text
from penstock.fleet.curve import LossPoint
from penstock.job import Job
from penstock.listener import Row
from penstock.profile.noise import GradientNoise
from penstock.typed import damage, typed
from penstock.units import format_seconds

PHASES = "phases.json"


@dataclass(frozen=True, slots=True)
class TrainedPhase:
    """Some steps with so many ranks and micro-batches.

    step:         the first; `number`: of its first micro-batch; `own`: steps of the job's own batch
                  that were done before.
    gain:         own steps that one of its steps is worth; `factor`: on the job's rate.
    plan:         in words, and seconds of a step as predicted with it.
    steps:        that it takes, at most while it runs; `step_s`: of a step, measured; 0.0 until it
                  is over; `seconds`: in all, from its search on.
    small, large, watched:    what its gradients told of their noise, in `watched` steps of `parts`
                  micro-batches of `samples` each (profile/noise.py); 0 watched: nothing.
    is_last:      whether it goes on to the end.
    """

    step: int
    number: int
    own: float
    ranks: int
    micro_batches: int
    gain: float = 1.0
    factor: float = 1.0
    plan: str = ""
    predicted_s: float = 0.0
    steps: int = 0
    step_s: float = 0.0
    seconds: float = 0.0
    small: float = 0.0
    large: float = 0.0
    watched: int = 0
    parts: int = 0
    samples: int = 0
    is_last: bool = False

    def number_at(self, step: int) -> int:
        """Return the micro-batch that a step begins with."""
        return self.number + (step - self.step) * self.micro_batches

    def own_at(self, step: int) -> float:
        """Return the own steps that are done before a step."""
        return self.own + (step - self.step) * self.gain

    @property
    def noise(self) -> GradientNoise | None:
        """Return what its gradients were like; None: they were not watched."""
        if not self.watched:
            return None
        about = self.watched, self.parts, self.samples
        return GradientNoise(*about, self.small, self.large)

    def __str__(self) -> str:
        return words_of_pair(self.ranks, self.micro_batches)


@dataclass(frozen=True, slots=True)
class ChosenBatch:
    """What was chosen in the end, and what was foreseen of it.

    scale:    noise scale, in samples; None: the gradient drowns in noise.
    constants:  of a step's seconds: of a start, of a sample, of sums over ranks; None: not known.
    own:      of the job's own steps, in all, that the loss so far lets expect; None: it does not.
    seconds, cost:  from the run's first phase to its goal, likewise.
    why:      in words, with what was foreseen of the others.
    """

    ranks: int
    micro_batches: int
    scale: float | None
    constants: tuple[float, float, float] | None
    step_s: float
    own: float | None
    seconds: float | None
    cost: float | None
    why: str


@dataclass(frozen=True, slots=True)
class UntilFile:
    """A run that ends at a loss.

    by:           whose loss that is, of a "validation" or of "training".
    samples, micro_batches:    of a micro-batch, and of a step, of the job.
    usd_per_hour: of a rank; 0.0: not known, and a cost is one in hours of a rank.
    exponent:     of the gain, by which the rate follows the batch.
    """

    until_loss: float
    least: str
    by: str
    samples: int
    micro_batches: int
    usd_per_hour: float
    exponent: float
    phases: tuple[TrainedPhase, ...] = ()
    chosen: ChosenBatch | None = None
    reached: bool = False
    loss: float | None = None

    def save(self, folder: Path) -> None:
        """Write it into a run's folder."""
        content = {"penstock": "phases", **cast("dict[str, Json]", _plain(self))}
        write_text(folder / PHASES, json.dumps(content, indent=1) + "\n")

    def begun(self, phase: TrainedPhase) -> "UntilFile":
        """Return it with another phase."""
        return replace(self, phases=(*self.phases, phase))

    def ended(self, phase: TrainedPhase) -> "UntilFile":
        """Return it with the newest phase as it was in the end."""
        return replace(self, phases=(*self.phases[:-1], phase))

    def cut_at(self, step: int) -> "UntilFile":
        """Return it as it was after a step from which the run goes on: that phase is not over."""
        over = [each for each in self.phases if each.step + each.steps <= step]
        under_way = [each for each in self.phases if each.step <= step < each.step + each.steps]
        if not under_way and over and over[-1].is_last:
            under_way = [over.pop()]
        opened = [replace(each, step_s=0.0, seconds=0.0, watched=0) for each in under_way]
        chosen = self.chosen if any(each.is_last for each in opened) else None
        phases = (*over, *opened)
        return replace(self, phases=phases, chosen=chosen, reached=False, loss=None)

    @property
    def seconds(self) -> float:
        """Return the seconds of all phases."""
        return sum(each.seconds for each in self.phases)

    @property
    def cost(self) -> float:
        """Return what all phases cost."""
        return sum(self.cost_of(each.ranks, each.seconds) for each in self.phases)

    def cost_of(self, ranks: int, seconds: float) -> float:
        """Return what ranks cost for some seconds: dollars, or hours of a rank."""
        return ranks * seconds / 3600 * (self.usd_per_hour or 1.0)

    def job_of(self, job: Job, at: int) -> Job:
        """Return what is trained in phase `at`: its batch, its place in the data, its rates."""
        from penstock.graph.merge import ahead
        from penstock.pilot.pace import Stretch, paced

        phase = self.phases[at]
        stretches = [Stretch(p.step, p.own, p.gain, p.factor) for p in self.phases[: at + 1]]
        own = replace(paced(job, stretches), micro_batches=phase.micro_batches, batch_range=None)
        return ahead(own, phase.number - phase.step * phase.micro_batches)


def until_in(folder: Path) -> UntilFile | None:
    """Return what is known of a run that ends at a loss; None: it is no such run.

    Raises:   PlanError: the file is damaged.
    """
    path = folder / PHASES
    if not path.exists():
        return None
    content = dict(read_json(path, PlanError, "phases"))
    content.pop("penstock", None)
    with damage(f"{path}", PlanError, hint="delete it, and train without resume"):
        return typed(UntilFile, content)


def rows_in(folder: Path, told: UntilFile) -> Iterator[tuple[Row, TrainedPhase]]:
    """Yield the rows of the steps of a run so far, and in which phase each was."""
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        phase = next((p for p in reversed(told.phases) if p.step < row["step"]), None)
        if phase is not None:
            yield row, phase


def points_in(folder: Path, told: UntilFile) -> list[LossPoint]:
    """Return the losses of a run so far, by the job's own steps: of validations, or of training."""
    key = "val_loss" if told.by == "validation" else "loss"
    rows = [(row[key], int(row["step"] or 0), p) for row, p in rows_in(folder, told) if key in row]
    return [
        LossPoint(p.own_at(step), float(loss), p.micro_batches)
        for loss, step, p in rows
        if loss is not None
    ]


def figures_of(told: UntilFile) -> dict[str, Json]:
    """Return what a summary has of such a run: predicted beside measured."""
    last, chosen = told.phases[-1] if told.phases else None, told.chosen
    content: dict[str, Json] = {
        "loss": told.until_loss,
        "by": told.by,
        "least": told.least,
        "reached": told.reached,
        "reached_loss": told.loss,
        "phases": _plain(told.phases),
        "chosen": _plain(chosen),
        "step_s": None if last is None else last.step_s,
        "own_steps": None if last is None else last.own_at(last.step + last.steps),
        "seconds": told.seconds,
        "cost": told.cost,
        "cost_in": "usd" if told.usd_per_hour else "hours of a rank",
    }
    return content


def _plain(value: object) -> Json:
    """Return records as JSON values."""
    return finite(json.loads(json.dumps(value, default=asdict)))


def words_of_phases(told: UntilFile) -> list[str]:
    """Return lines that tell of such a run: phases, choice, predicted and measured."""
    lines = [f"until the {told.by} loss is {told.until_loss:g}, with least {told.least}"]
    for at, each in enumerate(told.phases, 1):
        took = format_seconds(each.step_s) if each.step_s else "-"
        lines.append(
            f"  {'the rest' if each.is_last else f'phase {at}':<8}  {each}: {each.steps:,} steps, "
            f"{format_seconds(each.predicted_s)} a step predicted, {took} measured; each worth "
            f"{each.gain:.2f} of the job's own, rate times {each.factor:.2f}"
        )
    chosen = told.chosen
    if chosen is not None:
        noise = "drowns the gradient" if chosen.scale is None else f"{chosen.scale:.4g} samples"
        lines += [f"  chosen    {chosen.why}", f"  noise     {noise}"]
        if chosen.constants is not None:
            start, sample, sums = map(format_seconds, chosen.constants)
            lines.append(f"  a step    {start} + {sample} B / K + {sums} (K - 1) / K")
    lines += [f"  {line}" for line in _both(told)]
    if told.loss is not None:
        word = "reached" if told.reached else "not reached"
        lines.append(f"  {word:<12}{told.by} loss {told.loss:.4f}")
    return lines


def words_of_pair(ranks: int, micro_batches: int) -> str:
    """Return ranks and batch in words."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}, {micro_batches} micro-batches a step"


def _both(told: UntilFile) -> Iterator[str]:
    """Yield lines with what was foreseen at the choice, and what was measured."""
    last, chosen = told.phases[-1] if told.phases else None, told.chosen
    if last is None or chosen is None or not last.step_s:
        return
    rows: tuple[tuple[str, float | None, float, Callable[[float], str]], ...] = (
        ("a step", chosen.step_s, last.step_s, format_seconds),
        ("own steps", chosen.own, last.own_at(last.step + last.steps), lambda n: f"{n:,.0f}"),
        ("in all", chosen.seconds, told.seconds, format_seconds),
        (
            "usd" if told.usd_per_hour else "rank hours",
            chosen.cost,
            told.cost,
            lambda n: f"{n:.4g}",
        ),
    )
    for name, predicted, measured, words in rows:
        guess = "-" if predicted is None else words(predicted)
        yield f"{name:<10}{guess} predicted, {words(measured)} measured"
