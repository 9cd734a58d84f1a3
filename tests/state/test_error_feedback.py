"""Sums in few numbers: beside a simulation of all ranks, one after the other, made of the papers.

The simulation is in float64 and calls nothing of ours: 1-bit SGD's error feedback on both ways,
MSTopK's choice with error feedback, PowerSGD's algorithms 1 and 2.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.state import few_numbers
from penstock.state.error_feedback import HeldBack
from penstock.state.few_numbers import greatest, orthonormal
from penstock.state.flat import layouts_of
from penstock.sums import summed_as, sums_way
from tests.draws import examples
from tests.transport.transport_ranks import run_threads, values

STEPS = 3
WAYS = "int8", "sign", "top:0.05", "rank:2"
shapes_st = st.lists(st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple), min_size=1)


def layouts(shapes):
    parameters = {node: torch.zeros(shape) for node, shape in enumerate(shapes)}
    read = dict.fromkeys(parameters, torch.float32)
    return layouts_of(parameters, read, torch.device("cpu"))


def gradient(layout, rank, step):
    """Return a flat gradient of a rank in a step, zeros between its parts."""
    flat = layout.new()
    for node, view in layout.views(flat).items():
        drawn = torch.Generator().manual_seed(97 * rank + 13 * step + node)
        view.copy_(torch.randn(view.shape, generator=drawn))
    return flat


class Counting:
    """An end of a transport that counts the bytes that it sends."""

    def __init__(self, end):
        self.end, self.rank, self.sent = end, end.rank, 0

    def swap(self, gives, takes, ranks):
        others = (g for g, rank in zip(gives, ranks, strict=True) if rank != self.rank)
        self.sent += sum(each.numel() * each.element_size() for each in others)
        self.end.swap(gives, takes, ranks)

    def all_gather(self, whole, cuts, ranks):
        own = ranks.index(self.rank)
        size = (cuts[own + 1] - cuts[own]) * whole.element_size()
        self.sent += (len(ranks) - 1) * size
        self.end.all_gather(whole, cuts, ranks)

    def all_reduce(self, tensor, ranks):  # of n ranks, in a ring, this is the mean
        self.sent += 2 * (len(ranks) - 1) * tensor.numel() * tensor.element_size() / len(ranks)
        self.end.all_reduce(tensor, ranks)


def made(text, layout, shared=frozenset()):
    return HeldBack(sums_way(text), [layout], shared, set(layout.nodes), seed=3)


def summed(text, shapes, count, shared=frozenset()):
    """Return of each rank what it sums to, holds back after each step, and has sent; and Q."""
    (layout,) = layouts(shapes)

    def work(end):
        end, ranks = Counting(end), tuple(range(count))
        held = made(text, layout, shared)
        held.joins(end.rank, ranks)
        first = {node: power.clone() for node, power in held.powers.items()}
        rows = []
        for step in range(STEPS):
            flat = gradient(layout, end.rank, step)
            held.sum_over(end, [flat], ranks)
            rows.append((flat.clone(), held.left[0].clone()))
        return rows, end.sent, first

    return layout, values(run_threads(count, work))


# -- the simulation -------------------------------------------------------------------------------


def decoded(x, kind):
    """Return what is left of numbers that are sent in codes, 256 with one scale."""
    out = np.zeros_like(x)
    for at in range(0, len(x), 256):
        row = np.concatenate([x[at : at + 256], np.zeros(max(0, 256 - len(x[at : at + 256])))])
        if kind == "sign":
            made = np.where(row >= 0, 1.0, -1.0) * np.abs(row).mean()
        else:
            step = np.abs(row).max() / 127
            codes = row / step if step else row * 0
            assume(np.abs(codes % 1 - 0.5).min() > 3e-5)  # 32 bits may round a half the other way
            made = np.round(codes) * step
        out[at : at + 256] = made[: len(x[at : at + 256])]
    return out


def by_codes(wanted, kind):
    """Return the sum that all get, and what each holds back: of its own, and of its part."""
    sent = [decoded(x, kind) for x in wanted]
    left = [x - s for x, s in zip(wanted, sent, strict=True)]
    total = sum(sent)
    blocks, count = -(-len(total) // 256), len(wanted)
    ends = [min(len(total), 256 * (blocks * at // count)) for at in range(count + 1)]
    again = np.concatenate([decoded(total[a:b], kind) for a, b in zip(ends, ends[1:])])  # noqa: B905, RUF007
    for rank in range(count):
        part = slice(ends[rank], ends[rank + 1])
        left[rank][part] += (total - again)[part]
    return again, left


def by_size(wanted, part):
    sent = []
    for x in wanted:
        kept = np.argsort(-np.abs(x))[: max(1, round(part * len(x)))]
        row = np.zeros_like(x)
        row[kept] = x[kept]
        sent.append(row)
    return sum(sent), [x - s for x, s in zip(wanted, sent, strict=True)]


def by_products(wanted, shapes, starts, powers):
    total = sum(wanted)
    left = [np.zeros_like(x) for x in wanted]
    for node, q in powers.items():
        rows, width = shapes[node][0], int(np.prod(shapes[node][1:]))
        place = slice(starts[node], starts[node] + rows * width)
        matrices = [x[place].reshape(rows, width) for x in wanted]
        p, _ = np.linalg.qr(sum(m @ q for m in matrices))
        powers[node] = sum(m.T @ p for m in matrices)
        product = p @ powers[node].T
        total[place] = product.reshape(-1)
        for rank, m in enumerate(matrices):
            left[rank][place] = (m - product / len(wanted)).reshape(-1)
    return total, left


def used(layout):
    flat = layout.new()
    for view in layout.views(flat).values():
        view.fill_(1)
    return flat.numpy() > 0


def simulated(text, layout, shapes, count, first):
    kind, _, amount = text.partition(":")
    left = [np.zeros(layout.size) for _ in range(count)]
    powers = {node: power.double().numpy() for node, power in first.items()}
    for step in range(STEPS):
        own = [gradient(layout, rank, step).double().numpy() for rank in range(count)]
        wanted = [g + e for g, e in zip(own, left, strict=True)]
        if kind == "top":
            total, left = by_size(wanted, float(amount))
        elif kind == "rank":
            total, left = by_products(wanted, shapes, layout.starts, powers)
        else:
            total, left = by_codes(wanted, kind)
            rest = ~used(layout)
            for each in (total, *left) if kind == "sign" else ():
                each[rest] = 0
        yield total, left


# -- what is promised -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["int8", "sign"])
def test_pieces_of_a_stage_are_summed_as_all_of_it_is(text, monkeypatch):
    """So that codes take as much memory for a large stage as for a small one."""
    _, whole = summed(text, [(700,), (900,)], 3)
    monkeypatch.setattr(few_numbers, "_PIECE", 512)
    _, pieces = summed(text, [(700,), (900,)], 3)
    for (rows, _, _), (others, _, _) in zip(whole, pieces, strict=True):
        assert torch.equal(rows[0][0], others[0][0])
    lefts = [sum(rows[0][1] for rows, _, _ in ranks) for ranks in (whole, pieces)]
    torch.testing.assert_close(*lefts)


@pytest.mark.parametrize("text", WAYS)
@examples(15)
@given(shapes=shapes_st, count=st.integers(1, 4))
def test_sums_and_what_is_held_back_are_those_of_the_papers(text, shapes, count):
    layout, ranks = summed(text, shapes, count)
    expected = simulated(text, layout, shapes, count, ranks[0][2])
    for step, (total, left) in enumerate(expected):
        for rank, (rows, _, _) in enumerate(ranks):
            np.testing.assert_allclose(rows[step][0].numpy(), total, atol=2e-4)
            np.testing.assert_allclose(rows[step][1].numpy(), left[rank], atol=2e-4)
            assert torch.equal(rows[step][0], ranks[0][0][step][0])


@pytest.mark.parametrize("text", WAYS)
@examples(15)
@given(shapes=shapes_st, count=st.integers(1, 4))
def test_what_is_summed_and_held_back_is_the_sum_of_gradients(text, shapes, count):
    layout, ranks = summed(text, shapes, count)
    before = torch.zeros(layout.size)
    for step in range(STEPS):
        given = sum(gradient(layout, rank, step) for rank in range(count))
        after = sum(rows[step][1] for rows, _, _ in ranks)
        torch.testing.assert_close(ranks[0][0][step][0] + after, given + before, atol=1e-4, rtol=0)
        before = after


@pytest.mark.parametrize("text", WAYS)
@examples(15)
@given(shapes=shapes_st, count=st.integers(1, 4))
def test_bytes_are_those_of_the_formula(text, shapes, count):
    layout, ranks = summed(text, shapes, count)
    sent = sum(each for _, each, _ in ranks)
    size = summed_as(sums_way(text), shapes, layout.size, count)
    assert sent == pytest.approx(STEPS * 2 * (count - 1) * size)


@pytest.mark.parametrize("text", WAYS)
def test_a_gradient_that_several_stages_share_is_summed_as_it_is(text):
    shapes = [(20, 20), (30, 8), (20, 20)]
    layout, ranks = summed(text, shapes, 2, frozenset([1]))
    for rows, _, _ in ranks:
        for step, (flat, left) in enumerate(rows):
            whole = sum(layout.views(gradient(layout, rank, step))[1] for rank in range(2))
            assert torch.equal(layout.views(flat)[1], whole)
            assert not layout.views(left)[1].any()
            assert layout.views(left)[0].any()


@pytest.mark.parametrize("text", WAYS)
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_none_that_is(text, number):
    def work(end):
        (layout,) = layouts([(40, 30)])
        held = made(text, layout)
        flat = gradient(layout, end.rank, 0)
        flat[7] = number if end.rank == 1 else 1.0
        held.sum_over(end, [flat], (0, 1))
        return bool(flat.isfinite().all())

    assert values(run_threads(2, work)) == [False, False]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_nothing_is_lost_when_another_number_of_ranks_goes_on(count):
    shapes, names = [(20, 20), (7,)], {0: "a", 1: "b"}
    layout, ranks = summed("int8", shapes, 3)
    tensors = {
        f"held-back-{rank}/{names[node]}": view
        for rank, (rows, _, _) in enumerate(ranks)
        for node, view in layout.views(rows[-1][1]).items()
    }
    total = torch.zeros(layout.size)
    for rank in range(count):
        held = made("int8", layout)
        held.joins(rank, tuple(range(count)))
        held.load(tensors, names)
        total += held.left[0]
    expected = sum(rows[-1][1] for rows, _, _ in ranks)
    for node, view in layout.views(total).items():
        torch.testing.assert_close(view, layout.views(expected)[node])


@examples(20)
@given(
    count=st.integers(1, 9000),
    part=st.floats(0.001, 1),
    shape=st.sampled_from(("normal", "equal", "mostly zero", "one huge")),
)
def test_the_greatest_are_found_by_a_threshold(count, part, shape):
    sizes = torch.randn(count, generator=torch.Generator().manual_seed(count)).abs()
    if shape == "equal":
        sizes.fill_(2.0)
    if shape == "mostly zero":
        sizes[: 9 * count // 10] = 0
    sizes[0] = 1e30 if shape == "one huge" else sizes[0]
    kept = max(1, int(part * count))
    places = greatest(sizes, kept)
    assert len(set(places.tolist())) == kept
    assert torch.equal(sizes[places].sort().values, sizes.topk(kept).values.sort().values)


def test_columns_that_depend_on_others_are_none():
    columns = torch.randn(50, 1, generator=torch.Generator().manual_seed(2)) @ torch.ones(1, 3)
    made = orthonormal(columns)
    assert float(made[:, 0].norm()) == pytest.approx(1)
    assert not made[:, 1:].any()


@pytest.mark.parametrize("text", ["int4", "top:2", "top:0", "top:nan", "rank:0", "rank:x", "top"])
def test_what_is_no_way_is_refused(text):
    with pytest.raises(ValueError, match=r"as|none"):
        sums_way(text)
