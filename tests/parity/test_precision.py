"""16 bits with float32 masters: every step is that of a plain loop, to the bit."""

import copy
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from penstock.checkpoints import checkpoint
from penstock.cluster import DeviceKind
from penstock.errors import PlanError
from penstock.plan import is_asynchronous
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile.estimate import estimated
from penstock.prove.prove import Planned, prove, prove_eager
from penstock.runtime.launch import run_processes, run_threads
from penstock.simulate.price import held_of
from penstock.state.loss_scale import LossScale
from penstock.training import results
from penstock.units import GiB
from tests.parity.optimizing import STEPS, WIDTH, Net, data, job_of, run_of, windows_from
from tests.parity.training import differing, train

NORMS = (nn.LayerNorm, nn.BatchNorm1d)


def plain_loop(job, steps=STEPS, dtype=None):
    """Train as a script does that keeps weights in float32 and computes with copies of 16 bits."""
    dtype = dtype or getattr(torch, job.precision)
    torch.manual_seed(job.seed)
    masters = job.model()
    model = copy.deepcopy(masters)
    for module in model.modules():
        if not isinstance(module, NORMS):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    optimizer = job.optimizer(masters.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    batches, scales = job.data(0), []
    for _ in range(steps):
        with torch.no_grad():
            for copied, master in zip(model.parameters(), masters.parameters(), strict=True):
                copied.copy_(master)
        optimizer.zero_grad()
        for _ in range(job.micro_batches):
            with torch.autocast("cpu", dtype):
                loss = job.loss(model, next(batches))
            scaler.scale(loss / job.micro_batches).backward()
            for copied, master in zip(model.parameters(), masters.parameters(), strict=True):
                if copied.grad is not None:
                    part = copied.grad.float()
                    master.grad = part if master.grad is None else master.grad + part
                    copied.grad = None
        scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        if job.clip_norm is not None:
            clip_grad_norm_(masters.parameters(), job.clip_norm)
        scaler.step(optimizer)
        scaler.update()
    weights = {f"weights/{name}": value.detach() for name, value in masters.named_parameters()}
    return weights, [*scales, scaler.get_scale()]


def half_net():
    return Net()


def adamw(weights):
    return torch.optim.AdamW(weights, lr=3e-3)


def autocast_loop(job):
    """Train as a script does under autocast, which casts each weight in each micro-batch."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, batches = job.optimizer(model.parameters()), job.data(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(job.micro_batches):
            with torch.autocast("cpu", getattr(torch, job.autocast)):
                loss = job.loss(model, next(batches))
            (loss / job.micro_batches).backward()
        if job.clip_norm is not None:
            clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
    return {f"weights/{name}": value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize(("stages", "clip"), [(1, None), (3, 0.05)])
def test_weights_that_are_cast_once_an_update_are_those_of_autocast(stages, clip, tmp_path):
    job = job_of(adamw, half_net, autocast="bfloat16", clip_norm=clip)
    planned = run_of(job, stages)
    found = train(planned, tmp_path, (1,) * STEPS).weights
    assert differing(found, autocast_loop(job)) == []


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_weights_are_those_of_the_plain_loop(stages, clip, tmp_path):
    job = job_of(adamw, half_net, precision="bfloat16", clip_norm=clip)
    found = train(run_of(job, stages), tmp_path, (1,) * STEPS).weights
    assert differing(found, plain_loop(job)[0]) == []
    assert found["weights/first.weight"].dtype == torch.float32


def spiky(start):
    """Yield micro-batches of which some overflow in float16, at any scale above a number."""
    for number in itertools.count(start):
        yield next(data(number)) * (30.0 if number % 7 == 0 else 1.0)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_steps_that_overflow_are_left_out(stages, clip, tmp_path):
    job = job_of(adamw, half_net, precision="float16", clip_norm=clip)
    job = replace(job, data=spiky)
    done = train(run_of(job, stages), tmp_path, (1,) * STEPS)
    weights, (*scales, last) = plain_loop(job)
    assert differing(done.weights, weights) == []
    assert [step.figures["loss_scale"] for step in done.steps] == scales
    assert len(set(scales)) > 1
    left_out = [later < now for now, later in itertools.pairwise([*scales, last])]
    assert [step.figures["left_out"] for step in done.steps] == left_out
    told = {"loss_scale": scales[-1], "left_out_steps": sum(left_out)}
    assert results.train_figures(done) == told


class Recurrent(nn.Module):
    """An LSTM over the rows of a micro-batch; `casts`: its input, as on a GPU autocast does."""

    def __init__(self, casts=None):
        super().__init__()
        self.casts = casts
        self.first = nn.LSTM(WIDTH, 2 * WIDTH, num_layers=2)
        self.last = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.first(x if self.casts is None else x.to(self.casts))[0])


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_an_lstm_is_that_of_the_plain_loop(precision, stages, tmp_path):
    """The plain loop casts the LSTM's input: torch has no kernel where autocast does so."""
    job = job_of(adamw, Recurrent, precision=precision, clip_norm=0.05)
    job = replace(job, data=spiky)
    found = train(run_of(job, stages), tmp_path, (1,) * STEPS).weights
    by_hand = replace(job, model=partial(Recurrent, getattr(torch, precision)))
    assert differing(found, plain_loop(by_hand)[0]) == []


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("schedule", "stages", "options"),
    [
        ("one_f_one_b", 2, {"replicas": 2, "clip": True}),
        ("zb_h1", 3, {}),
        ("interleaved", 4, {"num_ranks": 2}),
    ],
)
def test_the_proof_holds_for_schedules_replicas_and_clipping(precision, schedule, stages, options):
    job = job_of(adamw, half_net, precision=precision)
    job = replace(job, clip_norm=0.05 if options.get("clip") else None)
    run = run_of(job, stages, schedule, **{**options, "clip": job.awaits_all})
    proof = prove(Planned(run.job, run.captured, run.plan), (0, 3))
    assert proof.problem == ""
    assert {d.what for d in proof.differences if d.bitwise} >= {"data", "update", "optimizer"}


def test_eager_replicas_are_the_plain_loop_too():
    for precision in ("bfloat16", "float16"):
        job = replace(job_of(adamw, half_net, precision=precision), data=spiky)
        proof = prove_eager(job, 2, (0, 3))
        assert proof.problem == ""
        assert bool(proof.left_out) == (precision == "float16")


@pytest.mark.parametrize("schedule", ["pipedream", "double_buffered", "spec_train", "pipemare"])
def test_late_weights_are_read_in_16_bits(schedule):
    job = job_of(adamw, half_net, precision="bfloat16")
    run = run_of(job, 2, schedule)
    proof = prove(Planned(run.job, run.captured, run.plan))
    assert proof.problem == ""


@pytest.mark.parametrize("options", [{"schedule": "pipedream"}, {"post_validation": True}])
def test_a_step_that_may_be_left_out_updates_last(options):
    job = job_of(adamw, half_net, precision="float16", clip_norm=0.1)
    options = {"schedule": "zb_h2", **options}
    run = run_of(job, 2, **options)
    with pytest.raises(PlanError, match="before it is known whether the step overflows"):
        prove(Planned(run.job, run.captured, run.plan))


def test_a_resumed_run_goes_on_with_masters_and_scale(tmp_path):
    job = replace(job_of(adamw, half_net, precision="float16"), data=spiky)
    run = run_of(job, 2)
    train(run, tmp_path / "first", (1,) * 5)
    newest = checkpoint.latest(tmp_path / "first")
    found = train(run, tmp_path / "then", windows=windows_from(run, 5), resume=newest)
    assert differing(found.weights, plain_loop(job)[0]) == []
    kept = checkpoint.load(checkpoint.latest(tmp_path / "then"))
    assert kept.plain["loss_scale"] == [2.0**14, 2]


def test_the_scale_is_that_of_torch():
    weight = nn.Parameter(torch.zeros(1))
    theirs, own = torch.amp.GradScaler("cpu"), LossScale()
    theirs.scale(weight.sum())  # it begins with the first loss
    followed = own.gradient(4, torch.float32, torch.device("cpu"))
    for step in range(4500):
        weight.grad = torch.tensor([float("nan") if step in (3, 4, 2500) else 1.0])
        optimizer = torch.optim.SGD([weight], lr=0.1)
        theirs.step(optimizer)
        theirs.update()
        overflowed = not own.unscale([weight.grad.clone()])
        own.end(step, overflowed=overflowed)
        assert own.scale == theirs.get_scale()
        assert own.leaves_out(step) == overflowed
    assert own.scale == 2.0**14 == 4 * float(followed)


CPU = DeviceKind("cpu", GiB, (("float32", 1e9), ("bfloat16", 1e9)), 1e9)


def chain():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def test_half_the_bytes_are_sent_and_masters_are_counted():
    wide, half = (run_of(job_of(adamw, chain, precision=p), 2) for p in (None, "bfloat16"))
    sizes, held = [], []
    for run in (wide, half):
        graph = run.captured.graph
        stages = stages_of(run.plan, graph)
        sizes.append([edge.size_bytes for edge in lower_plan(run.plan, graph).edges])
        held.append(sum(held_of(graph, stages, estimated(graph, CPU, 2.0)).start))
    assert [2 * size for size in sizes[1]] == sizes[0]
    weights = 4 * (WIDTH + 1) * WIDTH
    assert held == [16 * weights, 18 * weights]  # weights, gradients, two moments; copies


def summed_loop(job, owners, dtype):
    """Train as a script does that sums what so many ranks computed; each sends 16 bits."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, batches = job.optimizer(model.parameters()), job.data(0)
    for _ in range(STEPS):
        parts = [{} for _ in set(owners)]
        for rank in owners:
            model.zero_grad()
            (job.loss(model, next(batches)) / len(owners)).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    before = parts[rank].get(name)
                    own = parameter.grad
                    parts[rank][name] = own if before is None else before + own
        for name, parameter in model.named_parameters():
            if name in parts[0]:
                total = sum(part[name].to(dtype).float() for part in parts[1:])
                total = parts[0][name].to(dtype).float() + total
                parameter.grad = total.to(dtype).float()
        optimizer.step()
    return {f"weights/{name}": value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
@pytest.mark.parametrize(("sums", "replicas"), [("bfloat16", 2), ("float16", 2)])
def test_gradients_travel_in_16_bits_and_are_summed_in_32(sums, replicas, launcher, tmp_path):
    job = job_of(adamw, half_net, sums=sums)
    run = run_of(job, 2, replicas=replicas)
    run = run._replace(plan=run.plan.changed(sums=sums))
    found = train(run, tmp_path, (1,) * STEPS, launcher).weights
    expected = summed_loop(job, list(range(replicas)), getattr(torch, sums))
    assert differing(found, expected) == []


@pytest.mark.parametrize(
    ("schedule", "stages", "options"),
    [
        ("one_f_one_b", 2, {"replicas": 2, "precision": "bfloat16"}),
        ("zb_h1", 2, {"replicas": 2, "precision": "float16"}),
        ("chimera", 2, {"num_ranks": 2}),
        ("pipedream", 2, {"replicas": 2}),
        (
            "one_f_one_b",
            2,
            {"replicas": 2, "shard": ("shard", "replicate"), "precision": "bfloat16"},
        ),
        ("one_f_one_b", 2, {"replicas": 2, "wire_bits": 8, "precision": "bfloat16"}),
    ],
)
def test_the_proof_rounds_what_ranks_sum(schedule, stages, options):
    given = {k: options[k] for k in ("precision", "wire_bits") if k in options}
    job = job_of(adamw, half_net, sums="bfloat16", **given)
    rest = {k: v for k, v in options.items() if k not in (*given, "shard")}
    run = run_of(job, stages, schedule, **rest)
    own = {"sums": "bfloat16", "wire": job.fewest_bits, "shard": options.get("shard", ())}
    planned = Planned(run.job, run.captured, run.plan.changed(**own))
    proof = prove(planned, (0,) if is_asynchronous(planned.plan) else tuple(range(4)))
    assert proof.problem == ""
    assert len(proof.left_out) < len(proof.steps) or is_asynchronous(planned.plan)
    assert all(d.bitwise for d in proof.differences if d.what != "rounding")
    assert "rounds what ranks sum to bfloat16" in str(proof)
    with pytest.raises(PlanError, match="gradients"):
        prove(Planned(replace(job, sums=None), run.captured, planned.plan))


def test_eager_replicas_sum_in_16_bits():
    proof = prove_eager(job_of(adamw, half_net, sums="float16"), 2, (0, 3))
    assert proof.problem == ""
    assert all(d.bitwise for d in proof.differences)
