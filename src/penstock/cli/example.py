"""penstock example: the example jobs, which are in the wheel, as files of one's own."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import face
from penstock.errors import JobError
from penstock.files import write_text

EXAMPLES = ("gpt.py", "hf.py", "mixed.toml", "texts.py")
_FOLDER = Path(__file__).parent.parent / "examples"  # NAME.txt: no code of the package


def example(
    name: Annotated[str, typer.Argument(metavar="NAME", help="gpt, hf, mixed or texts.")] = "gpt",
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: NAME.py in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write an example: a job to train (gpt), nine of Hugging Face (hf), texts of many
    lengths (texts), machines (mixed).

    Example: penstock example gpt && penstock train gpt.py
    """
    file = next((file for file in EXAMPLES if name in (file, file.partition(".")[0])), None)
    if file is None:
        listed = ", ".join(file.partition(".")[0] for file in EXAMPLES)
        raise JobError(f"there is no example {name}", hint=f"there are {listed}")
    place = to or Path(file)
    if place.exists():
        raise JobError(f"{place} is there already", hint="give another place: --to FILE")
    face.check_place(place)
    write_text(place, (_FOLDER / f"{file.partition('.')[0]}.txt").read_text())
    use = f"penstock train {place}" if file.endswith(".py") else f"--cluster {place}"
    if as_json:
        face.show_json({"written": str(place)})
    else:
        face.show(f"wrote {place}: {use}{':llama' if file == 'hf.py' else ''}")
