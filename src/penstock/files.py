"""Files: written whole or not at all, read with an error that says what is wrong."""

import json
import os
import secrets
from pathlib import Path
from typing import TypeAlias, cast

from penstock.errors import PenstockError

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


def write_text(path: Path | str, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def read_json(path: Path | str, error: type[PenstockError], what: str) -> dict[str, Json]:
    """Return the JSON object in `path`; every way in which it can be unreadable is an `error`.

    Raises:   `error`: no such file, not UTF-8, not JSON, or not an object.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as problem:
        hint = f"check the path of the {what}"
        raise error(f"cannot read {what} {path}: {problem.strerror}", hint=hint) from problem
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as problem:
        hint = f"the file is damaged or no {what}; make it again"
        raise error(f"{what} {path} is not readable JSON: {problem}", hint=hint) from problem
    if not isinstance(content, dict):
        found = type(content).__name__
        raise error(f"{what} {path} holds a {found}, not an object", hint=f"is it a {what}?")
    return cast("dict[str, Json]", content)
