"""Sums: how copies of a stage agree: what of their gradients travels, or of their weights.

    bfloat16, float16   each number in 16 bits; what ranks sum to is rounded to them as well
    int8                each number in 8 bits, BLOCK of them with one scale
    sign                each number in 1 bit, BLOCK of them with one scale
    top:0.01            one in a hundred of the numbers, those greatest in size, with their places
    rank:4              of each matrix a product of two that have 4 columns
    delayed             each number as it is, a step later: its sum has a whole step to hide in
    delayed:3           likewise two steps later, as Pipe-SGD with K = 3; "delayed" is K = 2
    local:8             no gradient: each replica updates by its own, and weights are averaged
                        every 8 steps
    diloco:8            likewise; what an average has moved by is the gradient of an outer update
    easgd:8             likewise; replicas and a centre draw each other every 8 steps
    gossip:8            likewise; two replicas average every 8 steps, each time other two
    backup:1            a server updates by the gradients of all ranks but the slowest one
    ssp:3               a server updates by each gradient as it comes; no rank is more than 3 steps
                        ahead of another one.  "ssp:3:aware": at a rate divided by staleness
    async               likewise, with no bound; "async:aware"

The five in the middle hold back what they do not send: a rank adds it to its gradient of the next
step.  What all ranks have summed, and what they hold back, is then the sum of their gradients.
Four are of weights; state/averaged.py is their law.  That of the last three is referee.py.

Source:  1-bit SGD with error feedback, Interspeech 2014, and arXiv:1901.09847 (sign); MSTopK,
         arXiv:2010.10458 (top); PowerSGD, arXiv:1905.13727 (rank); Pipe-SGD, arXiv:1811.03619
         (delayed); local SGD, arXiv:1805.09767; DiLoCo, arXiv:2311.08105; EASGD, arXiv:1412.6651;
         D-PSGD, arXiv:1705.09056, with the partners of GossipGraD, arXiv:1803.05880.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]
AverageKind: TypeAlias = Literal["local", "diloco", "easgd", "gossip"]
ServedKind: TypeAlias = Literal["backup", "ssp", "async"]
SumsKind: TypeAlias = (
    Literal["as they are", "16 bits", "int8", "sign", "top", "rank", "delayed"]
    | AverageKind
    | ServedKind
)

BLOCK = 256  # numbers with one scale
ALIGNED = 16  # numbers: a gradient begins at a multiple of it
_SCALE_BYTES = 4  # float32
_PLACED_BYTES = 8  # a number of float32, and its place
_WORDS = (
    '"bfloat16", "float16", "int8", "sign", "top:0.01", "rank:4", "delayed:2", "local:8",'
    ' "diloco:8", "easgd:8", "gossip:8", "backup:1", "ssp:3" or "async"'
)
_BITS = {"int8": 8, "sign": 1}
_PASSES = {
    "int8": 30.0,
    "sign": 25.0,
    "top": 25.0,
    "rank": 10.0,
    "delayed": 3.0,
    "local": 1.0,
    "gossip": 1.0,
    "easgd": 4.0,
    "diloco": 6.0,
}  # measured, of 2 million numbers; the last four are counted
_COPIES = {
    **{"int8": 1, "sign": 1, "top": 1, "rank": 1, "easgd": 2, "diloco": 2},
    **{"backup": 2, "ssp": 2, "async": 2},  # beside the rank that has the server
}
_MOST_LATE = 1024  # steps
HALVES = "bfloat16", "float16"
AVERAGES: tuple[AverageKind, ...] = "local", "diloco", "easgd", "gossip"
SERVED: tuple[ServedKind, ...] = "backup", "ssp", "async"
OUTER = 0.7, 0.9  # rate and momentum of DiLoCo's outer update
_DRAWN = 0.9  # of EASGD, the part by which all replicas together draw the centre


class SumsWay(NamedTuple):
    """How gradients travel.

    amount:    of "top", the part of the numbers; of "rank", the columns; of "delayed", K: an update
               is by the gradients of K - 1 steps before; of "diloco", the rate of the outer update;
               of "easgd", the part by which a replica and the centre draw each other, 0: as many
               replicas as there are draw the centre by 0.9; of "backup", the ranks that are left
               out of a step; of "ssp", the steps of its bound.
    every:     steps from one average of weights to the next.
    momentum:  of "diloco", that of the outer update.
    aware:     of "ssp" and "async", whether rates are divided by staleness.
    """

    kind: SumsKind
    amount: float = 0.0
    every: int = 1
    momentum: float = 0.0
    aware: bool = False

    @property
    def holds_back(self) -> bool:
        """Return whether what is not sent is added to the next step's gradient."""
        return self.kind in ("int8", "sign", "top", "rank", "delayed")

    @property
    def averages(self) -> bool:
        """Return whether replicas average weights, in place of summing gradients."""
        return self.kind in AVERAGES

    @property
    def served(self) -> bool:
        """Return whether a server updates the weights by gradients as they come."""
        return self.kind in SERVED

    @property
    def copies(self) -> int:
        """Return how many copies of its gradients a rank keeps for it."""
        return self.late + 1 if self.late else _COPIES.get(self.kind, 0)

    @property
    def late(self) -> int:
        """Return the number of steps by which an update is later than its gradients."""
        return int(self.amount) - 1 if self.kind == "delayed" else 0

    def drawn(self, replicas: int) -> float:
        """Return by which part of their distance a replica of so many and the centre move."""
        return self.amount or _DRAWN / replicas

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
    if text in ("int8", "sign"):
        return SumsWay(text)
    kind, colon, amount = text.partition(":")
    if kind == "delayed":
        return _delayed(amount if colon else "2", text)
    if kind in AVERAGES:
        return _average(text)
    if kind in SERVED:
        return _served(text)
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


def _delayed(amount: str, text: str) -> SumsWay:
    """Return the way by which sums are late.

    Raises:   ValueError: the number is none.
    """
    if not amount.isdecimal() or not 2 <= int(amount) <= _MOST_LATE:
        words = f'a whole number from 2 to {_MOST_LATE}, as "delayed:3"'
        raise ValueError(f"{words}; {text!r} is not")
    return SumsWay("delayed", float(amount))


def _served(text: str) -> SumsWay:
    """Return the way of a server.

    Raises:   ValueError: its numbers are none.
    """
    kind: ServedKind = next(each for each in SERVED if each == text.partition(":")[0])
    rest = text.split(":")[1:]
    aware = kind != "backup" and rest[-1:] == ["aware"]
    numbers = rest[:-1] if aware else rest
    if kind == "async" and not numbers:
        return SumsWay(kind, aware=aware)
    least = 1 if kind == "backup" else 0
    is_number = len(numbers) == 1 and numbers[0].isdecimal()
    if kind == "async" or not is_number or not least <= int(numbers[0]) <= 2**20:
        words = {
            "backup": 'a whole number of ranks that are left out, as "backup:1"',
            "ssp": 'a whole number of steps, as "ssp:3" or "ssp:3:aware"',
            "async": '"async" or "async:aware"',
        }[kind]
        raise ValueError(f"{words}; {text!r} is not")
    return SumsWay(kind, float(numbers[0]), aware=aware)


_MORE = {"local": 0, "gossip": 0, "easgd": 1, "diloco": 2}  # numbers behind that of the steps


def _average(text: str) -> SumsWay:
    """Return the way that averages weights.

    Raises:   ValueError: its numbers are none.
    """
    kind: AverageKind = next(each for each in AVERAGES if each == text.partition(":")[0])
    every, *rest = text.split(":")[1:] or ["1" if kind == "gossip" else ""]
    if not every.isdecimal() or not 1 <= int(every) <= 2**20 or len(rest) > _MORE[kind]:
        more = {0: "", 1: ':0.1" with its part', 2: ':0.7:0.9" with rate and momentum'}[_MORE[kind]]
        words = f'a whole number of steps, as "{kind}:8"' + (f' or "{kind}:8{more}' if more else "")
        raise ValueError(f"{words}; {text!r} is not")
    numbers = [_number(each) for each in rest]
    if kind == "easgd":
        (part,) = numbers or [0.0]
        if rest and not 0 < part <= 1:
            raise ValueError(f'a part above 0, at most 1, as "easgd:8:0.1"; {text!r} is not')
        return SumsWay(kind, part, int(every))
    if kind == "diloco":
        rate, momentum = (*numbers, *OUTER[len(numbers) :])
        if not (0 < rate < math.inf and 0 <= momentum < 1):
            words = 'a rate above 0 and a momentum from 0 to 1, as "diloco:8:0.7:0.9"'
            raise ValueError(f"{words}; {text!r} is not")
        return SumsWay(kind, rate, int(every), momentum)
    return SumsWay(kind, 0.0, int(every))


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
        case (
            "as they are"
            | "delayed"
            | "local"
            | "diloco"
            | "easgd"
            | "gossip"
            | "backup"
            | "ssp"
            | "async"
        ):
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
        case "delayed" if way.late == 1:
            return "are summed while the next step is computed, and update the weights after it"
        case "delayed":
            return f"are summed in a step, and update the weights after it, {way.late} steps late"
        case "int8":
            return f"travel in 8 bits, {BLOCK} with one scale{rest}"
        case "sign":
            return f"travel as signs, {BLOCK} with one scale{rest}"
        case "top":
            return f"travel where they are greatest, {100 * way.amount:g} % of them{rest}"
        case "rank":
            return f"travel as products of matrices of {way.amount:g} columns{rest}"
        case "backup":
            few = f"{way.amount:g} ranks" if way.amount > 1 else "rank"
            return (
                f"of all but the slowest {few} make a step, by their mean; the others are dropped"
            )
        case "ssp" | "async":
            return f"{_come(way)}, so steps are not those of a plain loop"
        case "local" | "diloco" | "easgd" | "gossip":
            rest = "so steps are not those of a plain loop"
            return f"stay with their replica; {_averaged(way)}, {rest}"


def _come(way: SumsWay) -> str:
    """Return how a server updates by gradients as they come, in words."""
    bound = "" if way.kind == "async" else f", no rank more than {way.amount:g} steps ahead"
    rate = ", at a rate divided by their staleness" if way.aware else ""
    return f"update a server's weights one by one as they come{bound}{rate}"


def _averaged(way: SumsWay) -> str:
    """Return what becomes of weights, in words."""
    when = "after every step" if way.every == 1 else f"every {way.every} steps"
    match way.kind:
        case "diloco":
            return (
                f"{when} all take the weights of an outer update by what the average has moved, "
                f"rate {way.amount:g}, momentum {way.momentum:g}"
            )
        case "easgd":
            part = f"{way.amount:g}" if way.amount else f"{_DRAWN:g} / replicas"
            return f"{when} weights and a centre draw each other by {part} of their distance"
        case "gossip":
            return f"{when} two replicas average their weights, each time other two"
        case _:
            return f"{when} all average their weights"
