"""A store of fsspec that counts, waits, fails and shortens as a test says; in memory."""

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem


class SlowStore(AbstractFileSystem):
    """Objects of this process, by path: slow://NUMBER/root/NAME, of one store at a time."""

    protocol = "slow"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    read: ClassVar[list[str]] = []  # paths, in the order in which they were asked for
    before: Callable[[str], None] | None = None  # what each request does first
    most = under_way = number = 0
    lock = threading.Lock()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        root = self._strip_protocol(path)
        found = [
            {"name": name, "size": len(content), "type": "file", "etag": str(hash(content))}
            for name, content in self.objects.items()
            if name == root or name.startswith(f"{root}/")
        ]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [each["name"] for each in found]

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        if self._strip_protocol(path) == "closed":
            raise PermissionError("no key")
        return super().find(path, *args, **options)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        kind = type(self)
        number, _, path = path.partition("/")
        if int(number) != kind.number:  # who asks was left over by another test
            raise FileNotFoundError(path)
        with kind.lock:
            kind.read.append(path)
            kind.under_way += 1
            kind.most = max(kind.most, kind.under_way)
        try:
            if kind.before is not None:
                kind.before(path)
            return self.objects[f"{number}/{path}"][start:end]
        finally:
            with kind.lock:
                kind.under_way -= int(number) == kind.number


def filled(objects: dict[str, bytes], *, again: bool = False) -> str:
    """Return the URL of a new store of these objects; again: of the same one, which has others."""
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    with SlowStore.lock:
        number = SlowStore.number = SlowStore.number + (not again)
        SlowStore.read, SlowStore.before, SlowStore.most, SlowStore.under_way = [], None, 0, 0
    SlowStore.objects = {f"{number}/root/{name}": each for name, each in objects.items()}
    return f"slow://{number}/root"
