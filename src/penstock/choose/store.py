"""Store: what was examined and proved before, found again by all that it was made from.

The key covers the source of every file that is neither Python's nor installed, Penstock's own
source, versions, the job's numbers, how ranks are started, and what the caller adds (graph, plan).
Under one key there may be several findings: each says what the job's code had read beyond its
source, and is found only where that has the same values now.  A folder that cannot be
used costs the time of proving again, never the run.
"""

import hashlib
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from penstock.cluster.machine import cpu_name
from penstock.errors import CheckpointError
from penstock.examine.surroundings import NOTES, is_as_then
from penstock.files import Json, cache_folder, read_json, write_text
from penstock.job import Job, is_users
from penstock.processes.started import under_torchrun
from penstock.typed import damage, typed

Kept = TypeVar("Kept")
log = logging.getLogger(__name__)

_MOST = 8  # findings under one key
_IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w., \t]+)", re.MULTILINE)


def key_of(job: Job, text: str, *more: str) -> str | None:
    """Return what identifies this job on this machine; None where nothing does.

    text:     how it was named: which of a file's jobs it is; "": not at all.
    more:     what its source and numbers do not tell: graph, plan.

    Ignores:  what the job reads from elsewhere, of which each finding tells, and the network.
    """
    main = sys.modules.get("__main__")
    if not text or getattr(main, "__file__", None) is None:  # its source is nowhere
        return None
    digest = hashlib.sha256()
    numbers = (f"{f.name}={getattr(job, f.name)!r}" for f in fields(job) if _is_plain(job, f.name))
    made_by = (torch.__version__, platform.python_version(), cpu_name())
    sources = {path: _source(path) for path in sorted(set(_sources()))}
    lines = (text, *more, *numbers, *made_by, _started(), *_imported(sources))
    for line in lines:
        digest.update(f"{line}\n".encode())
    for path, source in sources.items():
        digest.update(path.encode())
        digest.update(source.digest)
    return digest.hexdigest()[:32]


def _started() -> str:
    """Return how the ranks of this run are started."""
    return f"{os.environ['WORLD_SIZE']} by torchrun" if under_torchrun() else "here"


class _Source(NamedTuple):
    """The digest of a file, and the packages that it imports; of Penstock's own none."""

    digest: bytes
    imports: frozenset[str]


def _source(path: str) -> _Source:
    """Return what a file holds; one that is as it was is not read again."""
    now = os.stat(path)
    return _read(path, (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))


@cache
def _read(path: str, as_of: tuple[int, ...]) -> _Source:
    content, names = Path(path).read_bytes(), set[str]()
    if is_users(path):
        for found in _IMPORTED.findall(content.decode(errors="replace")):
            names |= {
                each.split()[0].partition(".")[0] for each in found.split(",") if each.split()
            }
    return _Source(hashlib.sha256(content).digest(), frozenset(names))


def _imported(sources: Mapping[str, _Source]) -> Iterator[str]:
    """Yield the installed packages that the user's files import, with their versions."""
    names = {name for source in sources.values() for name in source.imports}
    for name in sorted(names - sys.stdlib_module_names):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not is_users(file) and Path(file).exists():
            changed = Path(file).stat()
            version = getattr(module, "__version__", "")
            yield f"{name} {version} {changed.st_size} {changed.st_mtime_ns}"


def _is_plain(job: Job, name: str) -> bool:
    return isinstance(getattr(job, name), str | int | float | bool | None)


def _sources() -> Iterator[str]:
    """Yield the files that the user's code, and Penstock's, were loaded from."""
    yield from _own_sources()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if (
            isinstance(file, str)
            and file.endswith(".py")
            and is_users(file)
            and Path(file).exists()
        ):
            yield file


@cache
def _own_sources() -> tuple[str, ...]:
    return tuple(map(str, Path(__file__).parent.parent.rglob("*.py")))


def kept(kind: type[Kept], key: str | None, what: str) -> Kept | None:
    """Return what `keep` wrote under `key` as a `kind`; None where there is none."""
    path = _path(key, what)
    try:
        for finding in _findings(path, what):
            if is_as_then(finding.read):
                with damage(f"{path}", CheckpointError, hint="delete it"):
                    found = typed(kind, finding.content)
                NOTES.add(finding.read)
                return found
    except CheckpointError as problem:
        log.warning("what was kept cannot be used, so it is made again: %s", problem)
    return None


def keep(key: str | None, what: str, content: Mapping[str, Json]) -> None:
    """Write `content` where `kept` looks, with what the job has read; failing, only warn."""
    path = _path(key, what)
    if path is None:
        return
    read = NOTES.taken()
    try:
        before = [each for each in _findings(path, what) if each.read != read]
    except CheckpointError:
        before = []
    rows = [{"read": read, "content": content}]
    rows += [{"read": each.read, "content": each.content} for each in before[: _MOST - 1]]
    try:
        write_text(path, json.dumps({"findings": rows}, indent=2) + "\n")
    except OSError as problem:
        log.warning("%s could not be kept: %s", what, problem)


@dataclass(frozen=True, slots=True)
class _KeptFinding:
    """What was found, and the digests of what the job had read then."""

    read: Mapping[str, str]
    content: Mapping[str, Any]


def _findings(path: Path | None, what: str) -> list[_KeptFinding]:
    """Return what was kept, the newest first.

    Raises:   CheckpointError: the file is damaged.
    """
    if path is None or not path.is_file():
        return []
    content = read_json(path, CheckpointError, what)
    with damage(f"{path}", CheckpointError, hint="delete it"):
        return [typed(_KeptFinding, row) for row in typed(list[Any], content.get("findings"))]


def _path(key: str | None, what: str) -> Path | None:
    profiles = cache_folder("profiles")
    if profiles is None or key is None:
        return None
    return profiles.with_name("proofs") / f"{key}-{what}.json"
