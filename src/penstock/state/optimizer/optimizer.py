"""Optimizer: the job's optimizer on one rank: made whole, then divided by name.

A rank that holds the whole model as one stage runs the very object that the job made.  Else each
stage has a part.  That is right if every parameter is updated by what belongs to it alone.  Of
torch's own classes it is known; any other one is tried, whole and divided as finely as may be, on
the same gradients.

A part is a copy of the object with the stage's parameters in place of the model's.  Where that
fails, as with a hook that closes over the author's own list of weights, each stage has an object of
its own, made for the whole model and left the stage's parameters, which are lent to that model for
the time of a step: whatever looks at the model's parameters finds the gradients of the stage, and
no others.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from penstock import _compat
from penstock.errors import CheckpointError, JobError
from penstock.graph.graph import Graph
from penstock.graph.parts import key_in
from penstock.graph.trace import Capture
from penstock.graph.whole_optimizer import Loan, WholeOptimizer, whole_optimizer
from penstock.job import Job
from penstock.state.optimizer.optimizer_trial import sparse_in, tried
from penstock.state.optimizer.rates import JobScheduler
from penstock.state.optimizer.reach import hook_with_module, lines_of
from penstock.state.optimizer.updates import NONE, Updates, divided, held_by, lent_to


class Optimizers:
    """The optimizer of each stage of a rank.

    model:    whose parameters it is made of.
    reached:  the names of those that get a gradient.
    """

    def __init__(self, job: Job, model: nn.Module, reached: Iterable[str]) -> None:
        self.job, self.model, self.reached = job, model, tuple(reached)
        self.whole: WholeOptimizer | None = None
        self.schedule: JobScheduler | None = None
        self.lender: nn.Module | None = None

    def of(
        self,
        live: Mapping[str, nn.Parameter],
        others: Mapping[str, Tensor],
        starts: Mapping[str, int] = NONE,
    ) -> "Updates | None":
        """Return what updates the parameters `live`; None where there is none.

        others:   what else the stage holds by name: frozen parameters and buffers.
        starts:   of those that are parts of the model's, where they begin in these.
        Raises:   JobError: the optimizer is not one, or has to stay whole and the stage is a part.
        """
        if not live:
            return None
        whole = self._whole()
        values = {**{name: p.detach() for name, p in live.items()}, **others}
        if whole.is_plain or set(live) != self._trainable():
            return self._divided(whole, live, starts) or self._lent(live, values)
        loan = Loan(whole, values, stays=whole.model is not self.model)
        return Updates(self.job, whole, self.schedule, whole.parameters, loan)

    def _trainable(self) -> set[str]:
        return {n for n, p in self.model.named_parameters() if p.requires_grad}

    def _divided(
        self,
        whole: WholeOptimizer,
        live: Mapping[str, nn.Parameter],
        starts: Mapping[str, int],
    ) -> "Updates | None":
        """Return a part of the whole one; None where only one that is lent its parameters is."""
        asked = self.job, self.model, self.reached
        if whole.is_plain or tried("divided", *asked) is None:
            return Updates(self.job, divided(whole, live, starts), self.schedule, live)
        reason = tried("lent", *asked)
        if starts or reason is not None:
            reason = reason or "of a slice of a parameter nothing is known"
            message = f"the job's optimizer cannot be divided by stages: {reason}"
            raise JobError(message, hint="train the model as one stage: stages=1")
        return None

    def _lent(self, live: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> "Updates":
        """Return what updates the parameters of a stage by lending them to a model.

        That is the one that was built last, after all trials: hooks may look at it.
        """
        if self.lender is None:
            self.lender = whole_optimizer(self.job, self.model).model
        stays = self.lender is not self.model
        if not stays:  # others look at it: hooks have copies of what is not lent
            held = held_by(self.lender).items()
            values = {**{name: tensor.detach().clone() for name, tensor in held}, **values}
        return lent_to(self.job, self.lender, live.keys(), (self.schedule, values), stays=stays)

    def _whole(self) -> WholeOptimizer:
        if self.whole is None:
            self.whole = _without_hooks(whole_optimizer(self.job, self.model))
            if self.job.scheduler is not None and self.schedule is None:
                self.schedule = JobScheduler(self.job, self.whole.optimizer)
        return self.whole

    def release(self) -> None:
        """Free what is needed to divide, once all stages of the rank have theirs."""
        self.whole = self.lender = None

    def lost(self) -> tuple[str, str]:
        """Return what would differ after a resume, and the lines that keep it; empty: nothing."""
        reason = tried("resumed", self.job, self.model, self.reached)
        if reason is None:
            return "", ""
        return reason, "".join(f"\n  {line}" for line in lines_of(self._whole().optimizer))

    def may_resume(self) -> None:
        """Raise where no checkpoint holds all that the optimizer keeps.

        Raises:   CheckpointError: it says what would differ.
        """
        raise_for(*self.lost())


def raise_for(lost: str, lines: str) -> None:
    """Raise where a resume would lose something that an optimizer keeps at these lines.

    Raises:   CheckpointError: it says what.
    """
    if lost:
        message = f"the job's optimizer cannot be resumed: {lost}{lines}"
        hint = "keep what it remembers in optimizer.state, its attributes or Job.state"
        raise CheckpointError(message, hint=hint)


def optimizers_of(job: Job, capture: Capture) -> Optimizers:
    """Return the optimizers of a rank that trains a captured step."""
    return Optimizers(job, capture.model, _reached(capture.graph))


def _reached(graph: Graph) -> tuple[str, ...]:
    reached = (key_in(name) for name, gradient in graph.gradients.items() if gradient is not None)
    return tuple(dict.fromkeys(reached))


def eager_updates(job: Job, model: nn.Module) -> Updates:
    """Return what updates the module that was built last, itself.

    Raises:   JobError: the optimizer is not one, or not of its parameters.
    """
    whole = whole_optimizer(job, model, is_new=True)
    schedule = None if job.scheduler is None else JobScheduler(job, whole.optimizer)
    return Updates(job, whole, schedule, whole.parameters, is_whole=True)


def undividable(job: Job, capture: Capture) -> str | None:
    """Return why the job's optimizer has to stay whole, on one stage; None where it has not.

    It runs whole, and one for each parameter, on the same gradients: small and large ones, at last
    one that is not finite.  Any bit of difference is a reason, unless there is none where parts of
    the parameters are lent.  Torch's own need no trial.

    One whose hook after steps reaches the module has to, whatever the trial shows.

    Ignores:  what installed code does otherwise only after more steps than are tried.
    Raises:   JobError: it is not one, fails, or a second one behaves differently from the first.
    """
    asked = job, capture.model, _reached(capture.graph)
    _without_hooks(whole_optimizer(*asked[:2]))
    reason = None if tried("divided", *asked) is None else tried("lent", *asked)
    whole = whole_optimizer(*asked[:2]).optimizer
    if reason is None and (place := hook_with_module(whole, objects=True)):
        reason = f"a hook after steps reaches the module itself ({place})"
    return reason


def takes_sparse(job: Job, model: nn.Module) -> str:
    """Return the class of an optimizer that needs sparse gradients, or of one that it holds; empty:
    dense ones will do.

    Traced steps have dense ones, and replicas sum them so.
    """
    return next(iter(sparse_in(whole_optimizer(job, model)).values()), "")


def hooks_a_gradient(job: Job, model: nn.Module) -> str:
    """Return a parameter on whose gradient the optimizer puts a hook; empty: there is none.

    So does one that updates while gradients are computed.
    """
    with _compat.without_new_gradient_hooks(model):
        return whole_optimizer(job, model).hooked


def _without_hooks(whole: WholeOptimizer) -> WholeOptimizer:
    """Return an optimizer that puts no hooks on gradients: a traced step calls none.

    Raises:   JobError: it names a parameter.
    """
    if not whole.hooked:
        return whole
    message = f"the job's optimizer puts a hook on the gradient of {whole.hooked}"
    hint = "let it update in its step, or train without a plan: eager=True"
    raise JobError(message, hint=hint)


def remembers(job: Job, model: nn.Module) -> str | None:
    """Return how an optimizer that is made a second time differs; None where it does not.

    It then keeps something in the job's own variables: a generator, a counter.
    Ignores:  what differs only after more steps than are tried.
    Raises:   as `undividable`.
    """
    trained = (name for name, p in model.named_parameters() if p.requires_grad)
    return tried("made again", job, model, tuple(trained))
