"""What a hook of the optimizer moves in the model is in the run, and after a resume it goes on."""

import copy
from collections.abc import Callable
from dataclasses import replace as replaced
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.errors import PenstockError
from penstock.examine.examine import examine
from penstock.job import Job
from penstock.prove.plain import Plain
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes, run_threads
from penstock.state.laws.buffers import buffer_laws
from tests.parity.optimizing import MICRO_BATCHES, STEPS, WIDTH, data, run_of, windows_from
from tests.parity.training import train

DONE = 3


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Pair(nn.Module):
    """A student; a teacher, a centre and an average that follow it, the last read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = body(), body().requires_grad_(False)
        self.average = body().requires_grad_(False)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x)
        taught = y - self.teacher(x) - self.centre
        return (y - x.flip(1)).square().mean() + taught.square().mean()


@torch.no_grad()
def follow(model: Pair) -> None:
    model.updates += 1
    for name in ("teacher", "average"):
        pairs = zip(getattr(model, name).parameters(), model.student.parameters(), strict=True)
        for one, student in pairs:
            one.lerp_(student, 0.1)
    model.centre.mul_(0.9).add_(model.student[2].bias, alpha=0.1)


@torch.no_grad()
def replace(model: Pair) -> None:
    """Give them new tensors, as `p.data = ...` does."""
    moved = copy.deepcopy(model)
    follow(moved)
    both = zip(model.parameters(), moved.parameters(), strict=True)
    for one, other in (*both, *zip(model.buffers(), moved.buffers(), strict=True)):
        one.data = other.data


def job_of(act=follow, *, once: bool = False, kind: Callable[[], nn.Module] = Pair) -> Job:
    """Return a job whose hook looks at the module that was built last."""
    built: list[nn.Module] = []

    def model() -> nn.Module:
        if not (once and built):
            built.append(kind())
        return built[-1]

    def optimizer(weights) -> SGD:
        made = SGD([p for p in weights if p.requires_grad], lr=0.1)
        made.register_step_post_hook(lambda *_: act(built[-1]))
        return made

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    return Job(model, loss, data, optimizer, micro_batches=MICRO_BATCHES, seed=5)


def plainly(job: Job) -> dict[str, Tensor]:
    """Train as a script does."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, batches = job.optimizer(list(model.parameters())), job.data(0)
    for _ in range(STEPS):
        model.zero_grad()
        for _ in range(MICRO_BATCHES):
            (job.loss(model, next(batches)) / MICRO_BATCHES).backward()
        optimizer.step()
    weights = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    return weights | {f"buffers/{name}": value for name, value in model.named_buffers()}


def by_a_plan(job: Job, folder, launcher, **options) -> checkpoint.Checkpoint:
    """Train some steps, and in another job the rest."""
    run = run_of(job, 1, **options)
    train(run, folder / "part", (1,) * DONE, launcher)
    rest = {"windows": windows_from(run, DONE), "resume": checkpoint.latest(folder / "part")}
    train(run, folder / "rest", launcher=launcher, **rest)
    return checkpoint.load(checkpoint.latest(folder / "rest"))


def eagerly(job: Job, folder, ranks: int, laws=None) -> checkpoint.Checkpoint:
    for first, steps in ((0, DONE), (DONE, STEPS - DONE)):
        resume = checkpoint.latest(folder)
        task = EagerTask(job, first, steps, resume, laws or {}, policy=SavePolicy(folder))
        run_processes(partial(work_eagerly, task), ranks, lambda step: None)
    return checkpoint.load(checkpoint.latest(folder))


def assert_near(found: checkpoint.Checkpoint, expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(
            found.tensors[key], value, msg=lambda text, k=key: f"{k}: {text}"
        )


@pytest.mark.parametrize("act", [follow, replace])
@pytest.mark.parametrize("once", [False, True])
def test_a_resumed_plan_goes_on_with_it(act, once, tmp_path):
    found = by_a_plan(job_of(act, once=once), tmp_path, run_processes)
    assert_near(found, plainly(job_of(act)))


def test_so_do_replicas_and_ranks_in_one_process(tmp_path):
    expected = plainly(job_of())
    found = by_a_plan(job_of(), tmp_path / "apart", run_processes, replicas=2)
    assert_near(found, expected)
    assert_near(by_a_plan(job_of(), tmp_path / "here", run_threads, replicas=2), expected)


class Normed(nn.Module):
    """A student with a norm, and a teacher that is in evaluation or goes on by itself."""

    def __init__(self, *, evaluates: bool = True) -> None:
        super().__init__()
        self.student, self.teacher = normed(), normed().requires_grad_(False)
        self.evaluates = evaluates

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.train(not self.evaluates)
        y = self.student(x)
        with torch.no_grad():
            aim = self.teacher(x + 0.1)
        return y.square().mean() + (y - aim).square().mean()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


@torch.no_grad()
def copy_all(model: Normed) -> None:
    own = model.student.state_dict()
    for name, value in model.teacher.state_dict().items():
        value.copy_(own[name])


@torch.no_grad()
def average(model: Normed) -> None:
    both = zip(model.teacher.buffers(), model.student.buffers(), strict=True)
    for one, student in both:
        one.copy_(one.lerp(student, 0.3) if one.is_floating_point() else student + 1)


def reset(model: Normed) -> None:
    """Forget the statistics once some have been seen, which each replica must see alike."""
    if model.student[1].num_batches_tracked > 3 * MICRO_BATCHES:
        model.student[1].reset_running_stats()


ACTS = [(act, by) for act in (copy_all, average, reset) for by in (True, False)]


@pytest.mark.parametrize(("act", "evaluates"), ACTS)
@pytest.mark.sampled(2)
def test_replicas_show_a_hook_the_statistics_of_the_run(act, evaluates, tmp_path):
    job = job_of(act, kind=partial(Normed, evaluates=evaluates))
    assert examine(job).one_process == ""
    expected = plainly(job)
    assert expected["buffers/student.1.running_mean"].abs().max() > 0
    for number in range(2):
        found = by_a_plan(job, tmp_path / str(number), run_processes, replicas=number + 1)
        assert_near(found, expected)
    assert_near(eagerly(job, tmp_path / "eager", 2, buffer_laws(job)), expected)


def test_late_updates_cannot_show_them(tmp_path):
    """A window's micro-batches go on while an update is made: there is no whole to be shown."""
    run = run_of(job_of(average, kind=Normed), 1, "double_buffered", replicas=2)
    with pytest.raises(PenstockError, match="may look at statistics that replicas put together"):
        train(run, tmp_path, (STEPS,), run_threads)


def test_what_a_hook_without_the_module_does_to_statistics_is_for_one_process():
    """It reaches it by no way that is known: nobody says that the optimizer stays whole."""

    class Resets:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def __call__(self, *_: object) -> None:
            self.model.student[1].reset_running_stats()

    built: list[nn.Module] = []

    def model() -> nn.Module:
        built[:] = [Normed()]
        return built[0]

    def optimizer(weights) -> SGD:
        made = SGD([p for p in weights if p.requires_grad], lr=0.1)
        made.register_step_post_hook(Resets(built[0]))
        return made

    job = replaced(job_of(), model=model, optimizer=optimizer)
    assert "running_mean" in examine(job).one_process


@pytest.mark.parametrize("ranks", [1, 2])
def test_so_do_eager_replicas(ranks, tmp_path):
    assert_near(eagerly(job_of(), tmp_path, ranks), plainly(job_of()))


def test_the_plain_loop_goes_on_with_it_from_a_checkpoint(tmp_path):
    found = eagerly(job_of(), tmp_path, 1)
    plain = Plain(job_of())
    plain.load(found.tensors, found.plain)
    made = plain.gradients(STEPS)
    plain.update(STEPS, made.gradients)
    assert int(plain.model.updates) == STEPS + 1
    moved = [
        float((plain.weights()[name] - found.tensors[f"weights/{name}"]).abs().max())
        for name in ("teacher.0.weight", "average.0.weight")
    ]
    assert min(moved) > 0
