"""Collectives: each algorithm, message by message, does its work in the seconds that it says."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.collectives import crossovers
from penstock.cluster import Cluster, DeviceKind, Host, Link, best, way_of
from penstock.cluster.collectives import ALGORITHMS, USUAL, Algorithm, Collective
from penstock.errors import ClusterError
from penstock.units import GB, GiB, KiB, MiB, format_bytes, format_seconds
from tests.cluster import messages as by_hand
from tests.cluster.messages import Held, Phases, Places, backwards, carry
from tests.draws import examples

DEVICE = DeviceKind("d", GiB, (), 1e10)
ALL = [(what, algorithm) for what, names in ALGORITHMS.items() for algorithm in names]

latencies = st.floats(0.01, 1.0)
links = st.builds(Link, latencies, st.floats(1.0, 100.0))
sizes = st.integers(1, 200)  # against up to 100 bytes/s and up to 1 s


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda c: sum(c) > 1))
    hosts = tuple(
        Host(f"h{at}", "d", count, draw(st.sampled_from("abc"))) for at, count in enumerate(counts)
    )
    return Cluster((DEVICE,), hosts, draw(links), draw(links), draw(links))


@st.composite
def groups(draw: st.DrawFn) -> tuple[Cluster, list[int]]:
    """Any ranks of any cluster in any order."""
    cluster = draw(clusters())
    ranks = draw(st.permutations(range(cluster.num_ranks)))
    return cluster, ranks[: draw(st.integers(2, min(9, len(ranks))))]


def alike(hosts: int, ranks: int, inside: Link, between: Link) -> Cluster:
    return Cluster(
        (DEVICE,), tuple(Host(f"h{at}", "d", ranks) for at in range(hosts)), inside, between
    )


# The larger host of the second region has to send more than its part across.
UNEVEN = Cluster(
    (DEVICE,),
    tuple(Host(f"h{at}", "d", ranks, "aabb"[at]) for at, ranks in enumerate((1, 1, 1, 3))),
    *(Link(0.5, 3.0), Link(1.0, 2.0), Link(2.0, 1.0)),
)
POD = alike(8, 8, Link(5e-6, 300 * GB), Link(20e-6, 12.5 * GB))


# -- who holds what, and when ---------------------------------------------------------------------


def steps_of(
    what: Collective, algorithm: Algorithm, places: Places, chunks: int
) -> tuple[Phases, Held, Held]:
    """Return the messages, what all hold at first, and what they must hold in the end."""
    n = sum(map(len, places.hosts))
    match what:
        case "all_reduce":
            phases, blocks = sum_of(algorithm, places, chunks)
            return phases, *(
                [dict.fromkeys(blocks, whose) for whose in begin]
                for begin in ([frozenset([i]) for i in range(n)], [frozenset(range(n))] * n)
            )
        case "all_gather" | "reduce_scatter":
            phases, starts = gather_of(algorithm, places)
            blocks = [block for start in starts for block in start]
            if what == "all_gather":
                held = [{block: frozenset([i]) for block in starts[i]} for i in range(n)]
                whole = {block: whose for own in held for block, whose in own.items()}
                return phases, held, [whole] * n
            everyone = [dict.fromkeys(blocks, frozenset([i])) for i in range(n)]
            wanted = [dict.fromkeys(starts[i], frozenset(range(n))) for i in range(n)]
            return backwards(phases), everyone, wanted
        case "broadcast":
            phases, blocks = spread_of(algorithm, places, chunks)
            whole = dict.fromkeys(blocks, frozenset([0]))
            return phases, [whole, *({} for _ in range(1, n))], [whole] * n
        case "all_to_all":
            phases = exchange_of(algorithm, places)
            held = [{(i, j): frozenset([i]) for j in range(n)} for i in range(n)]
            return phases, held, [{(i, j): frozenset([i]) for i in range(n)} for j in range(n)]


def sum_of(algorithm: Algorithm, places: Places, chunks: int) -> tuple[Phases, list[object]]:
    n = sum(map(len, places.hosts))
    match algorithm:
        case "ring":
            gather = by_hand.ring_gather(n)
            return backwards(gather) + gather, list(range(n))
        case "tree":
            return by_hand.two_trees(places, chunks), [
                (half, at) for half in "AB" for at in range(chunks)
            ]
        case "doubling":
            return by_hand.doubling(n), ["all"]
        case "halving":
            scatter = by_hand.halving_scatter(n, whole=True)
            return scatter + backwards(scatter), list(range(2 ** int(math.log2(n))))
        case "direct":
            gather = by_hand.direct_gather(n)
            return backwards(gather) + gather, list(range(n))
        case "hierarchical":
            blocks, gather, _ = by_hand.nested_gather(places, even=True)
            return backwards(gather) + gather, blocks


def gather_of(algorithm: Algorithm, places: Places) -> tuple[Phases, Sequence[set[object]]]:
    n = sum(map(len, places.hosts))
    own: list[set[object]] = [{i} for i in range(n)]
    match algorithm:
        case "ring":
            return by_hand.ring_gather(n), own
        case "halving":
            return backwards(by_hand.halving_scatter(n, whole=False)), own
        case "direct":
            return by_hand.direct_gather(n), own
        case _:
            _, gather, starts = by_hand.nested_gather(places, even=False)
            return gather, starts


def spread_of(algorithm: Algorithm, places: Places, chunks: int) -> tuple[Phases, list[object]]:
    n = sum(map(len, places.hosts))
    match algorithm:
        case "ring":
            return by_hand.chain(n, chunks), list(range(chunks))
        case "doubling":
            return by_hand.binomial(n, lambda a, b: frozenset(["all"])), ["all"]
        case "halving":
            scatter = by_hand.binomial(n, lambda a, b: frozenset(range(a, b)))
            return scatter + backwards(by_hand.halving_scatter(n, whole=False)), list(range(n))
        case _:
            return by_hand.nested_spread(places), ["all"]


def exchange_of(algorithm: Algorithm, places: Places) -> Phases:
    n = sum(map(len, places.hosts))
    match algorithm:
        case "ring":
            return by_hand.pairwise_exchange(n)
        case "doubling":
            return by_hand.bruck_exchange(n)
        case "direct":
            return by_hand.direct_exchange(n)
        case _:
            return by_hand.nested_exchange(places)


def is_cut_in_chunks(what: Collective, algorithm: Algorithm) -> bool:
    return (what, algorithm) in {("all_reduce", "tree"), ("broadcast", "ring")}


def num_blocks(held: Held) -> int:
    return len({block for each in held for block in each})


def run_by_hand(
    what: Collective,
    algorithm: Algorithm,
    group: tuple[Cluster, list[int]],
    size_bytes: float,
    chunks: int = 1,
) -> float:
    """Return the seconds, message by message, after a look at what all hold in the end."""
    places = Places(*group)
    phases, held, wanted = steps_of(what, algorithm, places, chunks)
    if what in ("all_reduce", "broadcast"):
        bytes_each = size_bytes / num_blocks(held)
    else:  # an n-th of the bytes are those of one rank
        bytes_each = size_bytes / num_blocks(wanted if what != "all_to_all" else held)
        bytes_each *= len(held) if what == "all_to_all" else 1
    end = carry(phases, held)
    for has, must in zip(end, wanted, strict=True):
        assert {block: has[block] for block in must} == must
    return by_hand.seconds(*group, phases, bytes_each)


@pytest.mark.parametrize(
    ("what", "algorithm"), [case for case in ALL if not is_cut_in_chunks(*case)]
)
@examples(12)
@example(group=(UNEVEN, list(range(6))), size_bytes=12)
@given(group=groups(), size_bytes=sizes)
def test_algorithm_does_its_work_in_the_seconds_of_its_formula(what, algorithm, group, size_bytes):
    expected = run_by_hand(what, algorithm, group, size_bytes)
    assert way_of(group[0], what, algorithm, group[1]).seconds(size_bytes) == pytest.approx(
        expected, rel=1e-9
    )


@examples(20)
@given(groups(), sizes, st.integers(0, 4))
def test_double_tree_does_its_work_in_no_more_than_its_formula(group, size_bytes, power):
    took = run_by_hand("all_reduce", "tree", group, size_bytes, 2**power)
    way = way_of(group[0], "all_reduce", "tree", group[1])
    assert took <= with_chunks(way, size_bytes, 2**power) * (1 + 1e-9)


@examples(20)
@given(groups(), sizes, st.integers(0, 4))
def test_formula_of_the_double_tree_is_not_twice_its_rounds_where_hosts_are_nearer_inside(
    group, size_bytes, power
):
    cluster, ranks = group
    near = Link(cluster.between.latency_s / 2, cluster.between.bytes_per_s * 2)
    hosts = tuple(replace(host, region="here") for host in cluster.hosts)
    cluster = replace(cluster, hosts=hosts, inside=near)
    took = run_by_hand("all_reduce", "tree", (cluster, ranks), size_bytes, 2**power)
    way = way_of(cluster, "all_reduce", "tree", ranks)
    assert with_chunks(way, size_bytes, 2**power) <= 2 * took


def with_chunks(way, size_bytes: float, chunks: int) -> float:
    """Return the seconds with so many chunks: all phases once, and what is steady for the rest."""
    phase_s = [max(each.seconds(size_bytes / chunks) for each in phase) for phase in way.phases]
    return sum(phase_s) + (chunks - 1) * max(
        each.seconds(size_bytes / chunks) for each in way.steady
    )


@given(st.integers(2, 40))
def test_rank_adds_in_one_of_the_two_trees_and_is_a_leaf_in_the_other(n):
    hosts = (Host("h", "d", n),)
    way = way_of(Cluster((DEVICE,), hosts, Link(1.0, 1.0)), "all_reduce", "tree", range(n))
    (up,), (down,) = way.phases
    assert up.times == down.times == math.ceil(math.log2(n))
    assert up.share == down.share == (1.0 if n > 2 else 0.5)  # never more than one whole chunk
    assert way.steady[0].share <= (2.0 if n > 2 else 1.0)


@given(st.integers(2, 9), sizes, st.integers(0, 4), links)
def test_chain_broadcasts_in_the_seconds_of_its_formula_on_one_host(n, size_bytes, power, link):
    cluster, chunks = Cluster((DEVICE,), (Host("h", "d", n),), link), 2**power
    way = way_of(cluster, "broadcast", "ring", range(n))
    took = run_by_hand("broadcast", "ring", (cluster, list(range(n))), size_bytes, chunks)
    assert with_chunks(way, size_bytes, chunks) == pytest.approx(took, rel=1e-9)


@given(groups(), sizes, st.integers(0, 4))
def test_chain_broadcasts_in_no_more_than_its_formula_anywhere(group, size_bytes, power):
    way = way_of(group[0], "broadcast", "ring", group[1])
    took = run_by_hand("broadcast", "ring", group, size_bytes, 2**power)
    assert took <= with_chunks(way, size_bytes, 2**power) * (1 + 1e-9)


@pytest.mark.parametrize(("what", "algorithm"), [("all_reduce", "tree"), ("broadcast", "ring")])
@given(groups(), sizes)
def test_number_of_chunks_is_the_best_power_of_two(what, algorithm, group, size_bytes):
    way = way_of(group[0], what, algorithm, group[1])
    counts = [2**power for power in range(8) if 2**power <= size_bytes]
    assert way.seconds(size_bytes) == min(with_chunks(way, size_bytes, k) for k in counts)


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "algorithm"), ALL)
@examples(12)
@given(group=groups(), size_bytes=sizes)
def test_no_algorithm_beats_the_doubling_of_who_knows_or_the_bytes_of_a_card(
    what, algorithm, group, size_bytes
):
    cluster, ranks = group
    seconds = way_of(cluster, what, algorithm, ranks).seconds(size_bytes)
    levels = [cluster.inside, cluster.between, cluster.across]
    rounds = 1 if algorithm == "direct" else math.ceil(math.log2(len(ranks)))
    assert seconds >= rounds * min(link.latency_s for link in levels) * (1 - 1e-9)
    hosts, n = [len(host) for host in Places(cluster, ranks).hosts], len(ranks)
    rate = max(link.bytes_per_s for link in levels[1:])
    if len(hosts) == 1:  # each rank has an end of its own
        hosts, rate = [1] * n, cluster.inside.bytes_per_s
    share = {
        "all_reduce": 2 * (len(hosts) - 1) / len(hosts),
        "reduce_scatter": 1 - min(hosts) / n,
        "all_gather": 1 - min(hosts) / n,
        "broadcast": 1.0,
        "all_to_all": max(host * (n - host) for host in hosts) / n,
    }
    assert seconds >= share[what] * size_bytes / rate * (1 - 1e-9)


@given(st.sampled_from(list(ALGORITHMS)), groups(), sizes)
def test_best_is_no_slower_than_each_and_is_one_of_them(what, group, size_bytes):
    found = best(group[0], what, size_bytes, ranks=group[1])
    times = {
        name: way_of(group[0], what, name, group[1]).seconds(size_bytes)
        for name in ALGORITHMS[what]
    }
    assert found.seconds == times[found.algorithm]
    assert found.seconds <= min(times.values()) * (1 + 1e-8)


@pytest.mark.parametrize("what", ["all_reduce", "reduce_scatter", "all_gather"])
@given(st.tuples(st.integers(2, 5), st.integers(2, 5)), links, sizes, st.data())
def test_hierarchical_is_no_slower_than_the_ring_where_the_card_is_the_bottleneck(
    what, counts, between, size_bytes, data
):
    hosts, ranks = counts
    closer, faster = data.draw(st.floats(1, 10)), data.draw(st.floats(1, 9))
    inside = Link(between.latency_s / closer, between.bytes_per_s * hosts * faster)
    cluster = alike(hosts, ranks, inside, between)
    order = data.draw(st.permutations(range(hosts * ranks)))
    hierarchical, ring = (way_of(cluster, what, name, order) for name in ("hierarchical", "ring"))
    assert hierarchical.seconds(size_bytes) <= ring.seconds(size_bytes) * (1 + 1e-9)


@given(st.sampled_from(ALL), groups(), sizes, sizes)
def test_more_bytes_never_take_less(case, group, size_bytes, more):
    way = way_of(group[0], *case, group[1])
    assert way.seconds(size_bytes) <= way.seconds(size_bytes + more) * (1 + 1e-9)


def test_ranks_that_come_to_a_card_in_turn_share_it():
    cluster = alike(2, 2, Link(0.0, 1e9), Link(0.0, 1.0))
    assert cluster.all_reduce_s(4, [0, 1, 2, 3], "ring") == 6 * 1.0
    assert cluster.all_reduce_s(4, [0, 2, 1, 3], "ring") == 6 * 2.0
    assert cluster.all_reduce_s(4, [0, 2, 1, 3], "hierarchical") == pytest.approx(4.0)


def test_messages_between_hosts_and_across_regions_share_the_cards():
    hosts = (Host("a", "d", 2, "x"), Host("b", "d", 1, "x"), Host("c", "d", 1, "y"))
    cluster = Cluster((DEVICE,), hosts, Link(0, 1e9), Link(1.0, 4.0), Link(2.0, 2.0))
    ((between, across),) = way_of(cluster, "broadcast", "doubling", [0, 2, 1, 3]).phases[1:]
    assert between.seconds(8) == 1.0 + 8 / 4.0 + 8 / 2.0
    assert across.seconds(8) == 2.0 + 8 / 4.0 + 8 / 2.0


# -- asking ---------------------------------------------------------------------------------------


@given(links, st.integers(0, 10**9), st.booleans())
def test_sum_of_two_ranks_is_the_ring_to_the_bit_by_every_usual_algorithm(link, size_bytes, apart):
    hosts = (Host("a", "d", 1), Host("b", "d", 1)) if apart else (Host("a", "d", 2),)
    cluster = Cluster((DEVICE,), hosts, link, link)
    ring_s = 2 * (link.latency_s + size_bytes / 2 / link.bytes_per_s)
    assert cluster.all_reduce_s(size_bytes, [0, 1]) == ring_s
    for name in USUAL["all_reduce"]:
        assert cluster.all_reduce_s(size_bytes, [0, 1], name) == ring_s


@pytest.mark.parametrize("what", ALGORITHMS)
def test_one_rank_has_nothing_to_send(what):
    assert POD.collective_s(what, MiB, [3]) == 0.0
    assert all(way_of(POD, what, name, [3]).seconds(MiB) == 0.0 for name in ALGORITHMS[what])


def test_unless_told_cluster_takes_the_fastest_of_what_libraries_choose_from():
    for what, names in USUAL.items():
        for size_bytes in (1, MiB, GiB):
            times = [POD.collective_s(what, size_bytes, range(64), algorithm=a) for a in names]
            assert POD.collective_s(what, size_bytes, range(64)) == min(times)
    assert POD.all_reduce_s(KiB, range(64)) < POD.all_reduce_s(KiB, range(64), "ring")
    assert POD.all_reduce_s(GiB, range(64)) == POD.all_reduce_s(GiB, range(64), "ring")


@examples(12)
@given(st.sampled_from(list(ALGORITHMS)), groups())
def test_crossovers_are_where_the_fastest_changes(what, group):
    among = ALGORITHMS[what]
    found = crossovers(*(group[0], what, group[1]), among=among, limit_bytes=4096)
    assert found[0] == (1, best(group[0], what, 1, ranks=group[1]).algorithm)
    for (_, before), (size_bytes, name) in pairwise(found):
        assert before != name
        assert best(group[0], what, size_bytes - 1, ranks=group[1]).algorithm == before
        assert best(group[0], what, size_bytes, ranks=group[1]).algorithm == name
    assert found[-1][1] == best(group[0], what, 4096, ranks=group[1]).algorithm


def test_crossover_of_ring_and_doubling_is_that_of_alpha_and_beta():
    n, link = 8, Link(10e-6, 10 * GB)
    cluster = Cluster((DEVICE,), (Host("h", "d", n),), link)
    found = crossovers(cluster, "all_reduce", range(n), among=("ring", "doubling"))
    # 2 (n - 1) a + 2 (n - 1) / n s / b = log2 n (a + s / b)
    size_bytes = (14 - 3) * link.latency_s * link.bytes_per_s / (3 - 14 / 8)
    assert [name for _, name in found] == ["doubling", "ring"]
    assert found[1][0] == pytest.approx(size_bytes, abs=1)


def test_algorithm_that_a_collective_has_not_is_refused_with_those_it_has():
    with pytest.raises(ValueError, match="all_gather has no algorithm 'tree'; it has ring, halv"):
        POD.collective_s("all_gather", 1, range(4), algorithm="tree")


def test_rank_that_stands_twice_or_is_not_there_is_refused():
    with pytest.raises(ClusterError, match=r"rank 2 stands 2 times in \(0, 2, 1, 2\)"):
        POD.all_reduce_s(1, [0, 2, 1, 2])
    with pytest.raises(ClusterError, match="rank 1 has no link to itself"):
        POD.all_reduce_s(1, [1, 1])
    with pytest.raises(ClusterError, match="rank 64 is not in a cluster of 64 ranks"):
        POD.all_reduce_s(1, [0, 2, 64])


@pytest.mark.parametrize(("what", "algorithm"), ALL)
def test_level_without_a_link_is_refused_only_where_a_message_goes(what, algorithm):
    alone = replace(POD, between=None)
    assert way_of(alone, what, algorithm, range(8)).seconds(1) > 0
    apart = replace(POD, inside=None)
    assert way_of(apart, what, algorithm, range(0, 64, 8)).seconds(1) > 0
    for cluster, level in ((alone, "between"), (apart, "inside")):
        with pytest.raises(ClusterError, match=f"the cluster has none {level}"):
            way_of(cluster, what, algorithm, range(4, 12))


def test_link_that_takes_no_time_for_bytes_is_no_trouble():
    hosts = (Host("a", "d", 1, "x"), Host("b", "d", 1, "x"), Host("c", "d", 1, "y"))
    cluster = Cluster((DEVICE,), hosts, None, Link(1.0, math.inf), Link(2.0, math.inf))
    for what, algorithm in ALL:
        assert 1.0 <= way_of(cluster, what, algorithm, range(3)).seconds(10**9) <= 20.0


def test_way_prints_its_phases():
    assert str(way_of(POD, "all_reduce", "hierarchical", range(16))).splitlines() == [
        "7 x (5.00 us + 0.125 of the bytes at 300 GB/s)",
        "1 x (20.0 us + 0.5 of the bytes at 12.5 GB/s)",
        "1 x (20.0 us + 0.5 of the bytes at 12.5 GB/s)",
        "7 x (5.00 us + 0.125 of the bytes at 300 GB/s)",
    ]
    lines = str(way_of(POD, "broadcast", "ring", range(4))).splitlines()
    assert lines[1] == "each further chunk: 1 x (5.00 us + 1 of the bytes at 300 GB/s)"


# -- what the page says ---------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
BY_TURNS = [8 * host + rank for rank in range(8) for host in range(8)]


def table_below(heading: str) -> dict[str, list[str]]:
    """Return the cells of the table with this heading, by the name of the row."""
    lines = PAGE.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    return {name.replace("`", ""): cells for name, *cells in rows}


def test_seconds_in_the_page_are_what_the_formulas_say():
    rows = table_below("| all_reduce, 64 ranks |")
    assert set(rows) == {*ALGORITHMS["all_reduce"], "ring, hosts alternating"}
    for name, cells in rows.items():
        ranks = BY_TURNS if "alternating" in name else range(64)
        way = way_of(POD, "all_reduce", name.partition(",")[0], ranks)
        times = [way.seconds(size) for size in (KiB, 64 * KiB, MiB, 16 * MiB, 256 * MiB)]
        assert cells == [format_seconds(seconds) for seconds in times]


def test_crossovers_in_the_page_are_what_the_formulas_say():
    for name, cells in table_below("| the fastest, without `direct` |").items():
        for what in (what for what in ALGORITHMS if what in name):
            among = [each for each in ALGORITHMS[what] if each != "direct"]
            among = USUAL[what] if "of ring and tree" in name else among
            groups = [range(0, 64, 8)] if "one rank" in name else [range(64), BY_TURNS]
            for ranks, cell in zip(groups, cells, strict=False):
                found = crossovers(POD, what, ranks, among=among)
                texts = [f"{each} from {format_bytes(size)}" for size, each in found]
                assert cell == "; ".join([found[0][1], *texts[1:]])


@given(st.integers(1, 5), links, sizes)
def test_formulas_in_the_page_hold_for_ranks_of_one_host(power, link, size_bytes):
    n, a, c = 2**power, link.latency_s, power
    s = size_bytes / link.bytes_per_s
    cluster = Cluster((DEVICE,), (Host("h", "d", n),), link)
    spread = 2 * c * a + 2 * (n - 1) / n * s
    expected = {
        ("all_reduce", "ring"): 2 * (n - 1) * (a + s / n),
        ("all_reduce", "doubling"): c * (a + s),
        ("all_reduce", "halving"): spread,
        ("all_reduce", "direct"): 2 * (a + (n - 1) / n * s),
        ("reduce_scatter", "ring"): (n - 1) * (a + s / n),
        ("reduce_scatter", "halving"): spread / 2,
        ("reduce_scatter", "direct"): a + (n - 1) / n * s,
        ("all_gather", "halving"): spread / 2,
        ("broadcast", "doubling"): c * (a + s),
        ("broadcast", "halving"): spread,
        ("all_to_all", "ring"): (n - 1) * (a + s / n),
        ("all_to_all", "doubling"): c * (a + s / 2),
        ("all_to_all", "direct"): a + (n - 1) / n * s,
    }
    for (what, name), seconds in expected.items():
        way = way_of(cluster, what, name, range(n))
        assert way.seconds(size_bytes) == pytest.approx(seconds, rel=1e-9)
    counts = [2**k for k in range(8) if 2**k <= size_bytes]
    chain = min((n - 2 + k) * (a + s / k) for k in counts)
    assert cluster.collective_s("broadcast", size_bytes, range(n), algorithm="ring") == (
        pytest.approx(chain, rel=1e-9)
    )
    if n > 2:
        tree = min(2 * c * (a + s / k) + (k - 1) * (a + 2 * s / k) for k in counts)
        assert cluster.all_reduce_s(size_bytes, range(n), "tree") == pytest.approx(tree, rel=1e-9)
