"""A micro-batch that comes late and does not fit a traced step: the run goes on without a plan."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.errors import AloneError, BatchMisfitError, RankMisfitError
from penstock.examine.examine import Examined
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.pilot.phases import TrainedPhase, UntilFile
from penstock.training.begin import Begin
from penstock.training.misfits import go_on_alone, go_on_unplanned
from tests.runtime.as_torchrun import as_torchrun

LATE = 41  # number of the first one that is unlike; four are a step, and two steps are proved


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1)


def shorter(k: int, x: Tensor):
    return {"x": x[:2] if k >= LATE else x}


def with_a_number(k: int, x: Tensor):
    return {"x": x, "scale": 1 + k // LATE}


def greater(k: int, x: Tensor):
    return {"x": x * 100 if k == LATE else x}


def job_of(make: Callable[[int, Tensor], dict]) -> Job:
    def data(start):
        for k in count(start):
            yield make(k, torch.randn(4, 4, generator=torch.Generator().manual_seed(k)))

    def loss(model, batch):
        found = model(batch["x"]).square().mean() * batch.get("scale", 1)
        return found * 1e-4 if batch["x"].abs().max() > 50 else found

    return Job(lambda: nn.Linear(4, 4), loss, data, sgd, micro_batches=4)


def plain_weights(job: Job, steps: int) -> dict[str, Tensor]:
    torch.manual_seed(job.seed)
    model, data = job.model(), job.data(0)
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        for _ in range(job.micro_batches):
            (job.loss(model, next(data)) / job.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"weights/{name}": value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("make", [shorter, with_a_number, greater])
def test_batch_that_does_not_fit_the_step_is_a_misfit(make):
    job = job_of(make)
    captured = capture(job)
    captured.leaves(next(job.data(LATE - 1)))
    with pytest.raises(BatchMisfitError, match="this batch"):
        captured.leaves(next(job.data(LATE)))


def test_a_run_goes_on_without_a_plan_from_its_newest_checkpoint(tmp_path):
    job = job_of(greater)
    asked = {"ranks": 2, "num_steps": 12, "checkpoint_every": 4, "trial": False, "audit": "0"}
    trained = ps.train(job, out=tmp_path / "run", **asked)
    assert trained is not None
    assert trained.plan is None
    for name, value in plain_weights(job, 12).items():
        assert torch.allclose(trained.outcome.weights[name], value, atol=1e-6)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 13))


def test_ranks_that_come_and_go_stay_together_from_there_on(tmp_path):
    asked = {"ranks": 2, "num_steps": 12, "checkpoint_every": 4, "elastic": True, "audit": "0"}
    trained = ps.train(job_of(greater), out=tmp_path / "run", **asked)
    assert trained.plan is None
    for name, value in plain_weights(job_of(greater), 12).items():
        assert torch.allclose(trained.outcome.weights[name], value, atol=1e-6)
    assert not (tmp_path / "run" / "elastic.json").exists()


def test_ranks_of_torchrun_go_on_as_replicas(tmp_path):
    """Whichever of them reads it, all go back to the newest checkpoint."""
    asked = {"num_steps": 12, "checkpoint_every": 4, "audit": "0"}

    def train() -> None:
        ps.train(job_of(greater), out=tmp_path / "run", **asked)

    ran = as_torchrun(train, tmp_path, ranks=2)
    assert [code for code, _, _ in ran] == [0, 0], ran
    tensors = checkpoint.load(checkpoint.latest(tmp_path / "run" / "checkpoints")).tensors
    for name, value in plain_weights(job_of(greater), 12).items():
        assert torch.allclose(tensors[name], value, atol=1e-6)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 13))


def session(**options):
    care = SimpleNamespace(check=options.pop("check", True))
    strict = options.pop("strict", False)
    fixed = {"is_strict": lambda: strict, "elastic": False, "care": care, "goal": None}
    fixed |= {"asked": SimpleNamespace(policy=options.pop("policy", None)), **options}
    about = SimpleNamespace(author=job_of(greater), job=job_of(greater), key="", **fixed)
    about.was_audited = lambda audited: setattr(about, "audited", audited)
    return about


@pytest.mark.parametrize(
    ("asked", "hint"),
    [({"strict": True}, "what asks for a plan"), ({"policy": "p.toml"}, "policy"), ({}, "")],
)
def test_a_plan_that_is_required_ends_the_run_at_a_misfit_and_says_how_it_goes_on(asked, hint):
    problem = RankMisfitError("rank 0 failed: this batch holds something else")
    with pytest.raises(RankMisfitError, match="something else") as caught:
        go_on_unplanned(session(check=bool(asked), **asked), SimpleNamespace(), problem, Begin())
    assert hint in caught.value.hint
    assert not asked or "resume=True goes on without a plan" in caught.value.hint


@pytest.mark.parametrize(("batches", "is_kept"), [((4, 4), True), ((4, 8), False)])
def test_a_run_to_a_goal_goes_on_from_steps_of_its_own_batch_alone(tmp_path, batches, is_kept):
    phases = [TrainedPhase(4 * k, 16 * k, 4.0 * k, 2, count) for k, count in enumerate(batches)]
    told = UntilFile(0.0, "time", "training", 4, 4, 2.0, 0.5)
    for phase in phases:
        told = told.begun(phase)
    told.save(tmp_path)
    went, said = [], []
    about = session(listener=SimpleNamespace(say=said.append), folder=tmp_path, goal=object())
    about.audited = SimpleNamespace(cpu_s=0.0, back=())
    about.train_eagerly = lambda *given: went.append(given)
    made = tmp_path / "checkpoints"
    checkpoint.write_part(made, 6, 0, ({"weights/x": torch.ones(1)}, {}))
    checkpoint.finish(made, 6)
    problem = RankMisfitError("rank 0 failed: this batch holds something else")
    go_on_unplanned(about, Examined(), problem, Begin())
    (((step, place), found),) = went
    assert (step, place is not None) == ((6, True) if is_kept else (0, False))
    assert "does not fit" in found.no_plan
    assert not (tmp_path / "phases.json").exists()


def test_a_resumed_run_that_keeps_more_than_its_checkpoint_ends_at_a_misfit(tmp_path):
    problem = RankMisfitError("rank 0 failed: this batch holds something else")
    found = SimpleNamespace(forgets=("a counter",), beside=())
    with pytest.raises(RankMisfitError):
        go_on_unplanned(session(), found, problem, Begin(4, tmp_path))


class Followed(nn.Module):
    """A teacher whose statistics only a hook moves, from those of the student."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.teacher = nn.BatchNorm1d(4, affine=False).eval()

    def forward(self, x):
        return self.head(self.norm(x)) - self.teacher(x)


def followed() -> Job:
    built = []

    def model():
        built[:] = [Followed()]
        return built[0]

    def optimizer(weights):
        made = sgd(weights)

        def follow(*_):
            built[0].teacher.running_mean.lerp_(built[0].norm.running_mean, 0.1)

        made.register_step_post_hook(follow)
        return made

    made = job_of(greater)
    return replace(made, model=model, optimizer=optimizer)


class Startled(nn.Module):
    """It notes what is unusually large, which only one of two replicas has seen."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.register_buffer("most", torch.ones(()))

    def forward(self, x):
        if x.abs().max() > 20:
            self.most.copy_(x.abs().max())
        return self.head(x)


ASKED = {"ranks": 2, "num_steps": 3, "trial": False, "audit": "0"}


def test_replicas_that_cannot_share_a_step_are_one_process(tmp_path):
    own = replace(job_of(lambda k, x: {"x": x * 100 if k == 9 else x}), model=Startled)
    trained = ps.train(own, out=tmp_path / "run", **ASKED)
    checked = str(trained.summary["checked"])
    assert "one process, the plain loop itself: 2 replicas would train something else" in checked
    assert "writes most in some steps only" in checked


def test_a_step_of_one_micro_batch_says_why_it_is_one_process_and_what_makes_a_plan(tmp_path):
    own = replace(job_of(lambda k, x: {"x": x[: 3 + k % 2]}), micro_batches=1)
    said, heard = list[str](), ps.Listener()
    heard.say = said.append
    trained = ps.train(own, out=tmp_path / "run", listener=heard, **ASKED)
    why = "one process, the plain loop itself: a step is one micro-batch"
    assert str(trained.summary["checked"]).startswith(why)
    assert any(line.startswith(why) for line in said)
    assert "training it eagerly instead" in said
    assert any("hint: let `data`" in line and "ps.bucketed" in line for line in said)


def test_replicas_show_a_hook_the_statistics_of_all(tmp_path):
    trained = ps.train(followed(), out=tmp_path / "run", **ASKED)
    assert "equal to the plain loop" in str(trained.summary["checked"])
    assert "copies equal" in str(trained.summary["checked"])


def test_replicas_that_find_so_late_go_on_in_one_process(tmp_path):
    said, asked = [], []
    alone = SimpleNamespace(
        **vars(session(listener=SimpleNamespace(say=said.append), folder=tmp_path)),
        audited=SimpleNamespace(cpu_s=0.0, back=()),
        train_eagerly=lambda *given: asked.append(given),
    )
    go_on_alone(alone, Examined(), AloneError("forward writes x in some steps only"), Begin())
    (((step, place), found),) = asked
    assert (step, place) == (0, None)
    assert found.one_process == "forward writes x in some steps only"
    assert "going back to the first step" in said
