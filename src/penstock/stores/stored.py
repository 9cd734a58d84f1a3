"""Stored: a dataset whose samples are objects of a store.

    data = ps.batches(ps.stored("s3://bucket/train", decode=picture, cache=20 * GB), 32)

It has a length and indexed samples, as any torch Dataset.  `ps.batches`, `ps.from_loader` and
`ps.bucketed` tell it which samples come next, in their own order, and it fetches these ahead; so it
does what a sampler names that goes through `in_order`.
"""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from penstock.errors import StoreError
from penstock.files import cache_folder
from penstock.stores.disk_cache import DiskCache
from penstock.stores.fetcher import Counted, Fetcher
from penstock.stores.object_store import ObjectPart, ObjectStore, StoredObject
from penstock.units import MiB

Decode = Callable[[bytes, str], Any]
_CHUNK_BYTES = 8 * MiB  # of a larger object several are fetched at once
_LIMIT_S = 60.0


class Fetching(NamedTuple):
    """How objects are fetched: requests at a time, bytes ahead, seconds that one may take."""

    requests: int
    ahead_bytes: int
    limit_s: float = _LIMIT_S


@final
@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A dataset of objects, in the order of their names."""

    store: ObjectStore
    objects: tuple[StoredObject, ...] = field(repr=False)
    decode: Decode
    cache: DiskCache | None
    fetching: Fetching
    _of_process: dict[int, Fetcher] = field(default_factory=dict[int, Fetcher], repr=False)

    def __len__(self) -> int:
        return len(self.objects)

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:   StoreError: it cannot be fetched.  What `decode` raises.
        """
        return self.decode(self.content(index), self.objects[index].name)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return samples that are fetched at once, as a torch DataLoader asks for a batch."""
        with self.following(iter(indices)):
            return [self[index] for index in indices]

    def in_order(self, indices: Iterable[int]) -> Iterator[int]:
        """Yield indices; the samples of those that follow are fetched meanwhile.

        For a loop, or as the sampler of a DataLoader without workers.
        """
        given: list[int] = []  # taken from the source ahead of what is yielded
        source = iter(indices)

        def coming() -> Iterator[int]:
            for index in source:
                given.append(index)
                yield index

        own = coming()
        with self.following(own) as go_on:
            while given or next(own, None) is not None:
                yield given.pop(0)
                go_on()

    @contextmanager
    def following(self, indices: Iterator[int]) -> Generator[Callable[[], None]]:
        """Fetch the samples ahead that will be asked for, in this order.

        What it gives is called where somebody has read enough for now.
        """
        ahead = self._ahead()
        course = ahead.follow(part for index in indices for part in self.parts(index))
        try:
            yield lambda: ahead.go_on(course)
        finally:
            ahead.leave(course)

    @property
    def counted(self) -> Counted:
        """Return what this process has taken so far, and the seconds that it waited for that."""
        return self._ahead().counted

    def content(self, index: int) -> bytes:
        """Return the bytes of a sample."""
        ahead = self._ahead()
        return b"".join([ahead.take(part) for part in self.parts(index)])

    def parts(self, index: int) -> list[ObjectPart]:
        """Return the requests that fetch a sample."""
        of = self.objects[index]
        if of.size_bytes <= _CHUNK_BYTES:
            return [ObjectPart(of, 0, of.size_bytes)]
        starts = range(0, of.size_bytes, _CHUNK_BYTES)
        return [ObjectPart(of, at, min(_CHUNK_BYTES, of.size_bytes - at)) for at in starts]

    def fetched(self, part: ObjectPart) -> bytes:
        """Return a part from the cache, else from the store."""
        if self.cache is None:
            return self.store.read(part)
        key = f"{self.store.url} {part.key}"
        known = self.cache.get(key)
        if known is None:
            known = self.store.read(part)
            self.cache.put(key, known)
        return known

    def _ahead(self) -> Fetcher:
        """Return what fetches in this process: threads do not outlive a fork."""
        if (known := self._of_process.get(os.getpid())) is None:
            known = self._of_process.setdefault(os.getpid(), Fetcher(self.fetched, *self.fetching))
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what it is, not what is on its way."""
        return Stored, (self.store, self.objects, self.decode, self.cache, self.fetching)


def stored(
    url: str,
    *,
    decode: Decode | None = None,
    cache: int | DiskCache | None = None,
    ahead: int = 64 * MiB,
    requests: int = 32,
    options: Mapping[str, Any] | None = None,
) -> Stored:
    """Return a dataset of the objects at a URL of fsspec, in the order of their names.

    url:       of a folder, with all that is below it, or a pattern: s3://bucket/train/*.png.
    decode:    makes a sample of an object's bytes and its name below the URL; None: the bytes.
    cache:     bytes of a disk that may hold objects, for all processes of this host, in the user's
               folder of caches; or a `ps.DiskCache` of another folder.  None: nothing is kept.
    ahead:     bytes that are fetched before they are needed, by each reader.
    requests:  on their way at a time, in each process that reads.
    options:   of the file system: keys, endpoints, timeouts.

    Raises:    StoreError: there is no such store or nothing in it; an argument below 1.
    """
    for name, value in (("ahead", ahead), ("requests", requests)):
        if value < 1:
            raise StoreError(f"{name} is {value}", hint=f"set {name} to 1 or more")
    if isinstance(cache, int):
        folder = cache_folder("stores")
        if folder is None:
            hint = 'cache=ps.DiskCache("/scratch/objects", most_bytes)'
            raise StoreError("this user has no folder of caches", hint=hint)
        cache = DiskCache(folder, cache)
    store = ObjectStore(url, options or {})
    return Stored(store, store.objects(), decode or _as_is, cache, Fetching(requests, ahead))


def _as_is(content: bytes, name: str) -> bytes:
    return content
