"""penstock train: the main job, from an unmodified model to a trained one and a report."""

import contextlib
import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from penstock.cli import face, flags
from penstock.errors import JobError, RunError


def train(  # long: the flags of the command  # noqa: PLR0913
    job: Annotated[str, typer.Argument(metavar="JOB", help="A file.py[:name] or module[:name].")],
    plan: Annotated[Path | None, typer.Option(help="Train with this plan.")] = None,
    schedule: Annotated[str | None, typer.Option(help=flags.SCHEDULE)] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Stages of a pipeline.")] = None,
    tensor: Annotated[int, typer.Option(min=1, help=flags.TENSOR)] = 1,
    units: Annotated[str | None, typer.Option(metavar="block|N", help=flags.UNITS)] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Total steps; default: the job's.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Total ranks; default: best.")] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="The machines (TOML) it runs on; default: measured.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR|URL", help="Default: runs/NAME of the job's file."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint.")
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER|F.safetensors", help="Begin with these weights."),
    ] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option(help="500 (steps), 30s, 10m or 2h; default: by --mtbf, else 100.")
    ] = None,
    keep: Annotated[
        str, typer.Option(metavar="N[,every=N][,no-best]", help="Which checkpoints stay.")
    ] = "2",
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures, as 3h.")
    ] = None,
    offload: Annotated[str | None, typer.Option(help=flags.OFFLOAD)] = None,
    memory: Annotated[str | None, typer.Option(help=flags.MEMORY)] = None,
    post_validation: face.PostValidation = False,
    rules: face.WithRules = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Without a plan: plain data parallelism.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare it with the plain loop first.")
    ] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse what no plan can train, or what differs.")
    ] = False,
    trial: Annotated[
        bool, typer.Option("--trial/--no-trial", help="Let the best plans run some steps first.")
    ] = True,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Go on when ranks are lost, or others join.")
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="TOML", help="Have the machines that this policy wants; --elastic."),
    ] = None,
    until_loss: Annotated[
        float | None,
        typer.Option(metavar="X", help="End at this loss; finds ranks and batch."),
    ] = None,
    objective: Annotated[
        Literal["time", "cost"], typer.Option(help="To that loss with least of it.")
    ] = "time",
    audit: Annotated[
        str,
        typer.Option(metavar="N%[,stop|,warn]", help="Time to compare steps with the plain loop."),
    ] = "1%",
    forget_state: Annotated[
        bool, typer.Option("--forget-state", help="Go on without state that is not saved.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a job: examine, trace, measure, search for a plan, prove it, run it and report.

    Example: penstock train examples/gpt.py --out runs/gpt
    """
    with face.busy("loading PyTorch"):
        from penstock.training import ask, view
        from penstock.training.started import UNPLANNED, ranks_to_start, start_ranks
        from penstock.training.train import train as train_job

    alone = until_loss is not None
    if (count := ranks_to_start(ranks, plan, cluster, alone=alone)) > 1:
        ended = start_ranks(count, elastically=elastic)
        if ended.code == UNPLANNED and (replicas := ended.replicas) > 1:
            face.say(f"{ended.why}\ntraining {replicas} replicas without a plan instead")
            ended = start_ranks(replicas, eagerly=True)
        if ended.code != UNPLANNED:
            raise typer.Exit(ended.code)
        face.say(f"{ended.why}\nno plan can be made: training it on one device instead")
        ranks = 1
    with _over(as_json=as_json), face.only_results(), _as_rank():
        trained = train_job(
            job,
            cluster=cluster,
            plan=plan,
            ranks=ranks,
            stages=stages,
            schedule=schedule,
            tensor=tensor,
            units=ask.units_asked(units),
            offload=ask.offload_asked(offload),
            memory=ask.memory_asked(memory),
            post_validation=post_validation,
            rules=rules or (),
            num_steps=steps,
            out=out,
            resume=resume,
            weights=weights,
            checkpoint_every=checkpoint_every,
            keep=keep,
            mtbf=mtbf,
            check=check,
            strict=strict,
            eager=eager,
            trial=trial,
            elastic=elastic,
            policy=policy,
            until_loss=until_loss,
            objective=objective,
            audit=audit,
            forget_state=forget_state,
        )
    if trained is not None and as_json:
        face.show_json(json.loads(json.dumps(trained.summary)))
    elif trained is not None:
        face.show(view.words_of(trained.summary))
    _check_validated(trained.summary if trained else {})
    until = cast("dict[str, Any]", trained.summary.get("until") or {}) if trained else {}
    if until and not until["reached"]:
        last = (
            "no loss is known" if until["reached_loss"] is None else f"{until['reached_loss']:.4g}"
        )
        message = f"the {until['by']} loss is {last} in the end, not {until['loss']:g}"
        raise RunError(message, hint="--steps N --resume goes on; or give another --until-loss")


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
    from penstock.training.over import NothingLeftError

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
    from penstock.training.started import UNPLANNED, UnplannedError

    try:
        yield
    except UnplannedError as problem:
        raise typer.Exit(UNPLANNED) from problem
