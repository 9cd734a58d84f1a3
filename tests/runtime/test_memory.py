"""The bytes that a rank holds at most are those that were predicted."""

from functools import cache, partial

import pytest
import torch

from penstock.cluster import Cluster
from penstock.graph.traced_graph import trace
from penstock.job import Job
from penstock.plan import Plan, is_asynchronous, plan_by_hand, schedule_of
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.of_plan import lower
from penstock.profile import Profile, measure
from penstock.program.passes.receive_early import EARLY
from penstock.runtime import launch
from penstock.runtime.launch import run_processes
from penstock.runtime.worker import Task, work
from penstock.schedule import weight_copies
from penstock.search import evaluate
from penstock.simulate.price import held_of, memory_on, ways_of
from penstock.simulate.simulate import simulate
from penstock.timeline import peak_bytes
from penstock.training.run_program import run
from tests.parity.models import captured, job_of, plan_of
from tests.parity.training import listed

FLOAT = torch.float32
CLOSE = 0.02  # what the allocator rounds up is much of tensors of 16 numbers


@cache
def profile_of(name: str) -> Profile:
    """Return the profile of a model, measured in no time: only its bytes are looked at."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measure, "_BUDGET_S", 0.0)
        return measure.measure(captured(name, FLOAT), job_of(name, FLOAT, "adamw"))


@cache
def programs(plan: Plan, name: str):
    window = 4 if is_asynchronous(plan) else 1
    return lower_plan(plan, captured(name, FLOAT).graph, num_steps=window), window


def predicted(plan: Plan, name: str) -> tuple[int, ...]:
    graph = captured(name, FLOAT).graph
    program, window = programs(plan, name)
    schedule = schedule_of(plan, num_steps=window)
    alive = weight_copies(schedule) if window > 1 else ()
    stages, ways = stages_of(plan, graph), ways_of(schedule)
    held = held_of(graph, stages, profile_of(name), alive, ways=ways)
    memory = memory_on([held], program, [0] * program.num_ranks, posted=plan.overlap.early > 0)
    return peak_bytes(simulate(program, lambda action: 1.0, memory=memory))


def measured(plan: Plan, name: str, *, memory_window: int = 1, **options) -> list[int]:
    made = captured(name, FLOAT)
    program, window = programs(plan, name)
    windows = listed([(program, number * window) for number in range(1 + memory_window)])
    job = job_of(name, FLOAT, "adamw", **options)
    task = Task(made, stages_of(plan, made.graph), job, windows, memory_window=memory_window)
    run = partial(work, task)
    results = run_processes(run, plan.total_ranks, lambda step: None, groups=task.groups)
    return [result.peak_bytes for result in results]


PEAKS = [
    ("gpipe", 2, {}),
    ("one_f_one_b", 2, {}),
    ("zb_h1", 2, {}),
    ("interleaved", 4, {}),
    ("double_buffered", 2, {}),
    ("pipedream", 2, {}),
    ("pipemare", 2, {}),
    ("weight_prediction", 2, {}),
    ("spec_train", 2, {}),
    ("two_bp(batch=2)", 2, {}),
    ("timeprest", 2, {}),
    ("one_f_one_b", 2, {"recompute": (True, True)}),
    ("one_f_one_b", 1, {"replicas": 2}),
    ("one_f_one_b", 2, {"clip": True}),
    ("zb_h2", 2, {"clip": True, "post_validation": True}),
    ("one_f_one_b", 2, {"clip": True, "post_validation": True}),
]
NAMES = ("tied", "batch_norm", "frozen", "frozen_start")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "stages", "options", "name"),
    [
        (*peak, name)  # of each schedule two models, by turns
        for row, peak in enumerate(PEAKS)
        for column, name in enumerate(NAMES)
        if (row + column) % 2 == 0
    ],
)
def test_peak_is_the_predicted_one(schedule, stages, options, name):
    never = 1e6  # what undoes an update is held until it is known that nothing has to be clipped
    optimizer = {"clip_norm": never} if options.get("clip") else {}
    plan = plan_of(captured(name, FLOAT).graph, schedule, stages, 4, **options)
    found = measured(plan, name, **optimizer)
    expected = predicted(plan, name)
    norms = 16 * 65 if plan.agreement.post_validation else 0  # of each parameter, and as a message
    assert found == pytest.approx(expected, rel=CLOSE, abs=norms)


def test_peak_of_ranks_in_turn_counts_gradients_that_wait():
    """The first of three ranks has the first gradient of a round; those of the others wait."""
    plan = plan_of(captured("tied", FLOAT).graph, "round_robin(ranks=3)", 1, 1)
    found, expected = measured(plan, "tied"), predicted(plan, "tied")
    assert found[1:] == pytest.approx(expected[1:], rel=CLOSE)
    assert found[0] < (1 - CLOSE) * found[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt", "tied", "batch_norm"])
@pytest.mark.parametrize(
    ("schedule", "options", "least"),
    [
        ("one_f_one_b", {}, 0.98),
        ("zb_h1", {}, 0.98),
        ("pipedream", {}, 0.98),
        ("one_f_one_b", {"recompute": (True, True)}, 0.7),  # one unit at a time is there again
    ],
)
def test_peak_of_units_is_predicted_and_no_more_than_that_of_stages(schedule, options, least, name):
    plan = plan_of(captured(name, FLOAT).graph, schedule, 2, 4, **options)
    cut = plan.refined(captured(name, FLOAT).graph)
    found = measured(cut, name)
    assert found == pytest.approx(predicted(cut, name), rel=CLOSE)
    assert least <= max(found) / max(predicted(plan, name)) <= 1.01


@pytest.mark.parametrize(
    ("schedule", "stages", "replicas"),
    [
        ("gpipe", 2, 1),
        ("one_f_one_b", 2, 2),
        ("zb_h1", 2, 1),
        ("interleaved", 4, 1),
        ("pipedream", 2, 1),
    ],
)
@pytest.mark.sampled(2)
def test_peak_over_gloo_counts_the_messages_whose_receives_are_posted(
    schedule, stages, replicas, monkeypatch
):
    monkeypatch.setattr(launch, "available", lambda: (False, "as between hosts"))
    name = "tied"
    graph = captured(name, FLOAT).graph
    alike = plan_of(graph, schedule, stages, 6 * replicas, replicas=replicas)
    plan = alike.changed(early=EARLY)
    expected = predicted(plan, name)
    assert measured(plan, name) == pytest.approx(expected, rel=CLOSE)
    assert sum(expected) > sum(predicted(alike, name))


def test_peak_does_not_grow_from_window_to_window():
    plan = plan_of(captured("tied", FLOAT).graph, "zb_h1", 2, 4)
    early, late = (measured(plan, "tied", memory_window=window) for window in (1, 8))
    assert all(a >= b for a, b in zip(early, late, strict=True))
    assert max(early) - max(late) < 64  # the noise of the gradients is looked at now and then


class Recurrent(torch.nn.Module):
    """Layers whose fused kernels keep for their backward what only they know the size of."""

    def __init__(self, cell: str, **options) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 24)
        self.cells = getattr(torch.nn, cell)(24, 32, batch_first=True, **options)
        self.head = torch.nn.Linear(64 if self.cells.bidirectional else 32, 20)

    def forward(self, x):
        return self.head(self.cells(self.embed(x))[0])


def tokens(start):
    while True:
        yield torch.randint(20, (8, 20), generator=torch.Generator().manual_seed(start))
        start += 1


def token_loss(model, x):
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("LSTM", {}),
        ("GRU", {}),
        ("RNN", {}),
        ("LSTM", {"bidirectional": True}),
        ("LSTM", {"num_layers": 2, "dropout": 0.2}),
    ],
)
def test_peak_of_recurrent_layers_is_the_predicted_one(cell, options, monkeypatch):
    monkeypatch.setattr(measure, "_BUDGET_S", 0.0)
    job = Job(
        lambda: Recurrent(cell, **options), token_loss, tokens, torch.optim.Adam, micro_batches=3
    )
    graph = trace(job)
    plan = plan_by_hand(graph, [], "gpipe", num_micro_batches=3)
    found = run(lower(plan, graph), job, num_steps=2).peak_bytes
    expected, _ = evaluate(graph, (measure.measure(graph.capture, job),), Cluster.here(1), plan)
    assert found == pytest.approx(expected.peak_bytes, rel=0.01)
    assert found[0] > 3 * 8 * 20 * 4 * 32
