"""penstock example: the example jobs, which are in the wheel, as files of one's own."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import face
from penstock.errors import JobError
from penstock.files import write_text

_FIELD = "fluid.py", "experts.py", "labels.py", "disruptions.py", "neighbours.py", "meta.py"
_SCRIPTS = ("tasks.py",)  # that start the training themselves
EXAMPLES = ("gpt.py", "hf.py", *_FIELD, *_SCRIPTS, "texts.py", "mixed.toml")
_NAMES = ", ".join(file.partition(".")[0] for file in EXAMPLES)
_JOBS = {"hf.py": "llama", "experts.py": "expert_0", "labels.py": "label_0", "texts.py": "buckets"}
_FOLDER = Path(__file__).parent.parent / "examples"  # NAME.txt: no code of the package


def example(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="gpt, hf, fluid, experts, labels, disruptions, texts, mixed."
        ),
    ] = "gpt",
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: NAME.py in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write an example: a job to train (gpt), nine of Hugging Face (hf), texts of many
    lengths (texts), machines (mixed).

    Also what the field trains: a surrogate of a solver (fluid), experts of a diffusion model that
    never meet (experts), adversarial nets of each label (labels), an LSTM in 16 bits
    (disruptions), a graph network with a cache of features (neighbours), a recommender that learns
    to learn (meta), tasks on machines that come and go (tasks).

    Example: penstock example gpt && penstock train gpt.py
    """
    file = next((file for file in EXAMPLES if name in (file, file.partition(".")[0])), None)
    if file is None:
        raise JobError(f"there is no example {name}", hint=f"there are {_NAMES}")
    place = to or Path(file)
    if place.exists():
        raise JobError(f"{place} is there already", hint="give another place: --to FILE")
    face.check_place(place)
    write_text(place, (_FOLDER / f"{file.partition('.')[0]}.txt").read_text())
    use = f"penstock train {place}" if file.endswith(".py") else f"--cluster {place}"
    use = f"python {place}" if file in _SCRIPTS else use
    if as_json:
        face.show_json({"written": str(place)})
    else:
        face.show(f"wrote {place}: {use}{f':{_JOBS[file]}' if file in _JOBS else ''}")
