"""Routes: every number is summed once, on all ranks, in the rounds and bytes that are said."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.routes import KINDS, Topology, own_rounds, routes_of, topology_of

WORDS = st.sampled_from([kind for kind in KINDS if kind != "hierarchical"]) | st.builds(
    "{}:{}".format, st.sampled_from(["server", "hierarchical"]), st.integers(1, 12)
)
RANKS = st.integers(1, 17)


@given(WORDS, RANKS)
def test_each_rank_has_every_summand_once(word, ranks):
    """Blocks are sets of whose numbers they sum; whoever adds one twice is found."""
    routes = routes_of(word, ranks)
    held = [[{place} for _ in range(routes.blocks)] for place in range(ranks)]
    for adds, hops in routes.rounds:
        before = [[set(block) for block in row] for row in held]
        for source, target, first, end in hops:
            assert source != target
            assert first < end
            for block in range(first, end):
                came = before[source][block]
                assert not adds or not held[target][block] & came, "it is added twice"
                held[target][block] = held[target][block] | came if adds else set(came)
    assert all(block == set(range(ranks)) for row in held for block in row)


@given(WORDS, RANKS, st.integers(0, 3000))
def test_as_many_numbers_are_sent_as_the_formula_says(word, ranks, count):
    routes, kind = routes_of(word, ranks), topology_of(word).kind
    sent = sum(routes.sent(place, count) for place in range(ranks))
    core = 1 << (ranks.bit_length() - 1)
    if kind == "doubling":
        assert sent == count * (core * (core.bit_length() - 1) + 2 * (ranks - core))
    else:
        assert sent == 2 * (ranks - 1) * count


@given(WORDS, st.integers(2, 17))
def test_there_are_as_many_rounds_as_the_formula_says(word, ranks):
    kind, count = topology_of(word)
    deep, core = (ranks - 1).bit_length(), ranks.bit_length() - 1
    fold = 2 * (ranks != 1 << core)
    rounds = {
        **{"ring": 2 * (ranks - 1), "tree": 2 * deep},
        **{"halving": 2 * core + fold, "doubling": core + fold, "direct": 2, "server": 2},
        "hierarchical": 2 * (count > 1) + 2 * (count < ranks),
    }[kind]
    assert len(routes_of(word, ranks).rounds) == rounds


@given(st.integers(1, 8), st.integers(2, 17))
def test_a_server_sends_its_sum_to_all_and_the_rest_to_other_servers(servers, ranks):
    servers = min(servers, ranks)
    routes, count = routes_of(f"server:{servers}", ranks), 60 * servers
    busiest = max(routes.sent(place, count) for place in range(ranks))
    assert busiest == (ranks - 1 + servers - 1) * count // servers


@pytest.mark.parametrize("word", ["ring", "direct", "halving", "hierarchical:4"])
def test_no_rank_sends_more_than_others_where_all_are_alike(word):
    routes = routes_of(word, 8)
    assert {routes.sent(place, 800) for place in range(8)} == {2 * 7 * 100}


def test_between_groups_goes_only_what_one_of_each_group_has_to_know():
    """8 ranks in groups of 4: 2 (H - 1) / H of the numbers leave a group, whatever its size."""
    routes = routes_of("hierarchical:4", 8)
    left = [
        routes.place(hop.end, 800) - routes.place(hop.first, 800)
        for _, hops in routes.rounds
        for hop in hops
        if hop.source < 4 <= hop.target
    ]
    assert sum(left) == 800
    assert max(left) == math.ceil(800 / 8)


@given(WORDS, RANKS)
def test_what_each_does_is_what_all_do(word, ranks):
    rows = [own_rounds(word, ranks, place) for place in range(ranks)]
    for at, (adds, hops) in enumerate(routes_of(word, ranks).rounds):
        assert all(row[at].adds == adds for row in rows)
        given_ = [hop for row in rows for _, own in row[at].given for hop in own]
        taken = [hop for row in rows for _, own in row[at].taken for hop in own]
        assert sorted(given_) == sorted(taken) == sorted(hops)


def test_words_are_read():
    assert topology_of("server") == Topology("server", 1)
    assert topology_of("hierarchical:4") == Topology("hierarchical", 4)
    for word in ("star", "", "ring:2", "hierarchical", "server:", "server:0", "server:-1"):
        with pytest.raises(ValueError, match=r'"server:2"|a whole number of ranks'):
            topology_of(word)
