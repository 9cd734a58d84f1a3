"""Queries: which code of the job ran, and what it read of the machine: time, chance, a file.

Code of the job is all that is neither Python's nor torch's nor of what only tells (progress bars,
writers of figures).  A profile function sees every call; so does an audit hook every file.
"""

import datetime
import gc
import os
import random
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

import penstock
from penstock.examine.numpy_seeds import makes_a_seeded_generator

Line = tuple[str, int]

_TELLERS = {"tqdm", "rich", "wandb", "tensorboard", "tensorboardX", "matplotlib", "_pytest"}
_LOOP = str(Path(__file__).parent / "impurities.py")  # which runs the job's code
_STDLIB = sysconfig.get_path("stdlib")
_THEIRS = (
    *(str(Path(module.__file__ or "").parent) for module in (torch, np, penstock)),
    "<frozen",
    "<string>",
    "<segment",
)
_OPENING = tuple(str(Path(module.__file__ or "").parent) for module in (torch, np))
# Files of Python through which code may ask without being the one that asks.
_THROUGH = ("uuid.py", "secrets.py", "random.py", "pathlib.py", "tempfile.py", "_pydatetime.py")
_LOOKING = ("genericpath.py", "posixpath.py", "pathlib.py", "glob.py", "shutil.py")
_SEEDING = ("torch/random.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
_READING = ("numpy", "torch/serialization.py", "pathlib.py", "safetensors", "gzip.py", "json")

_CLOCKS = {
    *(getattr(time, name) for name in ("time", "time_ns", "monotonic", "monotonic_ns")),
    *(getattr(time, name) for name in ("perf_counter", "perf_counter_ns", "process_time")),
    *(getattr(time, name) for name in ("process_time_ns", "localtime", "gmtime", "strftime")),
    *(getattr(time, name) for name in ("thread_time", "thread_time_ns", "clock_gettime", "ctime")),
}
_LOOKS = frozenset(("tell", "read", "readline", "readlines"))  # into a file that may be written
_FILES = {os.stat, os.lstat, os.fstat, os.lseek, os.access, os.listdir, os.scandir}
_CHANCE = {os.urandom, getattr(os, "getrandom", os.urandom)}
_MACHINE = {os.getpid, socket.gethostname, os.getloadavg, os.times, gc.get_count, gc.get_stats}


def text_of(line: Line) -> str:
    """Return a line with its path as one would write it here."""
    path, here = Path(line[0]), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line[1]}"


@cache
def is_ours(file: str) -> bool:
    """Return whether code of this file belongs to the job."""
    if file.startswith(_THEIRS):
        return False
    if "site-packages" in file or "dist-packages" in file:
        return _TELLERS.isdisjoint(file.replace("\\", "/").split("/"))
    return not file.startswith(_STDLIB)


def is_between(file: str, *, of_file: bool) -> bool:
    """Return whether code of the job may read through this file: Python's own.

    of_file:  what is read is a file, which torch and numpy open for others, too.
    """
    if file.startswith("<") or (of_file and file.startswith(_OPENING)):
        return True
    return file.startswith(_STDLIB) and "-packages" not in file


def line_of(frame: FrameType | None) -> Line | None:
    """Return the line of the job's code that is being run, seen from `frame`; None in backward."""
    while frame is not None and frame.f_code.co_filename != _LOOP:
        if is_ours(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


class Queries:
    """What ran while `listening`: code objects of the job, and what was asked for at which line.

    codes:      of the loss; `of_data`, `of_updates` of the job's other functions.
    found:      (what, line) -> why.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.found: dict[tuple[str, Line], str] = {}
        self.seeds: list[Line] = []  # where torch's own generator is seeded
        self.escapes = False  # a tensor's values became Python's or numpy's
        self.reads_files = False
        self.into = self.codes
        self.of_data: set[CodeType] = set()
        self.of_updates: set[CodeType] = set()
        self.selves: list[tuple[CodeType, object]] = []  # whose methods ran elsewhere

    @contextmanager
    def listening(self, to: set[CodeType] | None = None) -> Generator[None]:
        """Note what runs, in `to`: then it is not the loss, and may read what it likes."""
        self.into = self.codes if to is None else to
        before = sys.getprofile()
        sys.setprofile(self._called if to is None else self._other)
        try:
            yield
        finally:
            sys.setprofile(before)

    @property
    def elsewhere(self) -> set[CodeType]:
        """What ran of other functions than the loss."""
        return self.of_data | self.of_updates

    def watch_files(self) -> None:
        """Note the files that are read from now on; for the rest of this process."""
        sys.addaudithook(self._audited)

    def _other(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in self.into and is_ours(code.co_filename):
            self.into.add(code)
            if code.co_argcount and (own := frame.f_locals.get(code.co_varnames[0])) is not None:
                self.selves.append((code, own))

    def _called(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            if is_ours(frame.f_code.co_filename):
                self.into.add(frame.f_code)
            return
        if event != "c_call":
            return
        if (what := _what(called)) is not None:
            if what == "files" and not self.reads_files:
                return
            asker = _asker(frame, _LOOKING if what == "files" else _THROUGH)
            if asker is not None and not (what == "chance" and makes_a_seeded_generator(asker)):
                self.found[what, (asker.f_code.co_filename, asker.f_lineno)] = _WHY[what]
        elif getattr(called, "__self__", None) is torch.default_generator:
            line = _asking(frame, _SEEDING) if called.__name__ == "manual_seed" else None
            self.seeds += [line] if line is not None else []
        elif isinstance(getattr(called, "__self__", None), torch.Tensor):
            self.escapes |= called.__name__ in ("numpy", "tolist", "__array__", "item")
            line = _asking(frame, ()) if called.__name__ == "data_ptr" else None
            if line is not None:
                self.found["the address of a tensor", line] = "read here; each run has others"

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "sqlite3.connect") or not self.reads_files:
            return
        path, mode, flags = (*arguments, "r", 0)[:3]
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        line = _asking(frame, _READING)
        if line is not None and path != ":memory:" and _reads(mode, flags, frame):
            self.found[f"the file {path}", line] = "read here while the loss is computed"


_WHY = {
    "the time": "read here; a traced step would keep that of the trace",
    "chance": "drawn here, and no seed sets it",
    "files": "looked for here while the loss is computed",
    "the machine": "read here, and it differs from process to process",
}


def _what(called: Any) -> str | None:
    try:
        if called in _CLOCKS:
            return "the time"
        if called in _CHANCE:
            return "chance"
        if called in _MACHINE:
            return "the machine"
        if called in _FILES:
            return "files"
    except TypeError:  # an object that has no hash
        return None
    owner = getattr(called, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return "the time" if called.__name__ in ("now", "utcnow", "today") else None
    return None


def _asking(frame: FrameType | None, through: tuple[str, ...]) -> Line | None:
    """Return the line of the job that asks; None where something else in between does."""
    asker = _asker(frame, through)
    return None if asker is None else (asker.f_code.co_filename, asker.f_lineno)


def _asker(frame: FrameType | None, through: tuple[str, ...]) -> FrameType | None:
    while frame is not None:
        file = frame.f_code.co_filename
        if is_ours(file) and not any(name in file for name in through):
            return frame
        if not any(name in file for name in through):
            return None
        frame = frame.f_back
    return None


def _reads(mode: object, flags: object, frame: FrameType | None) -> bool:
    """Return whether a file is opened to be read, or is one that code goes on with and reads."""
    if isinstance(mode, str):
        return "r" in mode or ("a" in mode and _looks_into_files(frame))
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_APPEND)
    return not writes or _looks_into_files(frame)


def _looks_into_files(frame: FrameType | None) -> bool:
    """Return whether the code of the job that opens a file also reads it, or asks where it ends."""
    while frame is not None and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and not _LOOKS.isdisjoint(frame.f_code.co_names)


# -- generators that all share --------------------------------------------------------------------


def global_chance() -> tuple[object, ...]:
    """Return the state of the random generators of Python and of numpy."""
    kind, *rest = np.random.get_state()
    return random.getstate(), (kind, rest[0].tobytes(), *rest[1:])  # pyright: ignore


def position() -> tuple[object, ...]:
    """Return what changes in them with every draw, cheaply."""
    state = np.random.get_state()
    return hash(random.getstate()), state[2], state[3:]  # pyright: ignore


@contextmanager
def watching(probe: Callable[[], object], tell: Callable[[Line], None]) -> Generator[None]:
    """Tell the lines of the job's code, or else of others', after which `probe` has changed."""
    last: list[Any] = [probe(), None]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not is_ours(frame.f_code.co_filename):
            return None
        now = probe()
        if now != last[0]:
            last[0] = now
            if last[1] is not None:
                tell(last[1])
        last[1] = (frame.f_code.co_filename, frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
