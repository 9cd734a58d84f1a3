"""bench.hostile: each attack is one, and a newcomer with the token gets in meanwhile."""

import pytest

from bench.hostile import ATTACKS, Attacker
from penstock.members.words import Ask, Welcome
from tests.members.test_mesh import meshes


@pytest.mark.parametrize("name", ATTACKS)
def test_a_newcomer_gets_in_during_an_attack_which_leaves_nothing(name: str) -> None:
    with meshes(0, 9) as ((own, caller), where):
        own.greets = lambda: Welcome({}, "graph")
        attacker = Attacker(ATTACKS[name], [where[0]])
        try:
            assert caller.call(where[0], Ask(where[9], "graph", ())) == Welcome({}, "graph")
        finally:
            attacker.end()
        assert own._thread.is_alive()
        assert own.members == {0, 9}
