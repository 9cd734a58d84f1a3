"""At work: whether a run has its folder now; it is asked before torch is loaded.

.lock           its process is there, as the kernel says
elastic.json    a rank answers at one of these addresses, and proves the token
.ended.json     the run is over, whatever the others say
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PlanError, RunError
from penstock.files import read_json
from penstock.members.calling import introduced
from penstock.members.mesh import anybody_at
from penstock.members.words import Where
from penstock.script import script_of
from penstock.training import lock
from penstock.typed import damage, typed

ADDRESSES, ENDED = "elastic.json", ".ended.json"


@dataclass(frozen=True, slots=True)
class _Listeners:
    """What the file of addresses tells, as far as ranks are asked whether they are there."""

    token: str
    members: dict[str, Where]


def is_under_way(folder: Path) -> bool:
    """Return whether ranks of an elastic run in `folder` are at work.

    Raises:   RunError: its file of addresses is damaged.
    """
    path = folder / ADDRESSES
    if not path.exists() or (folder / ENDED).exists():
        return False
    content = read_json(path, RunError, "file of addresses")
    with damage(f"{path}", RunError, hint="start the run again"):
        known = typed(_Listeners, {name: content[name] for name in _Listeners.__slots__})
        token = bytes.fromhex(known.token)
    if not anybody_at(known.members.values()):
        return False
    for where in known.members.values():
        with suppress(RunError, OSError):  # another program may listen there by now
            introduced(where, token)
            return True
    return False


def check_unused(folder: Path) -> None:
    """Raise where a run has a folder, asked by a process that has begun none of its own.

    Who looks whether a lock is held lets go of it, where it is his own.
    Raises:   RunError.
    """
    if lock.holding_pid(folder) is not None and (holder := lock.holder_of(folder)):
        raise lock.in_use(folder, str(holder))
    check_free(folder)


def check_free(folder: Path) -> None:
    """Raise where ranks of an elastic run go on, whoever began it.

    Raises:   RunError.
    """
    if is_under_way(folder):
        hint = (
            f"`penstock stop {folder}` ends it; `penstock join {folder}` makes this process one of"
        )
        raise RunError(f"ranks of an elastic run are at work in {folder}", hint=f"{hint} them")


def folder_of(job: str, out: Path | str | None) -> Path:
    """Return the folder of a run of the job that a text names; "": it has no name.

    Raises:   PlanError: it is a file.
    """
    folder = Path("runs") / (_name(job) if job else "job") if out is None else Path(out)
    if url := url_of(out):
        folder = Path("runs") / url.rstrip("/").rpartition("/")[2]
    if folder.exists() and not folder.is_dir():
        hint = "give out a folder, or a new name"
        raise PlanError(f"{folder} is a file, not a folder", hint=hint)
    return folder


def url_of(out: Path | str | None) -> str:
    """Return the URL that names where a run is kept; "": it is a folder's path."""
    return out if isinstance(out, str) and "://" in out else ""


def _name(job: str) -> str:
    job = script_of(job).job
    place, _, name = job.rpartition(":") if ":" in job else (job, "", "")
    stem = Path(place).stem.rpartition(".")[2] or "job"
    return f"{stem}-{name}" if name else stem
