"""penstock train: the main job, from an unmodified model to a trained one and a report."""

import contextlib
import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from penstock.cli import face
from penstock.cli.flags import TRAIN
from penstock.cli.options import File, asked, taking
from penstock.cli.two_jobs import train_two
from penstock.errors import JobError, RunError
from penstock.processes.started import is_asked_beside, under_torchrun
from penstock.training.at_work import check_unused, folder_of
from penstock.training.options import OPTIONS, Options


@taking(tuple(OPTIONS), TRAIN)
def train(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A file.py[:name] or module[:name].")],
    second: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Another one, which computes by turns.")
    ] = None,
    *,
    file: File = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    **flags: object,
) -> None:
    """Train a job: examine, trace, measure, search for a plan, prove it, run it and report.

    Example: penstock train examples/gpt.py --out runs/gpt
    """
    options = asked(flags, file=file)
    if second is not None:
        train_two((job, second), options, as_json=as_json)
        return
    _check_unused(job, options)
    with face.loading():
        from penstock.examine.alive import set_apart
        from penstock.training import view
        from penstock.training.train import Request, train_requested

        set_apart()  # before there is anything of the job
    count = _to_start(options)
    if count > 1 and not _are_trained(count, elastically=bool(options.get("elastic"))):
        options["ranks"] = 1
    with _over(as_json=as_json), face.only_results(), _as_rank():
        trained = train_requested(Request(job, options), view.TERMINAL)
    if trained is not None and as_json:
        face.show_json(json.loads(json.dumps(trained.summary)))
    elif trained is not None:
        face.show(view.words_of(trained.summary))
    _check_validated(trained.summary if trained else {})
    _check_reached(trained.summary if trained else {})


def _check_reached(summary: Mapping[str, object]) -> None:
    """Raise where a run has not come to the loss at which it was to end.

    Raises:   RunError.
    """
    until = cast("dict[str, Any]", summary.get("until") or {})
    if until and not until["reached"]:
        last = (
            "no loss is known" if until["reached_loss"] is None else f"{until['reached_loss']:.4g}"
        )
        message = f"the {until['by']} loss is {last} in the end, not {until['loss']:g}"
        raise RunError(message, hint="num_steps=N resume=True goes on; or ask for another loss")


def _check_unused(job: str, options: Options) -> None:
    """Raise where ranks of a run are at work in the folder, before anything that takes time.

    Raises:   RunError.
    """
    if not (under_torchrun() or is_asked_beside()):
        check_unused(folder_of(job, options.get("out")))


def _to_start(options: Options) -> int:
    """Return how many processes train on the accelerators here; 1: this one, alone."""
    from penstock.training.local_ranks import ranks_to_start

    plan, cluster = (options.get(name) for name in ("plan", "cluster"))
    alone = options.get("until_loss") is not None
    return ranks_to_start(
        options.get("ranks"),
        plan and Path(str(plan)),
        cluster and Path(str(cluster)),
        alone=alone,
    )


def _are_trained(count: int, *, elastically: bool) -> bool:
    """Start so many ranks; return False where no plan can be made and one device is left to try.

    Raises:   typer.Exit: they have ended.
    """
    from penstock.training.local_ranks import UNPLANNED, start_ranks

    ended = start_ranks(count, elastically=elastically)
    if ended.code == UNPLANNED and (replicas := ended.replicas) > 1:
        face.say(f"{ended.why}\ntraining {replicas} replicas without a plan instead")
        ended = start_ranks(replicas, eagerly=True)
    if ended.code != UNPLANNED:
        raise typer.Exit(ended.code)
    face.say(f"{ended.why}\nno plan can be made: training it on one device instead")
    return False


def _check_validated(summary: Mapping[str, object]) -> None:
    """Raise where a validation was asked for and did not end; the run itself is whole.

    Raises:   JobError.
    """
    from penstock.training.results import NOT_VALIDATED

    if why := summary.get(NOT_VALIDATED):
        message, _, hint = str(why).partition("; ")
        raise JobError(f"{message}: there is no val_loss; the run is whole", hint=hint)


@contextlib.contextmanager
def _over(*, as_json: bool) -> Generator[None]:
    """Show what a run gave that was over before; a script that resumes it again has nothing to do.

    Raises:   typer.Exit: it was.  PlanError: it was, and has left no summary.
    """
    from penstock.training import view
    from penstock.training.finished import NothingLeftError

    try:
        yield
    except NothingLeftError as problem:
        summary = problem.summary()
        if summary is None:
            raise
        face.say(f"{problem.message}: nothing is left to do ({problem.hint})")
        if as_json:
            face.show_json(summary)
        else:
            face.show(view.words_of(summary))
        raise typer.Exit(face.DONE) from problem


@contextlib.contextmanager
def _as_rank() -> Generator[None]:
    """Let a rank that finds no plan tell that to who has started it, and nobody else.

    Raises:   typer.Exit: it does.
    """
    from penstock.training.local_ranks import UNPLANNED, UnplannedError

    try:
        yield
    except UnplannedError as problem:
        raise typer.Exit(UNPLANNED) from problem
