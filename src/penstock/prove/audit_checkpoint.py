"""Audit checkpoint: the newest one up to which a run is proved, kept as checkpoints/audited."""

import json
import shutil
from pathlib import Path
from typing import cast

from penstock.checkpoints import checkpoint
from penstock.errors import CheckpointError
from penstock.files import read_json


def keep_audited(checkpoints: Path, step: int) -> None:
    """Keep the newest checkpoint after at most `step` steps as "audited": the run is proved to
    there.  Its files are the same ones under other names.
    """
    known = [one for one in checkpoint.steps_in(checkpoints) if one <= step]
    if not known or audited_in(checkpoints) == known[-1]:
        return
    new, folder = checkpoints / ".audited-new", checkpoints / "audited"
    shutil.rmtree(new, ignore_errors=True)
    try:
        source = checkpoint.folder_of(checkpoints, known[-1])
        shutil.copytree(source, new, copy_function=checkpoint.link)
    except (FileNotFoundError, shutil.Error):  # it has just been removed: a newer one is there
        return
    (new / "audited.json").write_text(json.dumps({"step": known[-1]}))
    if folder.exists():
        checkpoint.remove(folder)
    new.rename(folder)


def audited_in(checkpoints: Path) -> int | None:
    """Return after how many steps the last audited checkpoint is; None: there is none."""
    path = checkpoints / "audited" / "audited.json"
    if not path.exists():
        return None
    return cast(int, read_json(path, CheckpointError, "note of the audited checkpoint")["step"])


def back_to_audited(checkpoints: Path) -> tuple[int, Path] | None:
    """Give the last audited checkpoint its name again, if it has lost it; return its step and
    folder.  None: there is none.
    """
    step = audited_in(checkpoints)
    if step is None:
        return None
    folder = checkpoint.folder_of(checkpoints, step)
    if not folder.exists():
        shutil.copytree(checkpoints / "audited", folder, copy_function=checkpoint.link)
        (folder / "audited.json").unlink()
    return step, folder
