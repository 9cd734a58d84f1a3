"""Tokens: what stands for a value in comparisons of a state with a later one.

Whatever Python lets one see without a change of it: numbers and text, memory, where a stream
stands, what generators and contexts keep in C.
"""

# Any object may come by here.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeArgument=false

import ctypes
import datetime
import decimal
import enum
import gc
import hashlib
import io
import itertools
import mmap
import os
import queue
import random
import sqlite3
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONG = 1_000  # a longer container is one value
_MOST_BYTES = 2**20  # of memory that is not numpy's
_MOST_ELEMENTS = 10_000_000  # of an array; of a larger one, evenly spread ones are read
_PLAIN = (int, float, complex, str, bytes, range, slice, enum.Enum, PurePath, type(None))
_SHOWN = (decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)
_PACKED = ("gzip", "bz2", "lzma", "zipfile")
_OF_CONTEXTS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


class Moving:
    """Stands for what nobody can tell: equal to nothing, for it may be another one each time.

    iterator:  of which it is said, if it is one.
    """

    def __init__(self, iterator: Any = None) -> None:
        self.iterator = iterator


def plain(value: object) -> object:
    """Return what stands for a value that holds no others; None for another."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str | bytes) and len(value) > LONG:
        return type(value).__name__, len(value), hash(value)
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, _TORCH):
        return str(value)
    if isinstance(value, np.generic):
        return repr(value)
    if isinstance(value, _SHOWN):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, np.ndarray) and value.dtype != object:
        every = value.size // _MOST_ELEMENTS + 1
        part = value.tobytes() if every == 1 else value.reshape(-1)[::every].tobytes()
        return value.shape, str(value.dtype), hashlib.blake2b(part).hexdigest()
    return _memory(value)


def _memory(value: Any) -> object:
    """Return what stands for memory that Python lets one see: of an array, of ctypes, shared."""
    if isinstance(value, ctypes._Pointer):  # pyright: ignore[reportPrivateUsage]
        return None  # its own memory says where the other is
    try:
        with memoryview(value) as seen:
            part = seen.cast("B") if seen.contiguous and seen.nbytes else seen
            first = part[:_MOST_BYTES].tobytes()
            return (first, value.tell()) if isinstance(value, mmap.mmap) else first
    except (TypeError, ValueError, BufferError):  # it has none, or one of other objects
        return None


def key_of(key: object) -> object:
    token = plain(key)
    return type(key).__qualname__ if token is None else token


def whole(value: Collection[Any]) -> object:
    """Return what stands for a long container: all of it if it is plain, else its ends."""
    try:
        return hash(tuple(value))
    except TypeError:
        ends = (*itertools.islice(value, 50), len(value))
        return tuple(key_of(one) for one in ends)


def state_of(value: Any) -> object:
    """Return the state of what keeps it in C: generators of random numbers, databases, digests."""
    if isinstance(value, decimal.Context):
        return _of_context(value)
    if type(value).__module__ in ("_hashlib", "_blake2", "_md5", "_sha1", "_sha2", "_sha3"):
        return value.hexdigest() if hasattr(value, "hexdigest") else None
    if isinstance(value, queue.SimpleQueue):
        return value.qsize()
    if isinstance(value, sqlite3.Connection):
        return value.total_changes
    if isinstance(value, random.Random):
        try:
            return hash(value.getstate())
        except NotImplementedError:  # the system's randomness has none
            return None
    if isinstance(value, torch.Generator):
        return hash(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return None


# -- streams --------------------------------------------------------------------------------------


def position_of(stream: Any) -> object:
    """Return where a stream stands, and what it holds if it is memory; nothing is written.

    None: it stands nowhere, as a pipe; or it is what all print to; or it is not known.
    """
    if stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return None
    if stream.closed:
        return "closed"
    if isinstance(stream, io.StringIO):
        return "text", stream.tell(), hash(stream.getvalue())
    if isinstance(stream, io.BytesIO):
        with stream.getbuffer() as seen:
            return "bytes", stream.tell(), seen.nbytes, hash(seen[:_MOST_BYTES].tobytes())
    if isinstance(stream, io.TextIOWrapper):
        return _position_of_text(stream)
    if isinstance(stream, _FILES) or type(stream).__module__ in _PACKED:
        return ("file", stream.tell()) if stream.seekable() else None
    return None


def _position_of_text(stream: "io.TextIOWrapper[Any]") -> object:
    """Return where a file of text stands.

    `tell` would write what waits to be written, so it is asked only where that is nothing.  While
    lines are being taken by `next`, nobody can tell: then it is another place each time.
    """
    below = position_of(stream.buffer)
    if below is None or isinstance(below, str):
        return below
    if stream.writable():
        return "file", below
    try:
        return "file", stream.tell()
    except OSError:
        return Moving()


# -- what a process keeps for all -----------------------------------------------------------------


def settings() -> Iterator[tuple[str, str, str, object]]:
    """Yield (what, the name by which code reads it, or else this one, what it is now)."""
    context = decimal.getcontext()
    for name in _OF_CONTEXTS:
        yield f"{name} of the decimal context", name, "getcontext", str(getattr(context, name))
    yield "the decimal context", "Decimal", "", _of_context(context)
    yield "sys.getrecursionlimit()", "getrecursionlimit", "", sys.getrecursionlimit()
    yield "sys.getswitchinterval()", "getswitchinterval", "", sys.getswitchinterval()
    yield "gc.get_threshold()", "get_threshold", "", gc.get_threshold()
    yield "threading.active_count()", "active_count", "", threading.active_count()
    yield "the errors of numpy", "geterr", "", repr(np.geterr())
    yield "how numpy prints", "get_printoptions", "array2string", repr(np.get_printoptions())
    yield "torch.get_num_threads()", "get_num_threads", "", torch.get_num_threads()
    yield "torch.get_default_dtype()", "get_default_dtype", "", str(torch.get_default_dtype())
    try:
        yield "the working directory", "getcwd", "cwd", os.getcwd()
    except FileNotFoundError:  # removed meanwhile
        return


def _of_context(context: decimal.Context) -> object:
    traps = tuple(signal.__name__ for signal, is_set in context.traps.items() if is_set)
    return (*(getattr(context, name) for name in _OF_CONTEXTS), traps)
