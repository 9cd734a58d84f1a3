"""Trust: whether what a run's folder names may be run unasked.

A folder of a run names code: the file of its job, and a policy's command for machines.  What this
user's own `penstock train` wrote is sealed with a key that only this user has (in the folder where
profiles are kept), so it is run unasked.  What others wrote, or other machines, is shown and asked
for, or named by `--job`.

Ignores:  who can write this user's files.
"""

import hmac
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.errors import JobError
from penstock.files import cache_folder

_KEY_BYTES = 32


def seal_of(text: str, place: str) -> str:
    """Return the seal of the words of a job and the folder they were given in; "": there is no key.

    The key is made when it is first asked for.
    """
    key = _key()
    return "" if key is None else hmac.digest(key, f"{text}\0{place}".encode(), "sha256").hex()


def is_sealed(text: str, place: str, seal: object) -> bool:
    """Return whether this user sealed these words."""
    known = seal_of(text, place)
    return (
        bool(known)
        and isinstance(seal, str)
        and hmac.compare_digest(known.encode(), seal.encode(errors="replace"))
    )


def ask_to_run(folder: Path, what: str, asks: Callable[[str], bool], hint: str) -> None:
    """Return if what a folder that is not one's own names is to be run.

    asks:     puts a question to a person; False where there is none.
    Raises:   JobError: it is not.
    """
    if asks(f"{folder} was not written by your own penstock on this machine. Run {what}?"):
        return
    message = f"{folder} was not written by your own penstock here, and names {what}"
    raise JobError(f"{message}, which is not run unasked", hint=hint)


def _key() -> bytes | None:
    """Return this user's key, made if there is none; None: it cannot be kept."""
    folder = cache_folder("keys")
    if folder is None:
        return None
    path = folder / "run"
    with suppress(OSError):
        if (key := _in(path)) is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".key-{secrets.token_hex(8)}")
            handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):
                os.link(part, path)  # the first one counts
            part.unlink()
            key = _in(path)
        return key
    return None


def _in(path: Path) -> bytes | None:
    """Return the key in a file that is this user's alone; None: there is none."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            key = file.read()
    except FileNotFoundError:
        return None
    is_safe = about.st_uid == os.geteuid() and not about.st_mode & 0o077
    return key if is_safe and len(key) == _KEY_BYTES else None
