"""Object store: where objects lie, by a URL of fsspec; they are listed once and read in parts.

What fails is tried again a few times, then refused with its URL.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, final

import fsspec  # pyright: ignore[reportMissingTypeStubs]

from penstock.errors import StoreError

_TAGS = (  # in which stores tell that an object is another one by now
    *("ETag", "etag", "md5Hash", "content_md5", "generation", "version_id"),
    *("LastModified", "last_modified", "updated", "mtime", "created"),
)


class StoredObject(NamedTuple):
    """An object of a store.

    name:        below the URL.
    size_bytes:  -1: the store does not tell.
    tag:         by which another content under this path is known.
    """

    path: str
    name: str
    size_bytes: int
    tag: str


class ObjectPart(NamedTuple):
    """Bytes of an object from `start` on; size -1: all that there are."""

    of: StoredObject
    start: int
    size_bytes: int

    @property
    def key(self) -> str:
        """Return a text that no other part has, nor this one once the object is another."""
        return repr((self.of.path, self.of.size_bytes, self.of.tag, self.start, self.size_bytes))


@final
@dataclass(frozen=True, slots=True)
class ObjectStore:
    """Objects below a URL, or those that it matches: s3://bucket/train, s3://bucket/*.png.

    options:  of the file system: keys, endpoints, timeouts.
    again_s:  seconds after which what failed is tried again, try by try.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    again_s: tuple[float, ...] = (0.1, 1.0, 3.0)
    _shared: dict[int, Any] = field(default_factory=dict[int, Any], repr=False, compare=False)

    def objects(self) -> tuple[StoredObject, ...]:
        """Return all objects, by name.

        Raises:   StoreError: there are none, or they cannot be listed.
        """
        files, root = self._files()
        try:
            found = cast("dict[str, Any]", self._listed(files, root))
        except Exception as problem:
            message = f"{self.url} cannot be listed: {_words(problem)}"
            raise StoreError(message, hint="check the URL, and the keys in options") from problem
        top = root.rstrip("/")
        objects = [
            _object(path, top, about) for path, about in found.items() if about["type"] == "file"
        ]
        if not objects:
            hint = "give a folder of objects, a pattern that some match, keys in options"
            raise StoreError(f"there is nothing at {self.url}", hint=hint)
        return tuple(sorted(objects, key=lambda each: each.name))

    def read(self, part: ObjectPart) -> bytes:
        """Return bytes of an object.

        Raises:   StoreError: the last try failed, or gave fewer or more bytes than there are.
        """
        tries = 1 + len(self.again_s)
        for pause_s in (*self.again_s, None):
            try:
                content = self._read(part)
                problem = _unlike(part, content)
                if problem is None:
                    return content
            except Exception as raised:  # noqa: BLE001 - of any file system that there is
                problem = raised
            if pause_s is not None:
                time.sleep(pause_s)
            else:
                self._refuse(part, problem, tries)
        raise AssertionError("the last try returns or raises")

    def _read(self, part: ObjectPart) -> bytes:
        files, _ = self._files()
        if part.start == 0 and part.size_bytes == part.of.size_bytes:
            return bytes(files.cat_file(part.of.path))
        return bytes(
            files.cat_file(part.of.path, start=part.start, end=part.start + part.size_bytes)
        )

    def _refuse(self, part: ObjectPart, problem: Exception, tries: int) -> None:
        hint = "is it still there, and the network? A resumed run goes on from its checkpoint"
        where = f"{part.of.path} of {self.url}"
        raise StoreError(f"{where} failed {tries} times: {_words(problem)}", hint=hint) from problem

    def _listed(self, files: Any, root: str) -> Any:
        if "*" in root:
            return files.glob(root, detail=True)
        return files.find(root, detail=True)

    def _files(self) -> tuple[Any, str]:
        """Return the file system of this process, and the path there.

        An asynchronous one is shared by all threads; of others each thread has its own.
        """
        if (known := self._shared.get(os.getpid())) is not None:
            return known
        try:
            files, root = cast("Any", fsspec).url_to_fs(self.url, **self.options)
        except (ImportError, ValueError, OSError, TypeError) as problem:
            hint = "write s3://BUCKET/PATH, gs://BUCKET/PATH, file:///PATH or another of fsspec"
            raise StoreError(f"{self.url}: {_words(problem)}", hint=hint) from problem
        if files.async_impl:
            return self._shared.setdefault(os.getpid(), (files, root))
        return files, root

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what it is, not what is open."""
        return ObjectStore, (self.url, self.options, self.again_s)


def _object(path: str, top: str, about: Mapping[str, Any]) -> StoredObject:
    size = about.get("size")
    name = path.removeprefix(top).lstrip("/") or path.rpartition("/")[2]
    tag = next((str(about[key]) for key in _TAGS if about.get(key) is not None), "")
    return StoredObject(path, name, -1 if size is None else int(size), tag)


def _unlike(part: ObjectPart, content: bytes) -> Exception | None:
    if part.size_bytes in (-1, len(content)):
        return None
    return ValueError(f"{len(content)} bytes came; the store has told {part.size_bytes}")


def _words(problem: BaseException) -> str:
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
