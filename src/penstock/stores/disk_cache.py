"""Disk cache: bytes by key in a folder of bounded size, shared by all processes of a host.

One file for each key: the content and its digest, written under another name first.  Who writes
holds the lock of the folder, so a file under such a name that he finds was left by a process that
was killed.  What is evicted while somebody reads it stays readable for him, as files do on POSIX.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from penstock.errors import StoreError
from penstock.files import FULL

log = logging.getLogger(__name__)
_DIGEST_BYTES = 16
_PART = ".part"
_FULL_PART = 0.9  # of the room stays filled when files are evicted, so that it is rarely looked for
_DIGITS = 20


class _KeptFile(NamedTuple):
    used_ns: int
    size_bytes: int
    path: Path


@final
@dataclass(frozen=True, slots=True)
class DiskCache:
    """Bytes by key in a folder: at most `most_bytes`, digests included.

    The folder stays the same one where the process goes to another afterwards.

    Raises:   StoreError: there is no room for anything.
    """

    folder: Path | str
    most_bytes: int

    def __post_init__(self) -> None:
        if self.most_bytes < 1:
            message = f"a cache of {self.most_bytes} bytes in {self.folder}"
            raise StoreError(message, hint="give it some GB, or leave it out: cache=None")
        object.__setattr__(self, "folder", Path(self.folder).absolute())

    def get(self, key: str) -> bytes | None:
        """Return what is kept for a key, which is the last to be evicted then; None: nothing is.

        What is damaged is removed.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                whole = file.read()
                os.utime(file.fileno())
        except FileNotFoundError:
            return None
        content, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
        if _digest(content) == digest:
            return content
        log.warning("%s is damaged: it is fetched again", path)
        path.unlink(missing_ok=True)
        return None

    def put(self, key: str, content: bytes) -> None:
        """Keep `content`, where it is no larger than the cache; others are evicted to make room.

        A disk without room is left as it is.
        """
        path, size = self._path(key), len(content) + _DIGEST_BYTES
        if size > self.most_bytes:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked() as lock:
                if not path.exists():
                    self._reserve(lock, size)
                    _write(path, content)
        except OSError as problem:
            if problem.errno not in FULL:
                raise
            log.warning("%s is not kept in the cache: %s", path, os.strerror(problem.errno))

    def held_bytes(self) -> int:
        """Return the bytes of all files, digests included."""
        return sum(file.size_bytes for file in self._files())

    def _reserve(self, lock: int, size: int) -> None:
        """Make room for a file, and count it before it is there: who is killed counts too much."""
        text = os.pread(lock, _DIGITS, 0)
        total = int(text) if text.isdigit() else self.most_bytes
        if total + size > self.most_bytes:
            total = self._evict(self.most_bytes - size)
        os.pwrite(lock, b"%0*d" % (_DIGITS, total + size), 0)

    def _evict(self, room: int) -> int:
        """Remove what was used longest ago until the rest fits into `room`; return its bytes."""
        files = sorted(self._files())
        total = 0
        for file in files:
            if file.path.name.endswith(_PART):
                file.path.unlink(missing_ok=True)
            else:
                total += file.size_bytes
        if total <= room:
            return total
        for file in files:
            if total <= _FULL_PART * room:
                break
            if not file.path.name.endswith(_PART):
                file.path.unlink(missing_ok=True)
                total -= file.size_bytes
        return total

    def _files(self) -> Generator[_KeptFile]:
        for path in Path(self.folder).glob("??/*"):
            try:
                about = path.stat()
            except FileNotFoundError:  # found damaged by another process
                continue
            yield _KeptFile(about.st_mtime_ns, about.st_size, path)

    def _path(self, key: str) -> Path:
        name = hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
        return Path(self.folder) / name[:2] / name

    @contextmanager
    def _locked(self) -> Generator[int]:
        """Hold the folder against all other writers; the system lets go of it for who is killed."""
        handle = os.open(Path(self.folder) / "lock", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + _PART)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.write(_digest(content))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
