"""Store: what was examined and proved before, found again by all that it was made from.

The key covers the source of every file that is neither Python's nor installed, Penstock's own
source, versions, the job's numbers, and what the caller adds (graph, plan).  A folder that cannot
be used costs the time of proving again, never the run.
"""

import hashlib
import json
import logging
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import torch

from penstock.cluster.machine import cpu_name
from penstock.errors import CheckpointError
from penstock.files import Json, read_json, write_text
from penstock.job import Job, is_users
from penstock.profile.store import default_folder
from penstock.typed import damage, typed

Kept = TypeVar("Kept")
log = logging.getLogger(__name__)


def key_of(job: Job, text: str, *more: str) -> str | None:
    """Return what identifies this job on this machine; None where nothing does.

    text:     how it was named: which of a file's jobs it is; "": not at all.
    more:     what its source and numbers do not tell: graph, plan.

    Ignores:  what the job reads from elsewhere: data files, the environment, the network.
    """
    main = sys.modules.get("__main__")
    if not text or getattr(main, "__file__", None) is None:  # its source is nowhere
        return None
    digest = hashlib.sha256()
    numbers = (f"{f.name}={getattr(job, f.name)!r}" for f in fields(job) if _is_plain(job, f.name))
    made_by = (torch.__version__, platform.python_version(), cpu_name())
    for line in (text, *more, *numbers, *made_by):
        digest.update(f"{line}\n".encode())
    for path in sorted(set(_sources())):
        digest.update(path.encode())
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:32]


def _is_plain(job: Job, name: str) -> bool:
    return isinstance(getattr(job, name), str | int | float | bool | None)


def _sources() -> Iterator[str]:
    """Yield the files that the user's code, and Penstock's, were loaded from."""
    yield from map(str, Path(__file__).parent.parent.rglob("*.py"))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if (
            isinstance(file, str)
            and file.endswith(".py")
            and is_users(file)
            and Path(file).exists()
        ):
            yield file


def kept(kind: type[Kept], key: str | None, what: str) -> Kept | None:
    """Return what `keep` wrote under `key` as a `kind`; None where there is none."""
    path = _path(key, what)
    if path is None or not path.is_file():
        return None
    try:
        with damage(f"{path}", CheckpointError, hint="delete it"):
            return typed(kind, read_json(path, CheckpointError, what))
    except CheckpointError as problem:
        log.warning("what was kept cannot be used, so it is made again: %s", problem)
        return None


def keep(key: str | None, what: str, content: Mapping[str, Json]) -> None:
    """Write `content` where `kept` looks; where that fails, only warn."""
    path = _path(key, what)
    if path is None:
        return
    try:
        write_text(path, json.dumps(content, indent=2) + "\n")
    except OSError as problem:
        log.warning("%s could not be kept: %s", what, problem)


def _path(key: str | None, what: str) -> Path | None:
    profiles = default_folder()
    if profiles is None or key is None:
        return None
    return profiles.with_name("proofs") / f"{key}-{what}.json"
