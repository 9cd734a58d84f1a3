"""The law of a buffer is what its forward does, found by trying; wishes and plans follow."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from penstock.errors import JobError, PlanError
from penstock.examine.buffer_terms import check_chosen, fixed_for
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.plan.of_plan import lower
from penstock.runtime.launch import run_threads
from penstock.search import Fixed, JobNeeds
from penstock.state.laws import measured
from penstock.state.laws.buffers import BufferLaw, buffer_laws, settled
from penstock.state.laws.measured import measured_laws
from penstock.training.run_program import run

WIDTH = 5


class Writes(nn.Module):
    """A layer with a buffer `b`, into which forward writes by `rule(b, x)`; it may return more."""

    def __init__(self, rule, first: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("b", first.clone())
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        more = self.rule(self, y.detach())
        return y if more is None else y * more


def data(start: int):
    while True:
        yield torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(start))
        start += 1


def job_of(make, **options: object) -> Job:
    return Job(make, lambda model, x: model(x).square().mean(), data, sgd, **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def law_of(rule, first: Tensor) -> BufferLaw:
    (law,) = measured_laws(job_of(lambda: Writes(rule, first))).values()
    return law


def put(module: nn.Module, value: Tensor) -> None:
    module.b.copy_(value)


def replaced(module: nn.Module, y: Tensor) -> None:
    module.b = 0.75 * module.b + y.mean(0)


def each(module: nn.Module, y: Tensor) -> None:
    torch._foreach_lerp_([module.b], [y.mean(0)], 0.25)


def in_python(module: nn.Module, y: Tensor) -> None:
    module.b.mul_(0.5).add_(torch.from_numpy(module.b.numpy().clip(-1, 1)))


FLOATS, COUNT = torch.linspace(-1, 1, WIDTH), torch.tensor(3)
LINEAR = {
    "average": (lambda m, y: m.b.mul_(0.9).add_(y.mean(0)), FLOATS, 0.9),
    "slow average": (lambda m, y: m.b.lerp_(y.mean(0).double(), 0.001), FLOATS.double(), 0.999),
    "an odd coefficient": (lambda m, y: m.b.mul_(2 / 3).add_(y.mean(0)), FLOATS.double(), 2 / 3),
    "another tensor": (replaced, FLOATS, 0.75),
    "of many at once": (each, FLOATS, 0.75),
    "sum": (lambda m, y: m.b.add_(y.sum(0)), FLOATS, 1.0),
    "count": (lambda m, y: m.b.add_(1), COUNT, 1.0),
    "a count that wraps": (lambda m, y: m.b.add_(100), COUNT.to(torch.uint8), 1.0),
    "newest": (lambda m, y: put(m, y.mean(0)), FLOATS, 0.0),
    "a flag": (lambda m, y: m.b.fill_(True), torch.tensor(False), 0.0),
    "nothing in it": (lambda m, y: m.b.add_(1), torch.zeros(0), 1.0),
    "the weights are read": (lambda m, y: m.b.lerp_(m.layer.bias, 0.5), FLOATS, 0.5),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_buffers_are_found_with_their_coefficient(name):
    rule, first, coefficient = LINEAR[name]

    def quietly(module, y):
        with torch.no_grad():
            rule(module, y)

    law = law_of(quietly, first)
    eps = torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
    assert law.coefficient == pytest.approx(coefficient, abs=eps)
    assert law.why == ""


def test_a_figure_beside_the_loss_may_not_depend_on_a_part():
    make = lambda: Writes(lambda m, y: put(m, m.b + 1), COUNT)  # noqa: E731

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return model(x).square().mean(), {"seen": model.b.double()}

    (law,) = measured_laws(replace(job_of(make), loss=loss)).values()
    assert law.why == "the figure seen depends on it"


def test_what_is_overwritten_before_it_is_read_is_the_newest():
    def rule(module: nn.Module, y: Tensor) -> Tensor:
        put(module, y.mean(0))
        return module.b.mean()

    assert law_of(rule, FLOATS) == BufferLaw(0.0)


def test_buffers_that_one_op_writes_do_not_depend_on_each_other():
    def rule(module: nn.Module, y: Tensor) -> None:
        torch._foreach_mul_([module.b, module.other], [0.5, 0.25])
        torch._foreach_add_([module.b, module.other], [y.mean(0), y[0]])

    def make() -> nn.Module:
        model = Writes(rule, FLOATS)
        model.register_buffer("other", FLOATS.clone())
        return model

    assert measured_laws(job_of(make)) == {"b": BufferLaw(0.5), "other": BufferLaw(0.25)}


def maximum(m: nn.Module, y: Tensor) -> None:
    put(m, torch.maximum(m.b, y.amax(0)))


ORDERED = {
    "maximum": (maximum, FLOATS, "not a constant"),
    "maximum of one number": (lambda m, y: put(m, m.b.maximum(y.max())), FLOATS[0], "not a const"),
    "bounded": (lambda m, y: put(m, (m.b + y.mean(0)).clamp(max=1e6)), FLOATS, "not a constant"),
    "bent": (lambda m, y: put(m, 0.9 * m.b + m.b.tanh()), FLOATS[0], "not a constant"),
    "each of its own": (lambda m, y: put(m, m.b * FLOATS), FLOATS, "not a constant"),
    "growing": (lambda m, y: put(m, 1.5 * m.b), FLOATS, "not a constant"),
    "halved": (lambda m, y: put(m, m.b // 2 + 5), COUNT, "not a constant"),
    "a count that starts again": (lambda m, y: put(m, (m.b + 1) % 100), COUNT, "not a constant"),
    "a flag that turns": (lambda m, y: put(m, ~m.b), torch.tensor(False), "not a constant"),
    "rough": (lambda m, y: m.b.add_(1), FLOATS.bfloat16(), "bfloat16 is too coarse"),
    "larger": (lambda m, y: setattr(m, "b", torch.cat([m.b, m.b])), FLOATS, "shape or dtype"),
    "read by the loss": (lambda m, y: m.b.add_(1).mean(), FLOATS, "the loss depends on it"),
    "rare": (lambda m, y: 1 + (m.b.add_(1) % 999 == 0).float(), COUNT, "the loss depends on it"),
    "looked at": (lambda m, y: 1 + (int(m.b.add_(1)) % 999 == 0), COUNT, "looks at its value"),
    "how many": (
        lambda m, y: 1.0 * m.b.add_(1)[m.b > 9].numel(),
        FLOATS,
        "forward looks at its value",
    ),
    "beside the ops": (in_python, FLOATS, "not a constant"),
    "beside the ops, in the loss": (
        lambda m, y: float(m.b.add_(1).numpy().mean()),
        FLOATS,
        "the loss or a gradient depends on it",
    ),
}


@pytest.mark.parametrize("name", ORDERED)
def test_what_is_not_linear_is_left_to_order_and_says_why(name):
    rule, first, why = ORDERED[name]
    law = law_of(rule, first)
    assert law.coefficient is None
    assert why in str(law)


def test_a_gradient_that_depends_on_a_buffer_is_noticed():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, b):
            ctx.save_for_backward(b.clone())
            return y

        @staticmethod
        def backward(ctx, gradient):
            (b,) = ctx.saved_tensors
            return gradient * b.mean(), None

    def make() -> nn.Module:
        model = Writes(lambda m, y: None, FLOATS)
        forward = model.forward

        def scaled(x: Tensor) -> Tensor:
            model.b.mul_(0.5)
            return Scaled.apply(forward(x), model.b)

        model.forward = scaled
        return model

    (law,) = measured_laws(job_of(make)).values()
    assert str(law) == "in order: the gradient of layer.weight depends on it"


class Two(nn.Module):
    """A count on which a moving average depends: c changes with it."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.count += 1
            share = float(1 / self.count) if self.hidden else 1 / self.count
            self.mean += share * (y.mean(0) - self.mean)
        return y


@pytest.mark.parametrize("hidden", [True, False])
def test_what_depends_on_an_ordered_buffer_is_ordered(hidden):
    laws = measured_laws(job_of(lambda: Two(hidden=hidden)))
    assert str(laws["mean"]) == "in order: it depends on count"
    why = "forward looks at its value" if hidden else "mean depends on it"
    assert laws["count"].why == why


def test_norms_of_torch_have_the_laws_of_their_formulas():
    def laws(make) -> dict[str, float | None]:
        model = lambda: nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), make(), nn.Flatten())  # noqa: E731
        job = replace(job_of(model), loss=lambda m, x: m(x.unsqueeze(2).expand(-1, -1, 3)).mean())
        return {name[2:]: law.coefficient for name, law in buffer_laws(job).items()}

    running = ("num_batches_tracked", "running_mean", "running_var")
    found = laws(lambda: nn.BatchNorm1d(WIDTH, momentum=0.3))
    assert found == pytest.approx(dict(zip(running, (1, 0.7, 0.7), strict=True)), abs=1e-7)
    assert laws(lambda: nn.BatchNorm1d(WIDTH, momentum=None)) == dict.fromkeys(running)
    found = laws(lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True))
    assert found == pytest.approx({"running_mean": 0.9, "running_var": 0.9}, abs=1e-7)
    found = laws(lambda: spectral_norm(nn.Conv1d(WIDTH, WIDTH, 1)))
    assert list(found.values()) == [None, None]
    assert laws(lambda: nn.BatchNorm1d(WIDTH).eval()) == {}
    assert laws(nn.Identity) == {}


def test_weights_that_forward_writes_count_too():
    class Teaching(nn.Module):
        def __init__(self, *, trained: bool) -> None:
            super().__init__()
            self.layer, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.teacher.requires_grad_(False)
            self.target = [(self.layer if trained else self.teacher).weight]

        def forward(self, x: Tensor) -> Tensor:
            self.target[0].data.mul_(0.5).add_(self.layer.weight.detach(), alpha=0.5)
            return self.layer(x)

    assert measured_laws(job_of(lambda: Teaching(trained=False))) == {
        "teacher.weight": BufferLaw(0.5)
    }
    (law,) = measured_laws(job_of(lambda: Teaching(trained=True))).values()
    assert law.why == "forward writes into this weight, which the optimizer changes"


def test_buffers_that_share_their_memory_are_ordered():
    def make() -> nn.Module:
        model = Writes(lambda m, y: put(m, m.b + 1), FLOATS)
        model.register_buffer("part", model.b[:2])
        return model

    laws = measured_laws(job_of(make))
    assert laws["part"] == laws["b"]
    assert laws["b"].why == "it shares its memory with another one"


def test_the_model_stays_as_it_was():
    model = Two(hidden=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured_laws(job_of(lambda: model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_run_where_the_trace_writes_no_buffer(monkeypatch):
    job = job_of(lambda: nn.Linear(WIDTH, WIDTH))
    captured = capture(job)
    monkeypatch.setattr(measured, "build_model", None)
    assert buffer_laws(job, captured) == {}


def test_unseeded_noise_does_not_hide_a_law():
    """The loss differs from run to run by itself; what reads what still tells."""
    noise = iter(range(1, 99))

    def rule(module: nn.Module, y: Tensor) -> Tensor:
        put(module, 0.5 * module.b + y.mean(0))
        return torch.tensor(float(next(noise)))

    assert law_of(rule, FLOATS).coefficient == 0.5


# -- what two micro-batches cannot show ----------------------------------------------------------


class ByClass(nn.Module):
    """Running means of each class, which move where the class is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("means", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        chosen = torch.stack([x[:, 0] > -9, x[:, 0] <= 9]).to(y.dtype)  # all are in the first ones
        with torch.no_grad():
            counts = chosen.sum(1, keepdim=True)
            new = 0.9 * self.means + 0.1 * (chosen @ y) / counts.clamp(min=1)
            self.means.copy_(torch.where(counts > 0, new, self.means))
        return y


def test_what_two_micro_batches_follow_is_no_law_where_the_data_may_change_it():
    job = job_of(ByClass)
    assert measured_laws(job)["means"].coefficient == pytest.approx(0.9)
    laws = buffer_laws(job, capture(job))
    assert str(laws["means"]) == "in order: how much of it stays is up to the data (where)"
    fit, decision = fixed_for(job, laws, Fixed(ranks=2))
    assert (fit.needs.buffers, decision.value) == ("one copy", "one copy")


def test_a_law_of_the_trace_has_the_coefficient_that_is_measured():
    job = job_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    assert buffer_laws(job, capture(job)) == measured_laws(job)
    bent = job_of(lambda: Writes(ORDERED["each of its own"][0], FLOATS))
    (law,) = buffer_laws(bent, capture(bent)).values()
    assert law.why == "its next value is not a constant * old + new"


def test_what_was_not_tried_or_not_traced_has_no_law():
    job = job_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    (other, *_), captured = measured_laws(job).values(), capture(job)
    laws = settled({"else": other}, captured)
    assert {law.coefficient for law in laws.values()} == {None}
    assert laws["else"].why == "the traced step does not write it"
    assert laws["1.running_mean"].why == "forward did not write it when it was tried"


def test_without_a_trace_only_norms_of_torch_have_laws():
    class Mixed(Writes):
        def __init__(self) -> None:
            super().__init__(lambda m, y: put(m, 0.5 * m.b + m.norm(y).mean(0)), FLOATS)
            self.norm = nn.BatchNorm1d(WIDTH)

    laws = buffer_laws(job_of(Mixed))
    assert laws["b"].why.startswith("the step is not traced")
    laws.pop("b")
    assert {law.calls for law in laws.values()} == {1}
    assert laws["norm.running_mean"].coefficient == pytest.approx(0.9)


@pytest.mark.parametrize("how", ["a hook", "a class of its own", "another forward"])
def test_norms_that_somebody_has_changed_have_no_law_without_a_trace(how):
    class Other(nn.BatchNorm1d):
        pass

    def make() -> nn.Module:
        norm = (Other if how == "a class of its own" else nn.BatchNorm1d)(WIDTH)
        if how == "a hook":
            norm.register_forward_hook(lambda *_: None)
        if how == "another forward":
            norm.forward = norm.forward
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)

    laws = buffer_laws(job_of(make))
    assert {law.coefficient for law in laws.values()} == {None}


def test_norms_that_some_micro_batches_leave_out_have_no_law():
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
            self.first = next(data(0))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.layer(x))
            return y if torch.equal(x, self.first) else y + self.norm(y)

    laws = buffer_laws(job_of(Skips))
    assert {law.coefficient for law in laws.values()} == {None}


# -- what follows --------------------------------------------------------------------------------

CARRIED = {"a": BufferLaw(0.9), "b": BufferLaw(0.9), "n": BufferLaw(1.0), "last": BufferLaw(0.0)}
JOB = job_of(lambda: nn.Linear(WIDTH, WIDTH))


def test_a_wish_is_narrowed_only_by_what_needs_order():
    fixed = Fixed(ranks=4)
    assert fixed_for(JOB, {}, fixed) == (fixed, None)
    same, decision = fixed_for(JOB, CARRIED, fixed)
    assert (same, decision.value, decision.by) == (fixed, "exact", "only choice")
    assert "a, b (0.9 * old + new); n (1 * old + new); last (the newest)" in decision.why
    fit, decision = fixed_for(JOB, {**CARRIED, "u": BufferLaw(None, "the loss reads it")}, fixed)
    assert (fit, decision.value) == (fixed.needing(buffers="one copy"), "one copy")
    assert decision.why.endswith("order: u (in order: the loss reads it)")


def test_a_job_may_leave_each_replica_its_own():
    job = replace(JOB, buffers="per replica")
    fit, decision = fixed_for(job, CARRIED, Fixed())
    own = Fixed(needs=JobNeeds(buffers="per replica"))
    assert (fit, decision.value, decision.by) == (own, "per replica", "user")
    fit, _ = fixed_for(job, {"u": BufferLaw(None, "why")}, Fixed())
    assert fit == own.needing(in_order=True)
    with pytest.raises(JobError, match=r"Job\.buffers is 'synchronised'"):
        replace(JOB, buffers="synchronised")


def test_plan_and_job_mean_the_same_by_buffers():
    normed = replace(JOB, model=lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    plain, writes = capture(JOB).graph, capture(normed).graph
    plan = plan_by_hand(writes, [], "one_f_one_b", num_micro_batches=2, replicas=2)
    own = plan.changed(buffers="per replica")
    per_replica = replace(normed, buffers="per replica")
    check_chosen(plan, normed, writes)
    check_chosen(own, per_replica, writes)
    check_chosen(plan, per_replica, plain)  # nothing is written
    for one, job in ((plan, per_replica), (own, normed)):
        with pytest.raises(PlanError, match=r'the plan has buffers ".*", and Job\.buffers is ".*"'):
            run(lower(one, writes), job, num_steps=1, launcher=run_threads)
    run(lower(own, writes), per_replica, num_steps=1, launcher=run_threads)
