"""Steps of several shapes whose micro-batches replicas share, each shape in parts of its own."""

from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.batches.bucketed import Bucketed
from penstock.batches.one_key import job_of_key, keys_of
from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.choose import keys as keys_module
from penstock.choose.choose import Choice, Machines
from penstock.choose.joined_counts import parts_alike
from penstock.choose.keys import TracedKey, with_keys
from penstock.errors import GraphError, UnlikeShapesError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.joined.divided_batch import divided, done_by_each
from penstock.graph.merge import merged
from penstock.graph.trace import build_model, capture
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import stages_of
from penstock.plan.plan import Prediction
from penstock.plan.terms import StepTerms
from penstock.runtime.launch import run_threads
from penstock.runtime.run import Steps
from penstock.runtime.worker import Task, work
from penstock.training.task import steps_of_keys
from tests.runtime.test_key_steps import Pictures, Tokens, loss_of

STEPS = 5


def job_of(sizes: tuple[int, int], micro_batches: int, weight: bool) -> ps.Job:
    drawn = torch.Generator().manual_seed(0)
    lengths = [2 + k % 7 for k in range(12 * micro_batches * max(sizes))]
    rows = [torch.randint(1, 20, (n,), generator=drawn) for n in lengths]
    samples = [{"x": row, "labels": row.roll(-1)} for row in rows]
    data = ps.bucketed(samples, (4, 8), sizes, micro_batches=micro_batches, seed=1)
    counted = (lambda batch: (batch["labels"] != -100).sum()) if weight else None
    adam = lambda weights: torch.optim.AdamW(weights, lr=1e-2)  # noqa: E731
    return ps.Job(Tokens, loss_of, data, adam, weight=counted, num_steps=STEPS)


def bare(job: ps.Job) -> Bucketed:
    return job.data if isinstance(job.data, Bucketed) else job.data.of


def plain(job: ps.Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of a loop over whole micro-batches."""
    model, losses, count = build_model(job), list[float](), job.micro_batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for first in range(0, STEPS * count, count):
        batches = [bare(job).batch(first + k) for k in range(count)]
        counts = [int((batch["labels"] != -100).sum()) for batch in batches]
        weights = counts if bare(job) is not job.data else [1] * count
        losses.append(0.0)
        for k, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            with SeededRandom(micro_batch_seed(job.seed, first + k)):
                loss = loss_of(model, batch) * weight / sum(weights)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {f"weights/{name}": p.detach() for name, p in model.named_parameters()}


def planned(job: ps.Job, replicas: int, stages: int) -> Choice:
    """Return plans for all keys of a job, of which that of the first is made by hand."""
    steps: list[TracedKey] = []
    for key, count in keys_of(job).items():
        own = job_of_key(job, key)
        steps.append(TracedKey(key, count / sum(keys_of(job).values()), own, capture(own), 0.0))
    steps.sort(key=lambda step: -step.captured.graph.samples)
    whole = steps[0].captured
    samples = whole.graph.samples
    parts = next(n for n in range(1, 9) if job.micro_batches * n >= replicas and samples % n == 0)
    first = divided(whole, parts)
    cuts, total = [len(first.graph.cut_points) // 2][: stages - 1], job.micro_batches * parts
    shares = [total // replicas + (k < total % replicas) for k in range(replicas)]
    said = {"num_micro_batches": shares[0], "replicas": replicas, "shares": shares}
    joined = Fraction(1, parts)
    plan = plan_by_hand(first.graph, cuts, "one_f_one_b", joined=joined, **said)
    own = merged(steps[0].job, joined, first.batch.division)
    there = Machines(profile=lambda *_: ())
    return with_keys(Choice(own, first, plan), job, steps, there, None)


def ran(choice: Choice, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    others, windows = steps_of_keys(choice, range(STEPS))
    task = Task(
        choice.captured,
        stages_of(choice.plan, choice.captured.graph),
        choice.job,
        windows,
        policy=SavePolicy(folder),
        keys=others,
        joined=choice.plan.terms.joined,
    )
    steps = Steps(choice.plan.job_micro_batches)
    run_threads(partial(work, task), choice.plan.total_ranks, steps.add, groups=task.groups)
    losses = [step.loss for step in sorted(steps.finished, key=lambda step: step.step)]
    return losses, dict(checkpoint.load(checkpoint.latest(folder)).tensors)


class Shortest:
    """What a plan is predicted to take: least where work is shared, or where each does all."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared

    def __call__(self, plan, graph, profiles, cluster):
        is_divided = "divided" in graph.key[-1]
        return plan.changed(predicted=Prediction(float(is_divided != self.shared), (), 0.0))


@pytest.mark.parametrize(
    ("sizes", "ranks", "micro_batches", "weight", "shared", "shares"),
    [
        ((4, 3), (2, 1), 1, True, True, ((1, 1), (2, 1))),
        ((4, 1), (2, 1), 1, False, True, ((1, 1), (1, 1))),
        ((6, 5), (3, 1), 2, True, False, ((2, 1, 1), (2, 2, 2))),
        ((2, 4), (2, 2), 1, False, True, ((1, 1), (1, 1))),
    ],
)
def test_each_shape_is_shared_by_its_own_samples_and_trains_as_a_loop(  # noqa: PLR0913
    tmp_path, monkeypatch, sizes, ranks, micro_batches, weight, shared, shares
):
    job = job_of(sizes, micro_batches, weight)
    monkeypatch.setattr(keys_module, "predicted", Shortest(shared=shared))
    choice = planned(job, *ranks)
    (other,) = choice.others
    assert (choice.plan.grid.shares, other.plan.grid.shares) == shares
    assert other.plan.job_micro_batches == micro_batches
    losses, state = ran(choice, tmp_path)
    expected, weights = plain(job)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=2e-6)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(2, 6))
def test_parts_are_of_whole_samples_and_enough_for_all_replicas(samples, count, replicas, wanted):
    plan = SimpleNamespace(terms=StepTerms(joined=Fraction(1, wanted)), replicas=replicas)
    found = parts_alike(plan, samples, count)
    assert all(samples % n == 0 and count * n >= replicas for n in found)
    evenly = [n for n in range(1, samples + 1) if not (samples % n or count * n % replicas)]
    near = [n for n in evenly if count * n >= replicas and wanted / 2 <= n <= 2 * wanted]
    assert not near or (len(found) == 1 and found[0] in evenly)
    assert bool(found) == (count * samples >= replicas)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 9))
def test_replicas_share_other_counts_as_their_plan_does_where_that_is_possible(shares, times):
    total, most = sum(shares), max(shares)
    plan = Shared(total, tuple(shares) if len({*shares}) > 1 else (), len(shares))
    assert sharing(plan, times * total) == (tuple(times * n for n in shares), times * most)
    own, largest = sharing(plan, times * total + 1)
    assert sum(own) == times * total + 1
    assert max(own) == largest <= min(own) + 1


class Shared:
    """What says how the micro-batches of a step are shared, and is changed by words."""

    def __init__(self, count: int, shares: tuple[int, ...], replicas: int) -> None:
        self.step_micro_batches, self.replicas = count, replicas
        self.place = SimpleNamespace(shares=shares)
        self.words: dict[str, object] = {}

    def changed(self, **words: object) -> "Shared":
        self.words = words
        return self


def sharing(plan: Shared, count: int) -> tuple[tuple[int, ...], int]:
    words: Any = keys_module._sharing(plan, count, 1).words  # pyright: ignore
    most = words.get("num_micro_batches", max(plan.place.shares or (count // plan.replicas,)))
    shares = words.get("shares", plan.place.shares)
    return shares or (most,) * plan.replicas, most


def test_a_step_that_changes_a_buffer_is_done_once():
    data = ps.batches(torch.randn(4, 3, 6, 6), 2)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    captured = capture(ps.Job(Pictures, loss, data, torch.optim.SGD))
    with pytest.raises(GraphError, match="not the same function"):
        done_by_each(captured, 2)


def test_who_can_share_nothing_is_told_why(monkeypatch):
    monkeypatch.setattr(keys_module, "predicted", Shortest(shared=True))

    def refuses(*_: object) -> None:
        raise GraphError("it works on several samples together")

    monkeypatch.setattr(keys_module, "_divided_alike", refuses)
    with pytest.raises(UnlikeShapesError, match=r"steps of 3 x 8 cannot .* several samples"):
        planned(job_of((4, 3), 1, False), 2, 1)
