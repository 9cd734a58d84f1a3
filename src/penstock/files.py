"""Files: written whole or not at all, read with an error that says what is wrong."""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from types import NoneType
from typing import TypeAlias, cast

from penstock.errors import PenstockError, RunError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def write_bytes(path: Path | str, content: bytes) -> None:
    """Write `content` under a temporary name in the same folder, then rename it to `path`.

    Whoever reads `path` sees the old content or the new one, never a part.
    Raises:   OSError: the folder cannot be written or the disk is full; nothing is left behind.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_and_rename(path, content)
    except OSError as problem:
        problem.filename = str(path)  # not that of the temporary file
        raise


def _write_and_rename(path: Path, content: bytes) -> None:
    temporary = path.parent / f".{secrets.token_hex(8)}.part"
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # less the umask
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # there is no room
NO_ROOM = "free some space, or raise `ulimit -f`; resume=True goes on from the last checkpoint"
_REFUSED = errno.EPERM, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE
READ_ONLY = "let it be written there again; resume=True goes on from the last checkpoint"


def append(file: int, data: bytes, path: Path | str) -> None:
    """Write lines behind what an open file holds, all of them or none.

    Raises:   RunError: no room, or no permission: it names the file and the bytes.  The file is not
              at `path` any more: somebody has removed or moved it, or the folder in which it is.
    """
    before = os.fstat(file).st_size
    if not _is_at(file, path):
        message = f"{path} is gone, or is another file by now: what was written to it is lost"
        raise RunError(
            message, hint="leave the folder of a run where it is until the run has ended"
        )
    try:
        if os.write(file, data) < len(data):  # the disk is full to the last byte
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as problem:
        with contextlib.suppress(OSError):
            os.ftruncate(file, before)
        message = f"cannot write {len(data)} bytes to {path}: {problem.strerror}"
        hint = READ_ONLY if problem.errno in _REFUSED else NO_ROOM
        raise RunError(message, hint=hint) from problem


def _is_at(file: int, path: Path | str) -> bool:
    """Return whether an open file is at a path; a relative one may be of another folder by now."""
    about = os.fstat(file)
    if not about.st_nlink or not os.path.isabs(path):
        return about.st_nlink > 0
    try:
        return os.path.samestat(about, os.stat(path))
    except FileNotFoundError:
        return False


def add_line(path: Path | str, text: str) -> None:
    """Write one line behind what a file holds, whole or not at all.

    Raises:   RunError: as `append`.
    """
    with appending(path) as write:
        write(text)


@contextlib.contextmanager
def appending(path: Path | str) -> Generator[Callable[[str], None]]:
    """Yield what writes one line behind what a file holds, whole or not at all.

    Raises:   RunError: as `append`.  OSError: the file cannot be made.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)  # less the umask
    try:
        yield lambda text: append(file, text.encode() + b"\n", path)
    finally:
        os.close(file)


def write_text(path: Path | str, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def read_bytes(path: Path | str, error: type[PenstockError], what: str) -> bytes:
    """Return the content of `path`, which must be a regular file: others may never end.

    Raises:   `error`: no such file, no permission; a folder, a pipe, a device or a socket.
    """
    hint = f"check the path of the {what}"
    try:
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
            raise error(f"cannot read {what} {path}: it is {kind}, not a file", hint=hint)
        return Path(path).read_bytes()
    except OSError as problem:
        raise error(f"cannot read {what} {path}: {problem.strerror}", hint=hint) from problem


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


_NAMES: dict[type, str] = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


def read_json(path: Path | str, error: type[PenstockError], what: str) -> dict[str, Json]:
    """Return the JSON object in `path`; whatever makes it unreadable is an `error`.

    Raises:   `error`: no such file, not UTF-8, not JSON, or not an object.
    """
    return json_object(read_bytes(path, error, what), error, f"{what} {path}")


def read_noun(
    path: Path | str, error: type[PenstockError], what: str, *, hint: str
) -> dict[str, Json]:
    """Return the rest of the JSON object in `path`, which says that it is a `what`.

    Raises:   `error`: as `read_json`, or it is another thing.
    """
    content = read_json(path, error, what)
    found = content.pop("penstock", None)
    if found != what:
        told = f": it is a {found:.40}" if isinstance(found, str) else ""
        raise error(f"{path} is JSON, but no {what}{told}", hint=hint)
    return content


def json_object(text: bytes | str, error: type[PenstockError], place: str) -> dict[str, Json]:
    """Return the JSON object that `text` is.

    Raises:   `error`: not UTF-8, not JSON, or not an object.
    """
    hint = "the file is damaged, or not the right one; make it again"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:  # also of numbers with too many digits
        raise error(f"{place} is not readable JSON: {problem}", hint=hint) from problem
    if not isinstance(content, dict):
        raise error(f"{place} holds {_NAMES[type(content)]}, not an object", hint=hint)
    return cast("dict[str, Json]", content)


def finite(value: Json) -> Json:
    """Return a document without what JSON cannot express: what is not a number becomes null."""
    match value:
        case float() if value - value != 0:
            return None
        case list():
            return [finite(item) for item in value]
        case dict():
            return {key: finite(item) for key, item in value.items()}
        case _:
            return value


def cache_folder(what: str) -> Path | None:
    """Return this user's folder of what is kept between runs: "profiles", or "compiled" code.

    It is in XDG_CACHE_HOME, or in ~/.cache; None without a home.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = given if given.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "penstock" / what
