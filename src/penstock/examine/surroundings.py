"""Surroundings: what a job's code reads beyond its source: environment, files, folders.

Noted while the job is loaded and while it is examined, each with a digest of its value.  What was
found about the job is used again only where all of it has these values still.

Not noted:  files that code in C opens and closes at once; what comes over a network; what is
looked up without Python's `os`.
"""

import builtins
import hashlib
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from penstock.examine.queries import is_between, is_ours, text_of
from penstock.examine.streams import Pipe, pipes
from penstock.job import is_users

Line = tuple[str, int]

ENVIRONMENT, _FILE, _FOLDER, THERE = "environment ", "file ", "folder ", "is there "
NUMBER = "the number of the process"
_ALL = "*"  # the whole environment
_NOTHING = "nothing"
_WHOLE_BYTES, _SAMPLE_BYTES = 2**20, 2**16  # of a longer file beginning, middle and end count
# Names that others than the user set, and that differ from one start to the next.
_PASSING = re.compile(
    r"_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|TERM.*|WINDOWID|XDG_SESSION.*|SSH_.*|DISPLAY|DBUS_.*|LS_COLORS"
    r"|INVOCATION_ID|JOURNAL_STREAM|SLURM_.*|TORCHELASTIC_.*|MASTER_PORT|PYTEST_.*|PENSTOCK_.*"
)
_NO_FILES = re.compile(r"/(proc|sys|dev)/")
_CODE = (".so", ".pyc")


@final
class Notes:
    """What was read so far: name -> digest of the value that it had when it was read first.

    lines:  at which line of the job's code.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lines: dict[str, Line] = {}
        self.pipes: set[Pipe] = set()  # opened while the job was loaded
        self.written: dict[str, tuple[Line, str]] = {}  # files that were there, before it writes
        self._own: set[str] = set()  # what the code itself has set
        self.grown: dict[str, Line] = {}  # folders to which it adds, and lists, and adds again
        self.elsewhere: list[str] = []  # what a fork of this process has seen changed, in words
        self._filled: set[str] = set()  # folders to which the code itself has added files
        self._listed: set[str] = set()  # of these, those that it has listed since
        self._made: set[str] = set()  # files that the code itself has begun anew
        self._looks = False  # whether it is this that opens a file now

    def note(self, what: str, value: Callable[[], str] | None = None) -> None:
        """Note that somebody reads `what`, if that is the job's code; `value` returns its value.

        Of a file the value is that at the end.
        """
        if self._looks or what in self.values or what in self._own:
            return
        line = _asker(sys._getframe(1), of_file=value is None)  # pyright: ignore[reportPrivateUsage]
        if line is not None and (is_users(line[0]) or not what.startswith(THERE)):
            self.values[what] = "" if value is None else value()
            self.lines[what] = line

    def note_line(self, what: str) -> None:
        """Note only at which line of the job's code it is asked for: its value is never kept."""
        line = _asker(sys._getframe(1), of_file=False)  # pyright: ignore[reportPrivateUsage]
        if line is not None:
            self.lines.setdefault(what, line)

    def note_set(self, what: str) -> None:
        """Note that the code sets it: what it reads later comes from its source."""
        if what not in self.values:
            self._own.add(what)

    def note_written(self, path: str, *, anew: bool) -> None:
        """Note that somebody opens a file to write it, if that is the job's code.

        anew:     nothing of it stays: what is read of it later comes from the code.
        """
        if path in self.written or path in self._made:
            return
        line = _asker(sys._getframe(1), of_file=True)  # pyright: ignore[reportPrivateUsage]
        if line is None:
            return
        self._looks = True
        before = _of_file(path)
        self._looks = False
        if before == _NOTHING:
            self._note_added(os.path.dirname(path), line)
        if before == _NOTHING or (anew and f"{_FILE}{path}" not in self.values):
            self._made.add(path)
        else:
            self.written[path] = line, before

    def _note_added(self, folder: str, line: Line) -> None:
        if folder in self._listed:
            self.grown.setdefault(folder, line)
        self._filled.add(folder)

    def note_listed(self, folder: str) -> None:
        """Note that somebody lists a folder; what the job's code has added to it is seen then."""
        if folder in self._filled and not self._looks:
            line = _asker(sys._getframe(1), of_file=False)  # pyright: ignore[reportPrivateUsage]
            if line is not None:
                self._listed.add(folder)

    def forget_written(self) -> None:
        """Take all files that are there for what the job finds: also those that it has made."""
        self.written, self._made = {}, set()
        self.grown, self._filled, self._listed, self.elsewhere = {}, set(), set(), []

    def changed(self) -> list[str]:
        """Return which files and folders the job's code has read and changed, with the line."""
        files = [
            f"{text_of(line)} writes into {path}"
            for path, (line, before) in self.written.items()
            if f"{_FILE}{path}" in self.values and _of_file(path) != before
        ]
        folders = [f"{text_of(line)} adds to {path}" for path, line in self.grown.items()]
        return [*files, *folders, *self.elsewhere]

    def add(self, values: Mapping[str, str]) -> None:
        """Note what another process has read, or what was read before."""
        self.values = {**values, **self.values}

    def taken(self) -> dict[str, str]:
        """Return all of it, with files as they are now."""
        for what, value in self.values.items():
            self.values[what] = value or now_of(what)
        return dict(self.values)


NOTES = Notes()  # of this process: it has one environment, and one job as a rule


def now_of(what: str) -> str:
    """Return the digest of what has that name now."""
    for kind, look in (
        (ENVIRONMENT, _of_name),
        (_FILE, _of_file),
        (_FOLDER, _of_folder),
        (THERE, _of_place),
    ):
        if what.startswith(kind):
            return look(what.removeprefix(kind))
    return _NOTHING


def is_as_then(values: Mapping[str, str]) -> bool:
    """Return whether all that was read has the values that it had then."""
    return all(now_of(what) == value for what, value in values.items())


@contextmanager
def noting(*, in_fork: bool = False) -> Generator[None]:
    """Note what the job's code reads meanwhile.

    in_fork:  this process was made for that: it may see all files that Python opens to its end.
    """
    opened, modules, before = {*_opened()}, {*sys.modules}, pipes()
    environments = [each for each in (os.environ, os.environb) if type(each) is _Plain]
    patched = [(owner, name, getattr(owner, name)) for owner, name in _LOOKUPS]
    try:
        for each in environments:
            each.__class__ = _WatchedEnvironment
        for owner, name, plain in patched:
            setattr(owner, name, _NotedFunction(plain, _LOOKUPS[owner, name]))
        if in_fork:
            sys.addaudithook(_audited)
        yield
    finally:
        for each in environments:
            each.__class__ = _Plain
        for owner, name, plain in patched:
            setattr(owner, name, plain)
    NOTES.pipes |= pipes() - before
    more = [*_of_modules(modules), *(path for path in _opened() if path not in opened)]
    NOTES.add({f"{_FILE}{path}": "" for path in more if _is_input(path)})


def _of_modules(before: set[str]) -> Iterator[str]:
    """Yield the files of the user's modules that were loaded since."""
    for name, module in list(sys.modules.items()):
        if name not in before and isinstance(file := getattr(module, "__file__", None), str):
            yield file


def _opened() -> Iterator[str]:
    """Yield the files that this process has open or mapped."""
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if stat.S_ISREG(os.stat(int(number)).st_mode):
                yield os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # closed meanwhile
            continue


# -- who asks -------------------------------------------------------------------------------------


def _asker(frame: FrameType | None, *, of_file: bool) -> Line | None:
    """Return the line of the job's code that reads; None where something else does.

    It may ask through Python's own code, and for a file through torch's and numpy's.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__:
            if is_ours(file):
                return file, frame.f_lineno
            if "importlib" in file or not is_between(file, of_file=of_file):
                return None
        frame = frame.f_back
    return None


def _is_input(path: str) -> bool:
    """Return whether a path may be one of the job's inputs: neither the system's nor installed."""
    is_known = _NO_FILES.match(path) or path.endswith(_CODE) or " (deleted)" in path
    return path.startswith("/") and not is_known and is_users(path)


# -- environment ----------------------------------------------------------------------------------

_Plain: Any = type(os.environ)


class _WatchedEnvironment(_Plain):  # the one class that Python lets take its place
    """The environment, which notes who reads what."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str | bytes):
            name = os.fsdecode(key)
            if not _PASSING.fullmatch(name):
                NOTES.note(f"{ENVIRONMENT}{name}", lambda: _of_name(name))
        plain: Any = super()
        return plain.__getitem__(key)

    def __iter__(self) -> Any:
        NOTES.note(f"{ENVIRONMENT}{_ALL}", lambda: _of_name(_ALL))
        plain: Any = super()
        return plain.__iter__()

    def __setitem__(self, key: Any, value: Any) -> None:
        NOTES.note_set(f"{ENVIRONMENT}{os.fsdecode(key)}")
        plain: Any = super()
        plain.__setitem__(key, value)


def _of_name(name: str) -> str:
    known: dict[bytes, bytes] = vars(os.environ)["_data"]
    if name == _ALL:
        names = sorted(os.fsdecode(key) for key in known)
        rows = [(key, known[os.fsencode(key)]) for key in names if not _PASSING.fullmatch(key)]
        return _digest(repr(rows).encode())
    value = known.get(os.fsencode(name))
    return _NOTHING if value is None else _digest(value)


# -- files ----------------------------------------------------------------------------------------


def _note_file(path: object, mode: object = "r", *_: object, **more: object) -> None:
    mode = more.get("mode", mode)
    if isinstance(mode, int):  # flags of os.open
        mode = _mode_of(mode)
    if {*str(mode)} & {*"wax+"}:
        _note_written(path, anew="w" in str(mode))
    if not {*str(mode)} & {*"wax"} or "+" in str(mode):
        _note(_FILE, path)


def _mode_of(flags: int) -> str:
    if flags & os.O_TRUNC:
        return "w"
    return {os.O_RDONLY: "r", os.O_RDWR: "r+"}.get(flags & os.O_ACCMODE, "a")


def _note_folder(path: object = ".", *_: object, **__: object) -> None:
    path = "." if path is None else path
    _note(_FOLDER, path)
    if isinstance(path, str | bytes | os.PathLike):
        NOTES.note_listed(os.path.abspath(os.fsdecode(path)))  # pyright: ignore[reportUnknownArgumentType]


def _note_place(path: object, *_: object, **__: object) -> None:
    _note(THERE, path)


def _note(kind: str, path: object) -> None:
    if isinstance(path, str | bytes | os.PathLike):
        absolute = os.path.abspath(os.fsdecode(path))  # pyright: ignore[reportUnknownArgumentType]
        if _is_input(absolute):
            NOTES.note(f"{kind}{absolute}")


def _note_written(path: object, *, anew: bool) -> None:
    if isinstance(path, str | bytes | os.PathLike):
        absolute = os.path.abspath(os.fsdecode(path))  # pyright: ignore[reportUnknownArgumentType]
        if _is_input(absolute):
            NOTES.note_written(absolute, anew=anew)


_LOOKUPS: dict[tuple[Any, str], Callable[..., None]] = {
    (builtins, "open"): _note_file,
    (io, "open"): _note_file,
    (os, "open"): _note_file,
    (os, "listdir"): _note_folder,
    (os, "scandir"): _note_folder,
    (os, "stat"): _note_place,
    (os, "lstat"): _note_place,
    (os, "access"): _note_place,
    (os, "getpid"): lambda: NOTES.note_line(NUMBER),
}


@final
class _NotedFunction:
    """A function of Python, of which is noted what it is called with; equal to it elsewhere."""

    def __init__(self, plain: Callable[..., Any], note: Callable[..., None]) -> None:
        self._plain, self._note = plain, note

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self._note(*arguments, **more)
        return self._plain(*arguments, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._plain

    def __hash__(self) -> int:
        return hash(self._plain)


def _audited(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, mode, flags = arguments
        _note_file(path, flags if mode is None else mode)
    elif event == "sqlite3.connect":
        _note_file(arguments[0], "r+")


def _of_file(path: str) -> str:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return _NOTHING
        size = found.st_size
        with open(path, "rb", buffering=0) as file:
            if size <= _WHOLE_BYTES:
                return _digest(file.readall() or b"")
            parts = [f"{size} {found.st_mtime_ns}".encode()]
            for place in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
                file.seek(place)
                parts.append(file.read(_SAMPLE_BYTES) or b"")
    except OSError:
        return _NOTHING
    return _digest(b"".join(parts))


def _of_folder(path: str) -> str:
    try:
        return _digest(repr(sorted(os.listdir(path))).encode())
    except OSError:
        return _NOTHING


def _of_place(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return _NOTHING
    is_file = stat.S_ISREG(found.st_mode)
    return f"{stat.S_IFMT(found.st_mode)} {found.st_size if is_file else ''}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
