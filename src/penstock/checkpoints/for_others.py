"""For others: whole weights beside a checkpoint of parts, for readers that know of no parts.

Where ranks divide stages, each of them writes its parts of tensors.  When a run has ended, weights
and buffers of which there are parts stand in the last checkpoint as a whole, too: in
weights.safetensors, which state.json does not name, so nothing of Penstock reads it.
"""

from pathlib import Path

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from penstock.checkpoints.checkpoint import latest, unread_tensors
from penstock.checkpoints.folders import writing

WHOLE = "weights.safetensors"
_MOST_BYTES = 4 * 2**30  # all are in memory at once; `penstock export` writes larger ones


def put_whole_beside(checkpoints: Path) -> None:
    """Write whole weights into the newest checkpoint, if it has parts of them and is not large.

    Raises:   CheckpointError: the disk is full, or the folder cannot be written.
    """
    folder = latest(checkpoints)
    if folder is None:
        return
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tensors = unread_tensors(folder)
    divided = [key for key in tensors.divided if key.startswith(("weights/", "buffers/"))]
    if not divided or size > _MOST_BYTES:
        return
    hidden = folder / f".{WHOLE}"
    with writing(folder):
        save_file({key: tensors[key] for key in divided}, hidden)
        hidden.rename(folder / WHOLE)
