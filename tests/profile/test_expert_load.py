"""Expert load: rows by expert, of which the rank counts that has most of them."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProfileError
from penstock.profile.expert_load import ExpertLoad, loads_in_words

counts = st.integers(0, 9)
loads = st.tuples(st.sampled_from([2, 4]), st.integers(1, 3), st.integers(1, 4)).flatmap(
    lambda given: st.tuples(
        st.just(given[0]),
        st.lists(
            st.tuples(*[counts] * (given[0] * given[1])), min_size=given[2], max_size=given[2]
        ),
    )
)


@given(loads)
def test_busiest_rank_is_another_in_each_micro_batch(given_loads):
    """By a loop over ranks, experts and micro-batches."""
    ranks, rows = given_loads
    size, most = len(rows[0]) // ranks, []
    for row in rows:
        seen = [0] * ranks
        for expert, count in enumerate(row):
            seen[expert // size] += count
        most.append(max(seen))
    load = ExpertLoad(0, tuple(rows))
    assert load.busiest_rows(ranks) * len(rows) == pytest.approx(sum(most))
    total = sum(map(sum, rows))
    part = sum(most) / total if total else 1 / ranks
    assert load.busiest_part(ranks) == pytest.approx(part)
    assert 1 / ranks - 1e-12 <= part <= 1
    blocks = [row[k * size : (k + 1) * size] for row, k in product(rows, range(ranks))]
    block = load.busiest_block(ranks)
    assert block in blocks
    assert abs(sum(block) - sum(most) / len(most)) == pytest.approx(
        min(abs(each - sum(most) / len(most)) for each in most)
    )


def test_load_of_no_micro_batch_is_refused():
    with pytest.raises(ProfileError, match="no micro-batch"):
        ExpertLoad(0, ())
    with pytest.raises(ProfileError, match="fewer than no rows"):
        ExpertLoad(0, ((1, -1),))


def test_step_without_experts_has_no_words_for_them():
    from penstock.graph.trace import capture
    from tests.graph.zoo import JOBS

    assert loads_in_words(capture(JOBS["blocks"]).graph, ()) == ""
