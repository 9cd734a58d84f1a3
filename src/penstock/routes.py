"""Routes: over which ranks the numbers of a sum go, round by round, as one table for each topology.

    ring            each rank adds to a part what its neighbour has handed it, and hands it on
    tree            two trees, each of half of the numbers; who adds in one is mostly a leaf in
                    the other
    halving         pairs exchange and add halves, then quarters, and so on
    doubling        pairs exchange and add everything, each time other pairs
    direct          each rank adds up one part of what all have
    server:K        likewise, but only K of the ranks do; "server" is one
    hierarchical:G  each of G neighbours adds up one part of what they have, then those that have
                    the same part add up theirs in the same way

In a round each hop carries blocks from one rank to another, which adds them to its own.  Once each
block is summed somewhere, the hops go back, the last round first, and the sums take the place of
what was there.  Doubling alone does not go back: both of a pair have added the same.

The runtime sends along these rounds, the clock times them, and bytes are counted of them.

Source:  ring: "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009;
         halving, doubling: "Optimization of collective communication operations in MPICH", 2005;
         two trees: "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009;
         direct: Theano-MPI, arXiv:1605.08325, section 3.2 (alltoall-sum-allgather); servers:
         "Scaling distributed machine learning with the parameter server", OSDI 2014.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

TopologyKind: TypeAlias = Literal[
    "ring", "tree", "halving", "doubling", "direct", "server", "hierarchical"
]
FASTEST = "fastest"  # the word of who leaves it to the search
KINDS: tuple[TopologyKind, ...] = get_args(TopologyKind)
PIECE_BYTES = 2**22  # that go along all rounds at once: it bounds what a rank holds besides
_BY_WORD: dict[str, TopologyKind] = {kind: kind for kind in KINDS}
_SIZED = "server", "hierarchical"
_WORDS = '"ring", "tree", "halving", "doubling", "direct", "server:2" or "hierarchical:2"'


class Topology(NamedTuple):
    """A topology: its kind, and of "server" and "hierarchical" how many ranks those are."""

    kind: TopologyKind
    size: int = 1


class BlockHop(NamedTuple):
    """What one rank sends another in a round: blocks [first, end); ranks by their place."""

    source: int
    target: int
    first: int
    end: int


class HopRound(NamedTuple):
    """Hops that are made at once.

    adds:    whether blocks are added where they come, by the order of their sources; else they
             replace what is there.
    """

    adds: bool
    hops: tuple[BlockHop, ...]


class OwnRound(NamedTuple):
    """What one rank does in a round: whom it gives which hops, and from whom it takes which.

    taken:   by place of the source, in that order.
    """

    adds: bool
    given: tuple[tuple[int, tuple[BlockHop, ...]], ...]
    taken: tuple[tuple[int, tuple[BlockHop, ...]], ...]


class SumRoutes(NamedTuple):
    """The rounds of a sum of numbers that are cut into so many blocks."""

    blocks: int
    rounds: tuple[HopRound, ...]

    def place(self, block: int, count: int) -> int:
        """Return where a block begins among so many numbers."""
        return count * block // self.blocks

    def sent(self, place: int, count: int) -> int:
        """Return how many numbers the rank at a place sends in a sum of so many."""
        own = (hop for each in self.rounds for hop in each.hops if hop.source == place)
        return sum(self.place(hop.end, count) - self.place(hop.first, count) for hop in own)


def topology_of(text: str) -> Topology:
    """Return the topology that a text names.

    Raises:   ValueError: it names none; with what there is.
    """
    word, colon, count = text.partition(":")
    kind = _BY_WORD.get(word)
    if kind is None or (colon and kind not in _SIZED):
        raise ValueError(f"{_WORDS}; {text!r} is none")
    if not colon and kind != "hierarchical":
        return Topology(kind)
    if not count.isdecimal() or not 1 <= int(count) <= 2**20:
        raise ValueError(f'a whole number of ranks, as "{kind}:2"; {text!r} is not')
    return Topology(kind, int(count))


@lru_cache(maxsize=256)
def routes_of(text: str, ranks: int) -> SumRoutes:
    """Return the rounds of a sum over so many ranks; of one rank there are none.

    "server" and "hierarchical" take at most as many ranks as there are.
    Raises:   ValueError: the text names no topology.
    """
    kind, count = topology_of(text)
    if ranks < 2:
        return SumRoutes(1, ())
    match kind:
        case "ring":
            return _there_and_back(ranks, _ring(ranks))
        case "tree":
            return _there_and_back(2, _two_trees(ranks))
        case "halving":
            return _there_and_back(_core(ranks), [*_folded(ranks), *_halves(ranks)])
        case "doubling":
            return _doubling(ranks)
        case "direct":
            return _there_and_back(ranks, _to_servers(ranks, ranks))
        case "server":
            return _there_and_back(min(count, ranks), _to_servers(ranks, min(count, ranks)))
        case "hierarchical":
            return _hierarchical(ranks, min(count, ranks))


@lru_cache(maxsize=1024)
def own_rounds(text: str, ranks: int, place: int) -> tuple[OwnRound, ...]:
    """Return what the rank at a place does in each round of `routes_of(text, ranks)`."""
    found: list[OwnRound] = []
    for adds, hops in routes_of(text, ranks).rounds:
        given, taken = dict[int, list[BlockHop]](), dict[int, list[BlockHop]]()
        for hop in sorted(hops):
            if hop.source == place:
                given.setdefault(hop.target, []).append(hop)
            elif hop.target == place:
                taken.setdefault(hop.source, []).append(hop)
        rows = (tuple((at, tuple(own)) for at, own in sides.items()) for sides in (given, taken))
        found.append(OwnRound(adds, *rows))
    return tuple(found)


_Hops: TypeAlias = list[BlockHop]


def _there_and_back(blocks: int, there: list[_Hops]) -> SumRoutes:
    adding = [HopRound(True, tuple(hops)) for hops in there if hops]
    back = [HopRound(False, tuple(map(_back, each.hops))) for each in reversed(adding)]
    return SumRoutes(blocks, (*adding, *back))


def _back(hop: BlockHop) -> BlockHop:
    return BlockHop(hop.target, hop.source, hop.first, hop.end)


def _ring(n: int) -> list[_Hops]:
    """Return the rounds after which the rank at place p has the sum of block p + 1."""
    return [
        [BlockHop(p, (p + 1) % n, (p - turn) % n, (p - turn) % n + 1) for p in range(n)]
        for turn in range(n - 1)
    ]


def _two_trees(n: int) -> list[_Hops]:
    """Return the rounds after which the first rank has the sum of block 0, the last of block 1."""
    rounds: list[_Hops] = []
    for step in (2**power for power in range((n - 1).bit_length())):
        children = range(step, n, 2 * step)
        first = [BlockHop(p, p - step, 0, 1) for p in children]
        rounds.append([*first, *(BlockHop(n - 1 - p, n - 1 - p + step, 1, 2) for p in children)])
    return rounds


def _core(n: int) -> int:
    """Return the largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def _core_places(n: int) -> list[int]:
    """Return the places of a core: every other one of the first 2 (n - core), and the rest."""
    extra = n - _core(n)
    return [*range(0, 2 * extra, 2), *range(2 * extra, n)]


def _folded(n: int, blocks: int = 0) -> list[_Hops]:
    """Return the round in which those who are not of the core hand all to a neighbour who is."""
    extra = n - _core(n)
    return [[BlockHop(2 * at + 1, 2 * at, 0, blocks or _core(n)) for at in range(extra)]]


def _halves(n: int) -> list[_Hops]:
    """Return the rounds in which the core exchanges halves of what each still adds up.

    Neighbours come first, as most is sent then.
    """
    core, places, rounds = _core(n), _core_places(n), list[_Hops]()
    mine = [(0, core)] * core
    for step in (2**power for power in range((core - 1).bit_length())):
        hops: _Hops = []
        for at, (first, end) in enumerate(mine):
            middle = (first + end) // 2
            halves = (first, middle), (middle, end)
            is_upper = bool(at & step)
            hops.append(BlockHop(places[at], places[at ^ step], *halves[not is_upper]))
            mine[at] = halves[is_upper]
        rounds.append(hops)
    return rounds


def _doubling(n: int) -> SumRoutes:
    core, places = _core(n), _core_places(n)
    fold = [HopRound(True, tuple(hops)) for hops in _folded(n, 1) if hops]
    steps = [2**power for power in range((core - 1).bit_length())]
    pairs = [
        [BlockHop(places[at], places[at ^ step], 0, 1) for at in range(core)] for step in steps
    ]
    middle = [HopRound(True, tuple(hops)) for hops in pairs]
    back = [HopRound(False, tuple(map(_back, each.hops))) for each in fold]
    return SumRoutes(1, (*fold, *middle, *back))


def server_places(text: str, ranks: int) -> tuple[int, ...]:
    """Return on which of so many ranks the servers of "server:K" are, spread evenly."""
    servers = topology_of(text).size
    return tuple(at * ranks // servers for at in range(servers))


def _to_servers(n: int, servers: int) -> list[_Hops]:
    """Return the round in which each of the servers gets its block."""
    places = server_places(f"server:{servers}", n)
    pairs = ((p, at, server) for p in range(n) for at, server in enumerate(places))
    return [[BlockHop(p, server, at, at + 1) for p, at, server in pairs if p != server]]


def _hierarchical(n: int, size: int) -> SumRoutes:
    """Return the rounds of groups of `size` neighbours, the last of which may have fewer.

    The numbers are cut into units, of which each of a group has equally many, and each unit into a
    block for every group, which adds that block up.
    """
    groups = [range(first, min(first + size, n)) for first in range(0, n, size)]
    units, count = math.lcm(*map(len, groups)), len(groups)
    inside = [
        BlockHop(
            one, other, at * units // len(group) * count, (at + 1) * units // len(group) * count
        )
        for group in groups
        for at, other in enumerate(group)
        for one in group
        if one != other
    ]
    return _there_and_back(units * count, [inside, list(_between(groups, units))])


def _between(groups: list[range], units: int) -> Iterator[BlockHop]:
    """Yield the hops of each unit from who has it in a group to who has it in another one."""
    for at, target in enumerate(groups):
        for source in groups:
            for unit in range(units) if source != target else ():
                block = unit * len(groups) + at
                giver, adder = (each[unit * len(each) // units] for each in (source, target))
                yield BlockHop(giver, adder, block, block + 1)
