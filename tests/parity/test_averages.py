"""Weights that replicas average, beside what the papers say, written of torch alone."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from penstock.checkpoints import checkpoint
from penstock.graph.trace import capture
from penstock.plan import plan_by_hand
from penstock.prove.prove import Planned, prove, steps_to_prove
from penstock.runtime.launch import run_processes
from penstock.state.replica_keys import own_of
from tests.parity.optimizing import Net, data, job_of, windows_from
from tests.parity.test_held_back import Tied, adamw
from tests.parity.training import Run, differing, train

WAYS = "local:2", "diloco:2", "diloco:3:0.5:0.8", "easgd:2", "easgd:1:0.2", "gossip", "gossip:2"


def wide():
    return Net().double()


def tied():
    return Tied().double()


def doubles(start):
    return (x.double() for x in data(start))


def momentum(weights):
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


@cache
def captured_of(model):
    return capture(replace(job_of(momentum, model), data=data_of(model)))


def data_of(model):
    return data if model is Net else doubles


def averaging(way, replicas=2, stages=1, schedule="one_f_one_b", model=wide, **options):
    """Two micro-batches a replica and step, so that a bidirectional pipeline has its own two."""
    given = {k: options.pop(k) for k in ("clip_norm",) if k in options}
    job = job_of(momentum, model, sums=way, **given)
    job, captured = (
        replace(job, data=data_of(model), micro_batches=2 * replicas),
        captured_of(model),
    )
    return Run(plan_of(job, captured, replicas, stages, schedule, **options), job, captured)


def plan_of(job, captured, replicas=2, stages=1, schedule="one_f_one_b", **options):
    points = len(captured.graph.cut_points)
    cuts = [points * number // stages for number in range(1, stages)]
    words = {"num_micro_batches": 2, "num_ranks": stages, "replicas": replicas, **options}
    plan = plan_by_hand(captured.graph, cuts, schedule, clip=job.awaits_all, **words)
    return plan.changed(sums=job.sums)


def mixed(rows, matrix):
    """Return what replicas have of weights, rows of `rows`, after a step of consensus."""
    return [
        [
            sum(matrix[at][other] * rows[other][k] for other in range(len(rows)))
            for k in range(len(r))
        ]
        for at, r in enumerate(rows)
    ]


def pairs(replicas, number):
    """D-PSGD by a doubly stochastic matrix, of the partners that docs/agree.md lists."""
    if replicas & (replicas - 1) == 0:
        bit = 1 << number % (replicas.bit_length() - 1)
        other = [at ^ bit for at in range(replicas)]
    else:
        first = number % (replicas if replicas % 2 else 2)
        other = [*range(replicas)]
        for k in range(first, first + replicas - 1, 2):
            a, b = k % replicas, (k + 1) % replicas
            other[a], other[b] = b, a
    return [
        [0.5 * (col == row) + 0.5 * (col == other[row]) for col in range(replicas)]
        for row in range(replicas)
    ]


class Oracle:
    """Replicas, each an uncut model with an optimizer of torch's, and what makes them agree."""

    def __init__(self, job, replicas, steps):
        self.way, *numbers = job.sums.split(":")
        self.every = int(numbers[0]) if numbers else 1
        self.rest = [float(each) for each in numbers[1:]]
        torch.manual_seed(job.seed)
        first = job.model()
        self.models = [job.model() for _ in range(replicas)]
        for model in self.models:
            model.load_state_dict(first.state_dict())
        optimizers = [job.optimizer(model.parameters()) for model in self.models]
        self.centre = [p.detach().clone().requires_grad_() for p in first.parameters()]
        rate, inertia = (*self.rest, 0.7, 0.9)[:2] if len(self.rest) == 2 else (0.7, 0.9)
        self.outer = torch.optim.SGD(self.centre, lr=rate, momentum=inertia, nesterov=True)
        batches = job.data(0)
        for step in range(steps):
            for model, optimizer in zip(self.models, optimizers, strict=True):
                model.zero_grad()
                for _ in range(2):
                    (job.loss(model, next(batches)) / 2).backward()
                if job.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                optimizer.step()
            if (step + 1) % self.every == 0:
                self.agree((step + 1) // self.every - 1)

    @torch.no_grad()
    def agree(self, number):
        n = len(self.models)
        rows = [[p.detach().clone() for p in model.parameters()] for model in self.models]
        if self.way == "local":
            rows = mixed(rows, [[1 / n] * n] * n)
        if self.way == "gossip":
            rows = mixed(rows, pairs(n, number))
        if self.way == "easgd":
            a = self.rest[0] if self.rest else 0.9 / n
            own = [[(1 - a) * (i == j) for j in range(n)] + [a] for i in range(n)]
            *rows, centre = mixed([*rows, self.centre], [*own, [a] * n + [1 - n * a]])
            for p, value in zip(self.centre, centre, strict=True):
                p.copy_(value)
        if self.way == "diloco":
            for k, p in enumerate(self.centre):
                p.grad = p - sum(row[k] for row in rows) / n
            self.outer.step()
            rows = [self.centre] * n
        for model, row in zip(self.models, rows, strict=True):
            for p, value in zip(model.parameters(), row, strict=True):
                p.copy_(value)

    def weights(self, replica):
        return {
            f"weights/{name}": p.detach() for name, p in self.models[replica].named_parameters()
        }


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_replicas_are_those_of_the_papers(way, tmp_path):
    run = averaging(way)
    found = train(run, tmp_path, (1,) * 5).weights
    oracle = Oracle(run.job, 2, 5)
    for replica in range(2):
        assert_close(own_of(found, replica), oracle.weights(replica))


@pytest.mark.parametrize(
    ("way", "replicas", "stages", "options"),
    [
        ("gossip", 3, 1, {}),
        ("gossip", 4, 1, {"clip_norm": 0.05}),
        ("local:2", 2, 2, {"clip_norm": 0.05}),
        ("diloco:2", 2, 2, {"schedule": "chimera", "num_ranks": 2}),
        ("easgd:2", 2, 2, {"schedule": "chimera", "num_ranks": 2}),
        ("easgd:2", 3, 2, {"model": tied, "schedule": "zb_h1"}),
    ],
)
def test_pipelines_and_more_replicas_are_too(way, replicas, stages, options, tmp_path):
    run = averaging(way, replicas, stages, **options)
    found = train(run, tmp_path, (1,) * 5).weights
    oracle = Oracle(run.job, replicas, 5)
    for replica in range(replicas):
        assert_close(own_of(found, replica), oracle.weights(replica))


@pytest.mark.parametrize("way", ["local:2", "diloco:2", "easgd:2", "gossip"])
def test_a_checkpoint_has_the_weights_that_all_stand_for(way, tmp_path):
    run = averaging(way)
    found = train(run, tmp_path, (1,) * 5).weights
    oracle = Oracle(run.job, 2, 5)
    rows = [oracle.weights(replica) for replica in range(2)]
    expected = {name: (value + rows[1][name]) / 2 for name, value in rows[0].items()}
    if way == "easgd:2":
        expected = dict(zip(expected, (p.detach() for p in oracle.centre), strict=True))
    assert_close(found, expected)
    newest = checkpoint.latest(tmp_path)
    unread = checkpoint.unread(newest).tensors
    assert all(torch.equal(unread[name], found[name]) for name in expected)


@pytest.mark.parametrize("way", ["local:2", "diloco:2", "easgd:2", "gossip"])
def test_a_resumed_run_goes_on_as_the_first_one_did(way, tmp_path):
    run = averaging(way)
    run = run._replace(job=replace(run.job, optimizer=adamw))
    whole = train(run, tmp_path / "whole", (1,) * 6)
    train(run, tmp_path / "first", (1,) * 3)
    newest = checkpoint.latest(tmp_path / "first")
    found = train(run, tmp_path / "then", windows=windows_from(run, 3), resume=newest)
    assert differing(found.weights, whole.weights) == []


def test_other_replicas_go_on_from_the_mean(tmp_path):
    train(averaging("local:4"), tmp_path / "two", (1,) * 3)
    newest = checkpoint.latest(tmp_path / "two")
    mean = checkpoint.load(newest).tensors
    run = averaging("local:8", replicas=3)
    frozen = run._replace(job=replace(run.job, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0)))
    found = train(frozen, tmp_path / "three", windows=windows_from(run, 3)[:1], resume=newest)
    rows = [own_of(found.weights, replica) for replica in range(3)]
    names = [name for name in mean if name.startswith("weights/")]
    assert names
    assert all(torch.equal(row[name], mean[name]) for row in rows for name in names)


def test_processes_average_as_threads_do(tmp_path):
    run = averaging("easgd:2")
    threads = train(run, tmp_path / "threads", (1,) * 4)
    processes = train(run, tmp_path / "processes", (1,) * 4, run_processes)
    assert differing(processes.weights, threads.weights) == []


@pytest.mark.parametrize("way", ["local:4", "diloco:4", "easgd:4", "gossip:2"])
def test_it_converges_on_a_convex_problem(way, tmp_path):
    """Least squares whose replicas see other samples: to the best solution of all of them."""
    inputs = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    goals = (inputs @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))[..., None]

    def samples(start):
        while True:
            yield {"x": inputs[start % 8], "y": goals[start % 8]}
            start += 1

    def made():
        return nn.Linear(3, 1).double()

    def squares(model, batch):
        return (model(batch["x"]) - batch["y"]).square().mean()

    job = averaging(way).job
    job = replace(
        job,
        model=made,
        data=samples,
        loss=squares,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    captured = capture(job)
    found = train(Run(plan_of(job, captured), job, captured), tmp_path, (1,) * 160).weights
    expected = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(found["weights/weight"], expected, rtol=0, atol=1e-3)


PROVED = [
    ("local:3", 2, 1, {}),
    ("diloco:2", 2, 2, {"clip_norm": 0.05}),
    ("easgd:2", 3, 1, {}),
    ("gossip:2", 3, 1, {}),
    ("diloco:2", 2, 2, {"schedule": "chimera", "num_ranks": 2}),
]


@pytest.mark.parametrize(("way", "replicas", "stages", "options"), PROVED)
def test_the_proof_compares_each_replica_and_the_average(way, replicas, stages, options):
    run = averaging(way, replicas, stages, model=Net, **options)
    job = replace(run.job, optimizer=adamw)
    proof = prove(Planned(job, run.captured, run.plan), steps_to_prove(0, 20, averages=way))
    assert proof.problem == ""
    assert f"of each replica, with weights averaged as {way} says" in str(proof)
