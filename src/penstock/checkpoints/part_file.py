"""Part file: tensors as one file of safetensors, with a checksum of each.  Bytes only, no torch.

    8 bytes: length of the header    header: JSON    bytes of the tensors, the widest types first

Source: the format's own description, github.com/huggingface/safetensors.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from penstock.errors import CheckpointError

Block: TypeAlias = memoryview | bytes
Checksums = dict[str, str]  # by key
HEADER = ""  # the key of what a file begins with
_ALIGNED = 8
_LENGTH = struct.Struct("<Q")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_AT_ONCE = 2**24  # bytes that are summed and written in one go


class Piece(NamedTuple):
    """A tensor as a file describes it; `dtype` is the format's name, like "BF16"."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    width: int  # bytes of a number
    size_bytes: int


def arranged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces as they lie in a file: the widest numbers first, so that each is aligned."""
    return sorted(pieces, key=lambda piece: (-piece.width, piece.key))


def header_of(pieces: Sequence[Piece]) -> bytes:
    """Return what a file of these pieces, in this order, begins with."""
    rows: dict[str, object] = {}
    start = 0
    for piece in pieces:
        ends = [start, start + piece.size_bytes]
        rows[piece.key] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": ends}
        start = ends[1]
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return _LENGTH.pack(len(text)) + text


def pour(
    pieces: Sequence[Piece], blocks: Iterable[Block], put: Callable[[Block], object]
) -> Checksums:
    """Hand a file on to `put`: pieces, each with its bytes; return their checksums (CRC-32)."""
    head = header_of(pieces)
    put(head)
    sums = {HEADER: _words(zlib.crc32(head))}
    for piece, block in zip(pieces, blocks, strict=True):
        total = 0
        for start in range(0, len(block), _AT_ONCE):
            some = block[start : start + _AT_ONCE]
            total = zlib.crc32(some, total)
            put(some)
        sums[piece.key] = _words(total)
    return sums


def write_file(path: Path, pieces: Sequence[Piece], blocks: Iterable[Block]) -> Checksums:
    """Write pieces, each with its bytes, and return their checksums once all is on the disk.

    Raises:   OSError: no room or no permission.
    """
    handle = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)  # less the umask
    try:
        sums = pour(pieces, blocks, lambda block: _put(handle, block))
        os.fsync(handle)
    finally:
        os.close(handle)
    return sums


def _put(handle: int, block: Block) -> None:
    """Write all of a block: less may be written where the disk ends."""
    left = memoryview(block)
    while left:
        left = left[os.write(handle, left) :]


def _words(checksum: int) -> str:
    return f"{checksum:08x}"


def check(place: str, content: Block, sums: Mapping[str, str], *, hint: str) -> None:
    """Raise unless a file has the checksums that it was written with.

    Raises:   CheckpointError: it ends early, or the bytes of a tensor, which is named, are others.
    """
    view = memoryview(content)
    whole = f"checkpoint file {place} is damaged"
    size = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else len(view)
    start = _LENGTH.size + size
    if len(view) < start:
        raise CheckpointError(f"{whole}: it ends early", hint=hint)
    if _words(zlib.crc32(view[:start])) != sums.get(HEADER):
        raise CheckpointError(f"{whole}: the list of its tensors has changed", hint=hint)
    for key, row in _rows(bytes(view[_LENGTH.size : start]), whole, hint).items():
        first, last = (start + offset for offset in row.data_offsets)
        if last < first:
            raise CheckpointError(f"{whole}: tensor {key} ends before it begins", hint=hint)
        if len(view) < last:
            raise CheckpointError(f"{whole}: it ends early, in tensor {key}", hint=hint)
        if _words(zlib.crc32(view[first:last])) != sums.get(key):
            raise CheckpointError(f"{whole}: the bytes of tensor {key} have changed", hint=hint)


class _TensorRow(msgspec.Struct):
    """What the list of tensors says of one."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


_LIST = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ROW = msgspec.json.Decoder(_TensorRow)


def _rows(text: bytes, whole: str, hint: str) -> dict[str, _TensorRow]:
    """Return what a file says of its tensors, by key.

    Raises:   CheckpointError: it is no list of tensors.
    """
    try:
        rows = _LIST.decode(text)
        return {key: _ROW.decode(row) for key, row in rows.items() if key != "__metadata__"}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        message = f"{whole}: what it begins with is no list of tensors: {problem}"
        raise CheckpointError(message, hint=hint) from None
