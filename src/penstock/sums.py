"""Sums: in how few numbers gradients travel where ranks sum them, as a job and a plan say it.

    bfloat16, float16   each number in 16 bits; what ranks sum to is rounded to them as well
    int8                each number in 8 bits, BLOCK of them with one scale
    sign                each number in 1 bit, BLOCK of them with one scale
    top:0.01            one in a hundred of the numbers, those greatest in size, with their places
    rank:4              of each matrix a product of two that have 4 columns
    delayed             each number as it is, a step later: its sum has a whole step to hide in

All but the first two hold back what they do not send: a rank adds it to its gradient of the next
step.  What all ranks have summed, and what they hold back, is then the sum of their gradients.

Source:  1-bit SGD with error feedback, Interspeech 2014, and arXiv:1901.09847 (sign); MSTopK,
         arXiv:2010.10458 (top); PowerSGD, arXiv:1905.13727 (rank); Pipe-SGD, arXiv:1811.03619
         (delayed).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]
SumsKind: TypeAlias = Literal["as they are", "16 bits", "int8", "sign", "top", "rank", "delayed"]

BLOCK = 256  # numbers with one scale
ALIGNED = 16  # numbers: a gradient begins at a multiple of it
_SCALE_BYTES = 4  # float32
_PLACED_BYTES = 8  # a number of float32, and its place
_WORDS = '"bfloat16", "float16", "int8", "sign", "top:0.01", "rank:4" or "delayed"'
_BITS = {"int8": 8, "sign": 1}
_PASSES = {
    "int8": 30.0,
    "sign": 25.0,
    "top": 25.0,
    "rank": 10.0,
    "delayed": 3.0,
}  # measured, of 2 million numbers
HALVES = "bfloat16", "float16"


class SumsWay(NamedTuple):
    """How gradients travel.

    amount:  of "top", the part of the numbers; of "rank", the columns.
    """

    kind: SumsKind
    amount: float = 0.0

    @property
    def holds_back(self) -> bool:
        """Return whether what is not sent is added to the next step's gradient."""
        return self.kind in ("int8", "sign", "top", "rank", "delayed")

    @property
    def copies(self) -> int:
        """Return how many copies of its gradients a rank keeps for it."""
        return (2 if self.kind == "delayed" else 1) if self.holds_back else 0

    @property
    def passes(self) -> float:
        """Return how often as long as a copy of all numbers it takes to send and read them so."""
        return _PASSES.get(self.kind, 0.0)

    def kept_of(self, count: int) -> int:
        """Return how many of so many numbers "top" sends: one at least."""
        return min(count, max(1, round(self.amount * count)))

    def columns_of(self, shape: Shape) -> int:
        """Return the columns of the two matrices that "rank" sends; 0: it goes as it is.

        That is what has fewer numbers than they, or one dimension.
        """
        rows, width = as_matrix(shape)
        columns = int(self.amount)
        return columns if columns * (rows + width) < rows * width else 0


AS_THEY_ARE = SumsWay("as they are")


def as_matrix(shape: Shape) -> tuple[int, int]:
    """Return rows and columns of a gradient as a matrix: the first dimension, and all others."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def sums_way(text: str | None) -> SumsWay:
    """Return the way that a text names; None: gradients travel as they are.

    Raises:   ValueError: it names none; with what there is.
    """
    if text is None:
        return AS_THEY_ARE
    if text in HALVES:
        return SumsWay("16 bits")
    if text in ("int8", "sign", "delayed"):
        return SumsWay(text)
    kind, colon, amount = text.partition(":")
    if colon and kind == "top":
        part = _number(amount)
        if not 0 < part < 1:
            raise ValueError(f'a part of the numbers between 0 and 1, as "top:0.01"; {text!r} is')
        return SumsWay("top", part)
    if colon and kind == "rank":
        if not amount.isdecimal() or not 1 <= int(amount) <= 2**16:
            raise ValueError(f'a whole number of columns, as "rank:4"; {text!r} is not')
        return SumsWay("rank", int(amount))
    raise ValueError(f"{_WORDS}; {text!r} is none")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def blocks_of(count: int) -> int:
    """Return in how many blocks so many numbers are."""
    return -(-count // BLOCK)


def block_bytes(kind: SumsKind) -> int:
    """Return the bytes of a block: its scale, and its numbers."""
    return _SCALE_BYTES + BLOCK * _BITS[kind] // 8


def summed_as(way: SumsWay, shapes: Sequence[Shape], count: int, ranks: int) -> int:
    """Return as how large a tensor gradients are summed, in bytes.

    A sum of S bytes sends 2 (n - 1) S over n ranks, all of them together; so many bytes are sent
    here.  int8, sign: S = blocks * block_bytes; top, which each rank gives all others:
    S = n / 2 * 8 * kept; rank: S = 4 * (columns * (rows + width) of each matrix, and the rest).

    shapes:  of gradients of float32 that lie one behind the other;
    count:   numbers of all, gaps between them included.
    """
    match way.kind:
        case "as they are" | "delayed":
            return 4 * count
        case "16 bits":
            return 2 * count
        case "int8" | "sign":
            return blocks_of(count) * block_bytes(way.kind)
        case "top":
            return ranks * _PLACED_BYTES * way.kept_of(count) // 2
        case "rank":
            gaps = count - sum(map(math.prod, shapes))
            return 4 * (gaps + sum(_sent_of(way, shape) for shape in shapes))


def _sent_of(way: SumsWay, shape: Shape) -> int:
    columns = way.columns_of(shape)
    return columns * sum(as_matrix(shape)) if columns else math.prod(shape)


def in_words(text: str) -> str:
    """Return what a way changes in the mathematics of a step, after "gradients"."""
    way = sums_way(text)
    rest = "; what is not sent is added to the next step's, so steps are not those of a plain loop"
    match way.kind:
        case "as they are":
            return "are summed as they are"
        case "16 bits":
            return "are rounded once on each rank, and once summed"
        case "delayed":
            return "are summed while the next step is computed, and update the weights after it"
        case "int8":
            return f"travel in 8 bits, {BLOCK} with one scale{rest}"
        case "sign":
            return f"travel as signs, {BLOCK} with one scale{rest}"
        case "top":
            return f"travel where they are greatest, {100 * way.amount:g} % of them{rest}"
        case "rank":
            return f"travel as products of matrices of {way.amount:g} columns{rest}"
