"""Steps of several shapes in one run: over the same weights, as the plain loop makes them."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.batches import ReadNumbers
from penstock.batches.one_key import job_of_key, keys_of
from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.choose.choose import Choice, Machines
from penstock.choose.joined_counts import ways_to_divide, ways_to_join
from penstock.choose.keys import with_keys
from penstock.choose.run_windows import windows_of_keys
from penstock.errors import RunError, UnlikeShapesError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.graph import with_cut_points
from penstock.graph.trace import build_model, capture
from penstock.keyed import keyed, only_key
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.of_key import for_key, is_alike
from penstock.runtime.calls import StepResult
from penstock.runtime.key_steps import KeyStep, of_key
from penstock.runtime.launch import run_threads
from penstock.runtime.run import Steps
from penstock.runtime.windows import Windows
from penstock.runtime.worker import Task, work
from penstock.search.shapes import Fixed

STEPS = 7


class Tokens(nn.Module):
    """Embeds, mixes over the length, and says what follows; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 20)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.drop(torch.relu(self.first(x))).cumsum(1)
        return self.out(self.norm(self.second(x)))


def loss_of(model, batch):
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def job_of(**more) -> ps.Job:
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 13, (60,), generator=drawn).tolist()
    rows = [torch.randint(1, 20, (n,), generator=drawn) for n in lengths]
    samples = [{"x": row, "labels": row.roll(-1)} for row in rows]
    data = ps.bucketed(samples, (4, 8, 12), (4, 3, 2), micro_batches=4, last="short", seed=1)
    return ps.Job(
        model=Tokens,
        loss=loss_of,
        data=data,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        weight=lambda batch: (batch["labels"] != -100).sum(),
        **more,
    )


def task_of(job: ps.Job, plans, folder: Path, steps: range, resume: Path | None = None) -> Task:
    """Return the task of a run of all keys, by plans that divide the model alike."""
    keys = list(keys_of(job))
    captures = [capture(job_of_key(job, key)) for key in keys]
    plan = plans(captures[0].graph)
    made = [(plan, captures[0])]
    for captured in captures[1:]:
        own, graph = for_key(plan, captures[0].graph, captured.graph)
        made.append((own, replace(captured, graph=graph, model=captures[0].model)))
    programs = {
        key: lower_plan(own, captured.graph)
        for key, (own, captured) in zip(keys, made, strict=True)
    }
    inner = keyed(job.data)
    windows = Windows(
        steps.start,
        lambda step: (
            programs[inner.key_of(step * job.micro_batches)] if step < steps.stop else None
        ),
        tuple(programs.values()),
    )
    others = [
        KeyStep(captured, stages_of(own, captured.graph), (programs[key],))
        for key, (own, captured) in list(zip(keys, made, strict=True))[1:]
    ]
    return Task(
        captures[0],
        stages_of(plan, captures[0].graph),
        job,
        windows,
        policy=SavePolicy(folder),
        keys=tuple(others),
        resume=resume,
    )


def ran(task: Task) -> tuple[list[float], dict[str, torch.Tensor]]:
    steps = Steps(task.job.micro_batches)
    ranks = task.windows.programs[0].num_ranks
    results = run_threads(partial(work, task), ranks, steps.add, groups=task.groups)
    assert not any(result.noise.small for result in results)  # micro-batches are of unlike sizes
    newest = checkpoint.latest(task.policy.folder)
    losses = [step.loss for step in sorted(steps.finished, key=lambda step: step.step)]
    return losses, dict(checkpoint.load(newest).tensors)


def plain(job: ps.Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of a loop over whole steps, each one large mean over tokens."""
    model, losses = build_model(job), list[float]()
    optimizer, number = torch.optim.AdamW(model.parameters(), lr=1e-2), 0
    for _ in range(STEPS):
        batches = [job.data.of.batch(number + k) for k in range(job.micro_batches)]
        counts = [int((batch["labels"] != -100).sum()) for batch in batches]
        total = 0.0
        for k, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            with SeededRandom(micro_batch_seed(job.seed, number + k)):
                loss = loss_of(model, batch) * count / sum(counts)
            loss.backward()
            total += loss.item()
        number += job.micro_batches
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {f"weights/{name}": p.detach() for name, p in model.named_parameters()}


WAYS = {
    "one rank": lambda graph: plan_by_hand(graph, [], "gpipe", num_micro_batches=4),
    "replicas": lambda graph: plan_by_hand(graph, [], "gpipe", num_micro_batches=2, replicas=2),
    "stages": lambda graph: plan_by_hand(
        graph, [len(graph.cut_points) // 2], "one_f_one_b", num_micro_batches=4
    ),
    "stages and replicas": lambda graph: plan_by_hand(
        graph, [len(graph.cut_points) // 2], "zb_h1", num_micro_batches=2, replicas=2
    ),
    "sharded, repeated": lambda graph: plan_by_hand(
        graph,
        [1],
        "one_f_one_b",
        num_micro_batches=2,
        replicas=2,
        shard=["shard"] * 2,
        recompute=[True, False],
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(2)
def test_a_run_of_several_keys_is_the_plain_loop(way, tmp_path):
    job = job_of()
    assert len({job.data.of.key_of(4 * step) for step in range(STEPS)}) > 2
    losses, state = ran(task_of(job, WAYS[way], tmp_path, range(STEPS)))
    expected, weights = plain(job)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=2e-6)


class Pictures(nn.Module):
    """Sums over pictures of any size, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.out = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x):
        x = self.second(torch.relu(self.norm(self.first(x))))
        return self.out(x.mean((2, 3)))


@pytest.mark.parametrize("way", ["one rank", "stages"])
def test_pictures_of_two_sizes_leave_the_running_statistics_of_a_loop(way, tmp_path):
    drawn = torch.Generator().manual_seed(0)
    sizes = [(6, 6), (4, 8)] * 12
    pictures = [torch.randn(3, *size, generator=drawn) for size in sizes]
    data = ps.bucketed(
        pictures, ((6, 6), (4, 8)), 2, length=lambda x: x.shape[1:], micro_batches=4, last="short"
    )

    def squared(model, batch):
        return model(batch).square().mean()

    job = ps.Job(Pictures, squared, data, lambda weights: torch.optim.SGD(weights, lr=0.1))
    _, state = ran(task_of(job, WAYS[way], tmp_path, range(STEPS)))
    model = build_model(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4 * STEPS):
        (squared(model, data.batch(number)) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.named_parameters():
        torch.testing.assert_close(state[f"weights/{name}"], value, rtol=1e-5, atol=1e-6)
    for name, value in model.named_buffers():
        torch.testing.assert_close(state[f"buffers/{name}"], value, rtol=1e-5, atol=1e-6)


def test_a_run_of_several_keys_goes_on_from_a_checkpoint(tmp_path):
    job = job_of()
    ran(task_of(job, WAYS["stages"], tmp_path, range(3)))
    kept = checkpoint.latest(tmp_path)
    ran(task_of(job, WAYS["replicas"], tmp_path, range(3, STEPS), kept))
    state = checkpoint.load(checkpoint.latest(tmp_path)).tensors
    for name, value in plain(job)[1].items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=2e-6)


class Sized(nn.Module):
    """Has a layer for long inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        layer = self.long if x.shape[1] > 4 else self.short
        return layer(x[..., None].float())


def test_weights_of_one_shape_alone_stay_as_they_are_in_steps_of_another(tmp_path):
    job = replace(job_of(), model=Sized, weight=None)
    job = replace(job, loss=lambda model, batch: model(batch["x"]).square().mean())
    _, state = ran(task_of(job, WAYS["replicas"], tmp_path, range(STEPS)))
    model = build_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(4 * STEPS):
        (job.loss(model, next(job.data(number))) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.named_parameters():
        torch.testing.assert_close(state[f"weights/{name}"], value, rtol=1e-5, atol=1e-6)
        assert float(state[f"optimizer/{name}/step"]) == optimizer.state[value]["step"] < STEPS


@pytest.mark.parametrize(
    ("schedule", "said", "words"),
    [
        ("pipedream", {}, "lets steps overlap"),
        ("gpipe", {"sums": "int8"}, "agree over several steps"),
        ("gpipe", {"sums": "delayed"}, "agree over several steps"),
        ("gpipe", {"sums": "local:2"}, "agree over several steps"),
    ],
)
def test_plans_whose_steps_depend_on_those_before_are_refused(schedule, said, words):
    job = job_of()
    captured = capture(job_of_key(job, next(iter(keys_of(job)))))
    cuts = [1] if schedule == "pipedream" else []
    plan = plan_by_hand(captured.graph, cuts, schedule, num_micro_batches=2, replicas=2, **said)
    with pytest.raises(UnlikeShapesError, match=words):
        with_keys(Choice(job, captured, plan), job, (), Machines(), None)


def test_a_plan_finds_its_cuts_by_name_where_the_ops_are_others():
    def traced(width: int):
        def loss(model, batch):
            x = batch["x"].float().sum(1, keepdim=True)
            return (model(x if width == 1 else x + 0 * x.square())).mean()

        data = ps.batches([{"x": torch.ones(4)}] * 8, 4)
        layers = [nn.Linear(1, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 1)]
        job = ps.Job(lambda: nn.Sequential(*layers), loss, data, torch.optim.SGD)
        return capture(job).graph

    first, other = traced(1), traced(2)
    assert not is_alike(first, other)
    plan = plan_by_hand(first, [1], "gpipe", num_micro_batches=1)
    made, graph = for_key(plan, first, other)
    assert made.cut_names == plan.cut_names
    assert made.graph == graph.digest
    repeats = plan.changed(recompute=[(first.loss,), False])
    with pytest.raises(UnlikeShapesError, match="repeats some ops"):
        for_key(repeats, first, other)
    with pytest.raises(UnlikeShapesError, match="cannot be cut at"):
        for_key(plan, first, with_cut_points(other, other.cut_points[:1]))


def test_a_job_of_one_key_has_its_micro_batches_in_their_order():
    job = job_of()
    whole, keys = job.data.of, keys_of(job)
    steps = range(2 * len(whole) // 4)
    for key, count in keys.items():
        own = job_of_key(job, key)
        assert only_key(own.data) == key
        numbers = [
            4 * step + k for step in steps if whole.key_of(4 * step) == key for k in range(4)
        ]
        assert len(numbers) == 2 * 4 * count
        for at in (0, 2, len(numbers) - 1):
            assert torch.equal(next(own.data(at)).batch["x"], whole.batch(numbers[at])["x"])
        picked = own.data.of.picked(ReadNumbers(0, (1, 3), 4))
        assert torch.equal(next(picked)["x"], whole.batch(numbers[1])["x"])
        assert torch.equal(next(picked)["x"], whole.batch(numbers[3])["x"])
    assert list(keys.values()) == sorted(keys.values(), reverse=True)


def test_micro_batches_of_several_shapes_are_divided_and_not_joined():
    job = job_of_key(job_of(), next(iter(keys_of(job_of()))))
    assert ways_to_join(job) == [1]
    assert ways_to_divide(job, Fixed(), 4, 4) == [Fraction(1, 2), Fraction(1, 4)]


def test_a_step_of_a_key_that_was_not_planned_ends_the_run():
    windows = windows_of_keys(
        {"short": None}, lambda step: "short" if step < 2 else "long", range(5)
    )
    assert windows.ask(1) is None
    with pytest.raises(RunError, match="step 2 has the shape long"):
        windows.ask(2)


def test_data_that_has_a_key_of_by_chance_is_taken_as_any_other() -> None:
    class Table:
        """Rows by key, as a script may have them."""

        def key_of(self, row: str) -> str:
            return row

        def __call__(self, start: int) -> Iterator[Tensor]:
            return iter([torch.ones(1)])

    assert keyed(Table()) is None
    assert isinstance(ps.Job(nn.Identity, lambda m, x: x.sum(), Table(), torch.optim.SGD), ps.Job)


def test_who_hears_a_rank_later_hears_its_steps_of_other_keys_too():
    heard = list[StepResult]()
    rank: Any = Telling()
    step: Any = SimpleNamespace(capture=None, stages=None, functions={}, counts=Fraction(1, 2))
    other = of_key(rank, step, 3)
    rank.report = heard.append
    other.report(StepResult(4, 1.0, 0.0, 4))
    assert [(each.step, each.micro_batches) for each in heard] == [(4, 2)]


class Telling:
    """A rank of which nothing is asked but to report."""

    report = None

    def begin_anew(self, first_edge: int) -> None:
        assert first_edge == 3
