"""Collectives message by message: who holds what, and when; a brute force to compare with.

A round is a list of messages (from, to, blocks) by position among the ranks; a way is phases, one
after the other, of groups side by side, of rounds.  All blocks are of one size.  Nothing here is
shared with penstock.cluster but the links and the numbers of the cards.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from penstock.cluster import Cluster

Block = Hashable
Message = tuple[int, int, frozenset[Block]]
Round = list[Message]
Phases = list[list[list[Round]]]
Held = list[dict[Block, frozenset[int]]]  # by rank and block: whose contributions are in it


# -- clock and hands ------------------------------------------------------------------------------


def round_s(cluster: Cluster, ranks: Sequence[int], messages: Round, block_bytes: float) -> float:
    """Return when the last message is there: each waits for its latency and its busier end."""
    busy = defaultdict[object, float](float)
    for a, b, blocks in messages:
        for end in _ends(cluster, ranks[a], ranks[b]):
            rate = cluster.link(ranks[a], ranks[b]).bytes_per_s
            busy[end] += len(blocks) * block_bytes / rate
    times = (
        cluster.link(ranks[a], ranks[b]).latency_s
        + max(busy[end] for end in _ends(cluster, ranks[a], ranks[b]))
        for a, b, _ in messages
    )
    return max(times, default=0.0)


def _ends(cluster: Cluster, a: int, b: int) -> tuple[object, ...]:
    return cluster.lanes(a, b) or (("from", a), ("to", b))


def seconds(cluster: Cluster, ranks: Sequence[int], phases: Phases, block_bytes: float) -> float:
    return sum(
        max(sum(round_s(cluster, ranks, each, block_bytes) for each in rounds) for rounds in groups)
        for groups in phases
    )


def carry(phases: Phases, held: Held) -> Held:
    """Return what all hold in the end.

    What comes is added to what is there, or takes its place if it contains that: nothing twice.
    """
    held = [dict(each) for each in held]
    for messages in (each for groups in phases for rounds in groups for each in rounds):
        before = [dict(each) for each in held]
        for a, b, blocks in messages:
            for block in blocks:
                came, there = before[a][block], held[b].get(block, frozenset())
                assert there <= came or not there & came, "added twice"
                held[b][block] = came | there
    return held


def backwards(phases: Phases) -> Phases:
    return [
        [[[(b, a, blocks) for a, b, blocks in each] for each in rounds[::-1]] for rounds in groups]
        for groups in phases[::-1]
    ]


def one_by_one(rounds: Iterable[Round]) -> Phases:
    return [[[each]] for each in rounds]


# -- flat -----------------------------------------------------------------------------------------


def ring_gather(n: int) -> Phases:
    """Block i is of rank i; what came last is passed on."""
    return one_by_one(
        [(i, (i + 1) % n, frozenset([(i - t) % n])) for i in range(n)] for t in range(n - 1)
    )


def direct_gather(n: int) -> Phases:
    return [[[[(i, j, frozenset([i])) for i in range(n) for j in range(n) if i != j]]]]


def _core(n: int) -> tuple[list[int], list[int]]:
    """Return ranks, as many as a power of two, and those left out, each right after its partner."""
    power = 2 ** int(math.log2(n))
    left_out = [2 * k + 1 for k in range(n - power)]
    return [rank for rank in range(n) if rank not in left_out], left_out


def halving_scatter(n: int, *, whole: bool) -> Phases:
    """A reduce-scatter; `whole`: over as many blocks as the core has ranks, one for each of it."""
    core, left_out = _core(n)
    every = frozenset(range(len(core) if whole else n))
    owned = [frozenset([k]) for k in range(len(core))]
    if not whole:
        owned = [frozenset({rank} | ({rank + 1} & set(left_out))) for rank in core]
    rounds: list[Round] = [[(rank, rank - 1, every) for rank in left_out]] if left_out else []
    wanted = [every for _ in core]  # what a rank still adds up
    for d in (2**k for k in range(int(math.log2(len(core))))):
        keeps = [
            frozenset().union(*(owned[k] for k in range(len(core)) if k % (2 * d) == j % (2 * d)))
            for j in range(len(core))
        ]
        rounds.append([(core[j], core[j ^ d], wanted[j] - keeps[j]) for j in range(len(core))])
        wanted = keeps
    if left_out and not whole:
        rounds.append([(rank - 1, rank, frozenset([rank])) for rank in left_out])
    return one_by_one(rounds)


def doubling(n: int) -> Phases:
    core, left_out = _core(n)
    one = frozenset(["all"])
    rounds: list[Round] = [[(rank, rank - 1, one) for rank in left_out]] if left_out else []
    for d in (2**k for k in range(int(math.log2(len(core))))):
        rounds.append([(core[j], core[j ^ d], one) for j in range(len(core))])
    rounds += [[(rank - 1, rank, one) for rank in left_out]] if left_out else []
    return one_by_one(rounds)


def chain(n: int, chunks: int) -> Phases:
    rounds = range(n - 2 + chunks)
    return one_by_one(
        [(i, i + 1, frozenset([t - i])) for i in range(n - 1) if 0 <= t - i < chunks]
        for t in rounds
    )


def binomial(n: int, blocks_of: Callable[[int, int], frozenset[Block]]) -> Phases:
    """The first half's first rank sends to the second half's, and so on in both."""
    rounds: list[Round] = []
    parts = [(0, 2 ** math.ceil(math.log2(n)))]
    while parts[0][1] > 1:
        size = parts[0][1] // 2
        sends = [(at, at + size) for at, _ in parts if at + size < n]
        rounds.append([(a, b, blocks_of(b, min(b + size, n))) for a, b in sends])
        parts = [(at, size) for start, _ in parts for at in (start, start + size) if at < n]
    return one_by_one(rounds)


def pairwise_exchange(n: int) -> Phases:
    return one_by_one(
        [(i, (i + by) % n, frozenset([(i, (i + by) % n)])) for i in range(n)] for by in range(1, n)
    )


def bruck_exchange(n: int) -> Phases:
    """A block goes on by 1, 2, 4, ..., as the way that it has to go is written in binary."""
    at = {(s, d): s for s in range(n) for d in range(n)}
    rounds: list[Round] = []
    for step in (2**k for k in range(math.ceil(math.log2(n)))):
        moved = [pair for pair in at if (pair[1] - pair[0]) % n & step]
        rounds.append([(at[pair], (at[pair] + step) % n, frozenset([pair])) for pair in moved])
        at |= {pair: (at[pair] + step) % n for pair in moved}
    return one_by_one(rounds)


def direct_exchange(n: int) -> Phases:
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    return [[[[(*pair, frozenset([pair])) for pair in pairs]]]]


# -- by host and region ---------------------------------------------------------------------------


class Places:
    """Regions of hosts of positions, all as they first appear."""

    def __init__(self, cluster: Cluster, ranks: Sequence[int]) -> None:
        found: dict[str, dict[str, list[int]]] = {}
        for position, rank in enumerate(ranks):
            host = cluster.host_of(rank)
            found.setdefault(host.region, {}).setdefault(host.name, []).append(position)
        self.regions = [list(hosts.values()) for hosts in found.values()]
        self.hosts = [host for region in self.regions for host in region]
        self.slots = math.lcm(*map(len, self.regions)), math.lcm(*map(len, self.hosts))


def nested_gather(places: Places, *, even: bool) -> tuple[list[Block], Phases, list[set[Block]]]:
    """Return all blocks, the rings of an all-gather, and what each position begins with.

    A block is (region, host in it or None, position or None, y, z): of a rank, or, if even, of a
    region alone.  The host of a region that is no other's has slot y, the rank of a host slot z.
    """
    ys, zs = map(range, places.slots)
    owners: list[tuple[int, int | None, int | None]] = [
        (r, h, i)
        for r, region in enumerate(places.regions)
        for h, host in enumerate(region)
        for i in range(len(host))
    ]
    if even:
        owners = [(r, None, None) for r in range(len(places.regions))]
    blocks = [(*owner, y, z) for owner in owners for y in ys for z in zs]

    def host_in(region: int, block) -> int:
        own = block[0] == region and block[1] is not None
        return block[1] if own else block[3] % len(places.regions[region])

    def rank_in(region: int, host: int, block) -> int:
        members = places.regions[region][host]
        own = block[:2] == (region, host) and block[2] is not None
        return members[block[2] if own else block[4] % len(members)]

    def at(region: int, block) -> int:
        return rank_in(region, host_in(region, block), block)

    num = len(places.regions)
    across = [
        _messages(
            (at(r, block), at((r + 1) % num, block), block)
            for r in range(num)
            for block in blocks
            if block[0] == (r - t) % num
        )
        for t in range(num - 1)
    ]
    between, inside = [], []
    for r, region in enumerate(places.regions):
        rounds = [
            _messages(
                (rank_in(r, h, block), rank_in(r, (h + 1) % len(region), block), block)
                for h in range(len(region))
                for block in blocks
                if host_in(r, block) == (h - t) % len(region)
            )
            for t in range(len(region) - 1)
        ]
        between.append(rounds)
        for h, host in enumerate(region):
            g = len(host)
            rounds = [
                _messages(
                    (host[i], host[(i + 1) % g], block)
                    for i in range(g)
                    for block in blocks
                    if rank_in(r, h, block) == host[(i - t) % g]
                )
                for t in range(g - 1)
            ]
            inside.append(rounds)
    starts: list[set[Block]] = [set() for host in places.hosts for _ in host]
    for block in blocks:
        starts[at(block[0], block)].add(block)
    return blocks, [[across], between, inside], starts


def _messages(sent: Iterable[tuple[int, int, Block]]) -> Round:
    parts = defaultdict[tuple[int, int], set[Block]](set)
    for a, b, block in sent:
        parts[a, b].add(block)
    return [(a, b, frozenset(blocks)) for (a, b), blocks in parts.items()]


def nested_spread(places: Places) -> Phases:
    def levels(members: Sequence[int]) -> list[Round]:
        rounds = [each for [[each]] in binomial(len(members), lambda a, b: frozenset(["all"]))]
        return [[(members[a], members[b], blocks) for a, b, blocks in each] for each in rounds]

    regions = [levels([region[0][0] for region in places.regions])]
    hosts = [levels([host[0] for host in region]) for region in places.regions]
    return [regions, hosts, [levels(host) for host in places.hosts]]


def nested_exchange(places: Places) -> Phases:
    """Inside a host, to the rank that is to send it; then from host to host."""
    place = {rank: (h, i) for h, host in enumerate(places.hosts) for i, rank in enumerate(host)}
    n, num = len(place), len(places.hosts)
    at: dict[tuple[int, int], int] = {}
    inside = []
    for h, host in enumerate(places.hosts):
        g = len(host)
        for s in host:
            for d in range(n):
                at[s, d] = d if place[d][0] == h else host[place[d][1] % g]
        inside.append(
            [
                _messages(
                    (host[i], host[(i + by) % g], (host[i], d))
                    for i in range(g)
                    for d in range(n)
                    if at[host[i], d] == host[(i + by) % g]
                )
                for by in range(1, g)
            ]
        )
    rounds = [
        _messages(
            (at[s, d], d, (s, d))
            for s in range(n)
            for d in range(n)
            if place[d][0] == (place[s][0] + by) % num
        )
        for by in range(1, num)
    ]
    return [inside, [rounds]]


# -- two trees ------------------------------------------------------------------------------------


def tree(n: int) -> list[tuple[int, int, int]]:
    """Return (child, parent, depth of the child); odd places are leaves."""
    found: list[tuple[int, int, int]] = []

    def hang(child: int, parent: int, width: int, depth: int) -> None:
        found.append((child, parent, depth))
        if width > 1:
            hang(child - width // 2, child, width // 2, depth + 1)
        while width > 1 and child + width // 2 >= n:
            width //= 2
        if width > 1:
            hang(child + width // 2, child, width // 2, depth + 1)

    if n > 1:
        top = 2 ** (math.ceil(math.log2(n)) - 1)
        hang(top, 0, top, 1)
    return found


def two_trees(places: Places, chunks: int) -> Phases:
    """Halves A and B of each chunk go up and down trees of their own, stage by stage."""
    stages: list[list[tuple[int, int, str]]] = []  # of the way up: from, to, half
    level = [[[(rank, rank) for rank in host] for host in region] for region in places.regions]
    hosts = [[_leader(host) for host in region] for region in level]
    groups = (
        [host for region in level for host in region],
        hosts,
        [[_leader(region) for region in hosts]],
    )
    for members in groups:
        depth = max(math.ceil(math.log2(len(them))) for them in members)
        own: list[list[tuple[int, int, str]]] = [[] for _ in range(depth)]
        for them in members:
            n = len(them)
            second = [them[n - 1 - p] if n % 2 == 0 else them[(p + 1) % n] for p in range(n)]
            for child, parent, deep in tree(n):
                own[depth - deep].append((them[child][0], them[parent][0], "A"))
                own[depth - deep].append((second[child][1], second[parent][1], "B"))
        stages += own
    down = [[(b, a, half) for a, b, half in stage] for stage in reversed(stages)]
    ways = [(stage, "up") for stage in stages] + [(stage, "down") for stage in down]
    return one_by_one(
        [
            (a, b, frozenset([(half, t - s)]))
            for s, (stage, _) in enumerate(ways)
            if 0 <= t - s < chunks
            for a, b, half in stage
        ]
        for t in range(len(ways) + chunks - 1)
    )


def _leader(them: Sequence[tuple[int, int]]) -> tuple[int, int]:
    n = len(them)
    return them[0][0], them[n - 1 if n % 2 == 0 else 1 % n][1]
