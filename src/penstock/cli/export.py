"""penstock export: the weights of a run as one safetensors file, or as a Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import face
from penstock.errors import CheckpointError, PenstockError
from penstock.job import Job, load_job
from penstock.script import as_started
from penstock.training.saved import job_to_run

if TYPE_CHECKING:
    from penstock.files import Json

_FILE = ".safetensors"
_OTHERS = (".pt", ".pth", ".bin", ".ckpt", ".h5", ".onnx", ".gguf", ".npz")


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `penstock train` wrote.")],
    to: Annotated[
        Path, typer.Option(metavar="FILE.safetensors|FOLDER", help="A folder: for from_pretrained.")
    ],
    checkpoint: Annotated[
        str, typer.Option(help="A step, best or latest; average, best,average: of weights.")
    ] = "latest",
    job: Annotated[str | None, typer.Option(help="Default: the job that trained DIR.")] = None,
    yes: face.Yes = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write trained weights for `load_state_dict`, or for `from_pretrained`.

    Example: penstock export runs/gpt --to model.safetensors
    """
    with face.loading():
        from penstock.checkpoints.checkpoint import load
        from penstock.training.export import (
            chosen,
            save_pretrained,
            save_state,
            trained,
            with_averages,
        )

    is_file = _check_form(to)
    which, average = _parsed(checkpoint)
    place = chosen(folder, which)
    text = job or job_to_run(folder, face.agrees(yes=yes))
    with face.only_results(), as_started(text):
        kept = with_averages(load(place), str(place)) if average else load(place)
        model = trained(_job_of(folder, text, is_given=job is not None), kept)
        left_out = (save_state if is_file else save_pretrained)(model, to)
    found: dict[str, Json] = {"written": str(to), "checkpoint": str(place), "step": kept.step}
    found["left_out"] = list(left_out)
    if as_json:
        face.show_json(found)
    else:
        what = "average of the weights" if average else "weights"
        face.show(f"{to}: the {what} after step {kept.step}, of {place}")
        for name in left_out:
            face.show(f"left out: {name}, sparse, as the model builds it: load with strict=False")


def _parsed(checkpoint: str) -> tuple[str, bool]:
    """Return which checkpoint is meant, and whether the average of its weights is."""
    which, _, word = checkpoint.rpartition(",")
    return (which or "latest", True) if word == "average" else (checkpoint, False)


def _check_form(to: Path) -> bool:
    """Return whether `to` is to be a file; raise if it cannot be written, or is unknown."""
    if to.suffix == _FILE:
        face.check_place(to)
        return True
    if to.suffix in _OTHERS or to.is_file():
        hint = "give FILE.safetensors, or a folder for what from_pretrained reads"
        raise CheckpointError(f"--to {to} is neither a safetensors file nor a folder", hint=hint)
    face.check_place(to / "config.json")
    return False


def _job_of(folder: Path, text: str, *, is_given: bool) -> Job:
    """Return the job that a run's folder, or the command, names."""
    try:
        return load_job(text)
    except PenstockError as problem:
        if is_given:
            raise
        message = f"the job of {folder}, {text}, cannot be loaded: {problem.message}"
        raise type(problem)(message, hint="say where it is now: --job JOB") from problem
