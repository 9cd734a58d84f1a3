"""Steps of several losses by turns, over the same weights, as a loop of two optimizers has them."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.batches.one_key import job_of_key, keys_of
from penstock.checkpoints import checkpoint
from penstock.errors import JobError, UnlikeShapesError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.trace import build_model
from penstock.plan import plan_by_hand
from penstock.runtime.validate import validated
from tests.runtime.test_key_steps import ran, task_of

STEPS = 10
CYCLE = ("judge", "judge", "maker")


class Gan(nn.Module):
    """Makes points, and judges them."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
        self.point = nn.Linear(16, 2)
        self.judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Dropout(0.2))
        self.score = nn.Linear(16, 1)

    def made(self, noise):
        return self.point(self.maker(noise))

    def judged(self, points):
        return self.score(self.judge(points))


def says(score, is_real):
    wanted = torch.ones_like(score) if is_real else torch.zeros_like(score)
    return nn.functional.binary_cross_entropy_with_logits(score, wanted)


def judges(model, batch):
    made = model.made(batch["noise"]).detach()
    real = says(model.judged(batch["real"]), True)
    return real + says(model.judged(made), False), {"real": real}


def makes(model, batch):
    return says(model.judged(model.made(batch["noise"])), True)


def batch_of(number):
    drawn = torch.Generator().manual_seed(number)
    noise = torch.randn(8, 4, generator=drawn)
    return {"noise": noise, "real": torch.randn(8, 2, generator=drawn) + 3}


def data(start):
    number = start
    while True:
        yield batch_of(number)
        number += 1


def turns(*, again=False):
    return ps.in_turn(
        {
            "judge": ps.Turn(judges, ["judge.*", "score.*"], steps=2),
            "maker": ps.Turn(makes, ("maker.*", "point.*"), again=again),
        }
    )


OPTIMIZERS = {
    "judge": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "maker": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
}


def job_of(loss=None, **more) -> ps.Job:
    named = {"judge.*": "judge", "score.*": "judge", "*": "maker"}
    optimizer = ps.by_name({pattern: OPTIMIZERS[name] for pattern, name in named.items()})
    return ps.Job(Gan, loss or turns(), data, optimizer, micro_batches=4, **more)


def plain(job, data_step=lambda step: step, steps=STEPS):
    """Return losses and state of a loop with two optimizers, each of its own part of the model."""
    model, losses = build_model(job), []
    parts = {
        "judge": [*model.judge.parameters(), *model.score.parameters()],
        "maker": [*model.maker.parameters(), *model.point.parameters()],
    }
    optimizers = {name: OPTIMIZERS[name](own) for name, own in parts.items()}
    for step in range(steps):
        name, total = CYCLE[step % 3], 0.0
        for parameter in model.parameters():
            parameter.grad = None
        for k in range(4):
            batch = batch_of(4 * data_step(step) + k)
            with SeededRandom(micro_batch_seed(job.seed, 4 * step + k)):
                loss = judges(model, batch)[0] if name == "judge" else makes(model, batch)
            (loss / 4).backward()
            total += loss.item() / 4
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parts[name], job.clip_norm)
        optimizers[name].step()
        losses.append(total)
    state = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    return losses, state | {f"buffers/{name}": value for name, value in model.named_buffers()}


def way_of(cuts, schedule, **more):
    return lambda graph: plan_by_hand(
        graph, [c % len(graph.cut_points) for c in cuts], schedule, **more
    )


WAYS = {
    "one rank": way_of([], "gpipe", num_micro_batches=4),
    "replicas": way_of([], "gpipe", num_micro_batches=2, replicas=2),
    "stages": way_of([0], "one_f_one_b", num_micro_batches=4),
    "stages and replicas": way_of([0], "zb_h1", num_micro_batches=2, replicas=2),
    "sharded, repeated": way_of(
        [], "gpipe", num_micro_batches=2, replicas=2, shard=["shard"], recompute=[True]
    ),
    "far": way_of([], "gpipe", num_micro_batches=4, offload=["all"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(2)
def test_a_run_by_turns_is_the_loop_of_two_optimizers(way, tmp_path):
    job = job_of()
    losses, state = ran(task_of(job, WAYS[way], tmp_path, range(STEPS)))
    expected, known = plain(job)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in known.items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6)
    assert float(state["optimizer/point.weight/step"]) == 3  # of its own turns


@pytest.mark.parametrize("way", ["one rank", "stages and replicas"])
def test_each_turn_is_clipped_by_the_norm_of_its_own_gradients(way, tmp_path):
    job = job_of(clip_norm=0.05)
    clipped = WAYS[way]
    plans = lambda graph: clipped(graph).changed(clip=True)  # noqa: E731
    _, state = ran(task_of(job, plans, tmp_path, range(STEPS)))
    for name, value in plain(job)[1].items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("way", ["replicas", "stages"])
def test_an_average_takes_all_weights_after_every_step_of_any_turn(way, tmp_path):
    """In the judge's steps the stage of the generator has no gradient at all."""
    _, state = ran(task_of(job_of(average=ps.ema(0.5)), WAYS[way], tmp_path, range(STEPS)))
    job, average = job_of(), {}
    for steps in range(1, STEPS + 1):
        now = {
            name: value for name, value in plain(job, steps=steps)[1].items() if "weights/" in name
        }
        average = {name: (average.get(name, value) + value) / 2 for name, value in now.items()}
    for name, value in average.items():
        found = state[f"optimizer/{name.removeprefix('weights/')}/average"]
        torch.testing.assert_close(found, value, rtol=2e-5, atol=2e-6)


def test_what_is_read_again_is_what_the_step_before_has_read(tmp_path):
    job = job_of(turns(again=True))
    losses, _ = ran(task_of(job, WAYS["replicas"], tmp_path, range(STEPS)))
    expected, _ = plain(job, lambda step: step // 3 * 2 + min(step % 3, 1))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_goes_on_in_the_midst_of_a_turn(tmp_path):
    job = job_of()
    ran(task_of(job, WAYS["replicas"], tmp_path, range(4)))
    resume = checkpoint.latest(tmp_path / "checkpoints") or checkpoint.latest(tmp_path)
    _, state = ran(task_of(job, WAYS["stages"], tmp_path, range(4, STEPS), resume))
    for name, value in plain(job)[1].items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6)


def test_gradients_of_other_turns_are_nothing_to_a_step_that_is_looked_at(tmp_path):
    """The judge's overflow in every step but the first, and leave no step of the maker out."""

    def overflows(model, batch):
        loss = judges(model, batch)[0]
        return loss * torch.where(batch["real"].sum() > 0, 1e30, 1.0)

    loss = turns()
    rows = {**loss.by_name, "judge": replace(loss.by_name["judge"], loss=overflows)}
    job = job_of(ps.in_turn(rows), precision="float16")
    plans = lambda graph: WAYS["replicas"](graph).changed(clip=True)  # noqa: E731
    _, state = ran(task_of(job, plans, tmp_path, range(6)))
    assert float(state["optimizer/point.weight/step"]) == 2
    assert "optimizer/score.weight/momentum_buffer" not in state


def test_a_job_of_one_turn_reads_and_trains_what_that_turn_does():
    job = job_of(turns(again=True))
    assert keys_of(job) == {"judge": 2, "maker": 1}
    for name, steps in (("judge", [0, 1, 2, 3]), ("maker", [1, 3, 5, 7])):
        own = job_of_key(job, name)
        numbers = [4 * step + k for step in steps for k in range(4)]
        read = [each.batch["noise"] for each in islice(own.data(0), 16)]
        torch.testing.assert_close(read, [batch_of(number)["noise"] for number in numbers])
        reached = {n for n, g in ps.trace(own).capture.graph.gradients.items() if g is not None}
        assert {n.partition(".")[0] for n in reached} == (
            {"judge", "score"} if name == "judge" else {"maker", "point"}
        )


@pytest.mark.parametrize(("validates", "loss"), [("judge", judges), (None, makes)])
def test_a_validation_is_the_mean_of_the_loss_of_one_turn(validates, loss):
    batches = [batch_of(900), batch_of(901)]
    chosen = ps.in_turn(turns().by_name, validates)
    job = job_of(chosen, validation=lambda: batches, metrics=lambda model, batch: {"one": 1.0})
    model = build_model(job).eval()
    found = validated(job, model)
    with torch.no_grad():
        told = [loss(model, batch) for batch in batches]
    values = [each[0] if isinstance(each, tuple) else each for each in told]
    assert found["val_loss"] == pytest.approx(float(sum(values)) / 2)
    assert found["val_one"] == 1.0
    assert found[f"val_{validates or 'maker'}_loss"] == found["val_loss"]


def lengths():
    return ps.bucketed([torch.ones(3)] * 8, (4,), 2, micro_batches=4)


def test_turns_whose_stages_would_hold_other_weights_are_refused(tmp_path):
    """The judge of what is real comes first here, before the place to cut."""

    def real_first(model, batch):
        real = says(model.judged(batch["real"]), True)
        return real + says(model.judged(model.made(batch["noise"]).detach()), False)

    rows = turns().by_name
    job = job_of(ps.in_turn({**rows, "judge": replace(rows["judge"], loss=real_first)}))
    with pytest.raises(UnlikeShapesError, match="other weights in a stage"):
        task_of(job, way_of([-1], "gpipe", num_micro_batches=4), tmp_path, range(2))


def one(**more):
    return ps.Turn(**{"loss": makes, "weights": "*", **more})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: one(loss=None), "no function"),
        (lambda: one(weights=[]), "weights of a turn"),
        (lambda: one(weights=3), "weights of a turn"),
        (lambda: one(steps=0), "0 steps"),
        (lambda: ps.in_turn({"only": one()}), "not turns by name"),
        (lambda: ps.in_turn({"a": one(), "b": makes}), "not turns by name"),
        (lambda: ps.in_turn({"a": one(), 2: one()}), "named 2"),
        (lambda: ps.in_turn({"a": one(again=True), "b": one()}), "reads again"),
        (lambda: ps.in_turn({"a": one(), "b": one()}, "c"), "'c'"),
        (lambda: job_of(weight=lambda batch: 1.0), "Job.weight"),
        (lambda: job_of(carry={"h": torch.zeros(1)}), "turns"),
        (lambda: replace(job_of(), loss=turns(), data=lengths()), "in_turn"),
    ],
)
def test_what_is_no_turn_is_refused(make, words):
    with pytest.raises(JobError) as told:
        make()
    assert words in str(told.value)
    assert told.value.hint


def test_a_turn_that_trains_nothing_is_refused_with_the_names_that_there_are():
    job = job_of(ps.in_turn({"judge": one(), "maker": one(weights="nobody.*")}))
    with pytest.raises(JobError, match="no parameter") as told:
        job.loss(build_model(job), next(islice(job.data(0), 4, None)))
    assert "maker.0.weight" in told.value.hint


class Shared(nn.Module):
    """Reads one weight at its beginning and at its end, and another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Embedding(8, 16)
        self.middle = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        )

    def forward(self, x):
        return self.middle(self.ends(x)) @ self.ends.weight.T


@pytest.mark.parametrize("way", ["stages", "stages and replicas"])
def test_a_weight_that_two_stages_share_is_trained_in_its_own_turn(way, tmp_path):
    def loss(model, batch):
        return model((batch["noise"][:, 0] > 0).long()).square().mean()

    both = {
        "middle": ps.Turn(loss, "middle.*", steps=2),
        "ends": ps.Turn(loss, "ends.*"),
    }
    adamw = lambda weights: torch.optim.AdamW(weights, lr=0.01)  # noqa: E731
    job = ps.Job(Shared, ps.in_turn(both), data, adamw, micro_batches=4)
    _, state = ran(task_of(job, WAYS[way], tmp_path, range(6)))
    model = build_model(job)
    optimizer = adamw(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        for k in range(4):
            (loss(model, batch_of(4 * step + k)) / 4).backward()
        for value in (model.middle if step % 3 == 2 else model.ends).parameters():
            value.grad = None
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(state[f"weights/{name}"], value, rtol=1e-5, atol=1e-6)
        assert float(state[f"optimizer/{name}/step"]) == (2 if "ends" in name else 4)
