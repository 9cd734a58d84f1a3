"""Updates: the job's optimizer as a stage uses it: the whole one on loan, or a part of it.

A part is of the same class: the same groups in the same order, empty ones included, the same
options, attributes and hooks, with the stage's parameters in place of the model's.  Of a parameter
that is cut into slices the stage has some, each a parameter by its part of the whole (parts.py).
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock import _compat
from penstock.errors import JobError, PenstockError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.functional import where
from penstock.graph.lasting import lasting_buffers
from penstock.graph.parts import key_in
from penstock.graph.whole_optimizer import Loan, WholeOptimizer, take_over, whole_optimizer
from penstock.job import Job
from penstock.state.optimizer.clearing import Clearing, has_own_zero_grad
from penstock.state.optimizer.rates import JobScheduler, Rates
from penstock.state.optimizer_state import ExtraState, nested, put_state, take_state, tensors_in
from penstock.state.values import lost_kind

SEED = 0x6A09E667  # added to the job's: an optimizer draws other numbers than the model
NONE: Mapping[str, int] = {}  # no parts
_LASTING = (Tensor, int, float, str, type(None))  # the same objects say the same


def divided(
    whole: WholeOptimizer, live: Mapping[str, nn.Parameter], starts: Mapping[str, int] = NONE
) -> WholeOptimizer:
    """Return the optimizer of some parameters: `whole` with `live` in place of its own.

    starts:  of those that are parts of its own, by name, where they begin in these.
    """
    known = whole.parameters
    pieces: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in live.items():
        pieces.setdefault(key_in(name), []).append((name, parameter))
    own = {id(p): pieces[name] for name, p in known.items() if name in pieces}
    memo: dict[int, Any] = {id(p): p for p in known.values()}
    memo |= {key: rows[0][1] for key, rows in own.items()}
    memo[id(whole.model)] = whole.model
    inside = {id(one): one for _, one in nested(whole.optimizer)}.values()
    for one in inside:
        new = type(one).__new__(type(one))
        memo[id(one)] = new
        for group in one.param_groups:
            kept = [own.get(id(p), ()) for p in group["params"]]
            memo[id(group["params"])] = [p for rows in kept for _, p in rows]
            if "param_names" in group:
                names = zip(group["param_names"], kept, strict=True)
                memo[id(group["param_names"])] = [name for name, rows in names for _ in rows]
        memo[id(one.state)] = _state_of(one, own, memo, starts)
    for one in inside:
        held = _compat.without_scheduler(vars(one))
        memo[id(one)].__dict__ = {k: copy.deepcopy(value, memo) for k, value in held.items()}
    for name, parameter in live.items():
        held = vars(known[key_in(name)])
        vars(parameter).update(copy.deepcopy(held, memo))
    return WholeOptimizer(memo[id(whole.optimizer)], whole.model)


def narrow(whole: WholeOptimizer, names: AbstractSet[str]) -> None:
    """Leave an optimizer, and those inside it, nothing but some parameters: groups and state."""
    own = {id(parameter) for name, parameter in whole.parameters.items() if name in names}
    for _, one in nested(whole.optimizer):
        for group in one.param_groups:
            stays = [id(parameter) in own for parameter in group["params"]]
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [
                        each for each, is_own in zip(group[key], stays, strict=True) if is_own
                    ]
        state: Mapping[Any, Any] = one.state
        for key in [key for key in state if id(key) not in own and isinstance(key, nn.Parameter)]:
            one.state.pop(key)


def _state_of(
    optimizer: Optimizer,
    own: Mapping[int, list[tuple[str, nn.Parameter]]],
    memo: dict[int, Any],
    starts: Mapping[str, int],
) -> defaultdict[Any, Any]:
    """Return the state of the parameters `own` by those that stand for them, and what is loose.

    Of a part of a parameter, the part of what is as large as that.
    """
    state: defaultdict[Any, Any] = defaultdict(dict)
    held: dict[Any, Any] = dict(optimizer.state)
    for key, value in held.items():
        if not isinstance(key, Tensor):
            state[key] = copy.deepcopy(value, memo)
            continue
        for name, parameter in own.get(id(key), ()):
            copied = copy.deepcopy(value, {**memo})
            for of, tensor in copied.items() if name in starts else ():
                if isinstance(tensor, Tensor) and tensor.shape == key.shape and key.dim():
                    piece = tensor.reshape(-1)[starts[name] :][: parameter.numel()]
                    copied[of] = piece.view(parameter.shape).clone()
            state[parameter] = copied
    return state


class Updates:
    """Updates of some parameters: by the job's whole optimizer on loan, or by a divided one.

    parameters:  those that the optimizer holds, by name.
    loan:        for the whole one; none where the parameters are those that it changes.
    is_whole:    whether it is of all parameters; None: if there is a loan.
    """

    def __init__(
        self,
        job: Job,
        whole: WholeOptimizer,
        schedule: JobScheduler | None,
        parameters: Mapping[str, nn.Parameter],
        loan: Loan | None = None,
        *,
        is_whole: bool | None = None,
    ) -> None:
        self.optimizer, self.is_plain = whole.optimizer, whole.is_plain
        self.parameters, self.loan, self.seed = parameters, loan, job.seed + SEED
        self.rates = Rates(job, whole.optimizer, schedule)
        is_whole = loan is not None if is_whole is None else is_whole
        self.shows_model = is_whole and not self.is_plain  # to hooks, and to its own step
        self.own = (
            None if self.is_plain else ExtraState(self.optimizer, parameters, is_whole=is_whole)
        )
        self.clearing: Clearing | None = None
        if not self.is_plain and has_own_zero_grad(self.optimizer):
            self.clearing = Clearing(self.optimizer, parameters, clips=job.clip_norm is not None)
        self.names = list(parameters)
        self.rows = [(p, p.detach(), p.data_ptr()) for p in parameters.values()]

    def begin(self, number: int) -> None:
        """Let the scheduler come to step `number`, as it does before a plain loop's forward.

        Raises:     JobError: the scheduler fails.
        """
        if self.rates.schedule is not None:
            self.rates.schedule.options(number)

    def step(self, number: int, gradients: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Make the update of step `number`, the rate times `factor`, in place.

        gradients:  by name; a plain one finds them at its parameters.
        Raises:     JobError: the optimizer fails.
        """
        put_back = self.rates.apply(number, factor)
        gradients = self.with_left(gradients)
        if self.loan is not None:
            self.loan.run(gradients, lambda: self._call(number))
        elif self.is_plain:
            self.optimizer.step()
        else:
            for name, (parameter, _, _) in zip(self.names, self.rows, strict=True):
                if parameter.grad is not (gradient := gradients.get(name)):
                    parameter.grad = gradient
            self._call(number)
            take_over(self.names, self.rows)
        if put_back is not None:
            put_back()

    def with_left(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return gradients with what the optimizer's own zero_grad has left of those before."""
        return gradients if self.clearing is None else self.clearing.added(gradients)

    def leave_out(self) -> None:
        """Do what is done after a step that is left out, as its gradients overflow."""
        if self.clearing is not None:
            self.clearing.leave_out()

    def _call(self, number: int) -> None:
        """Call the optimizer as a plain loop does; what it draws is that of the step."""
        try:
            with torch.enable_grad(), SeededRandom(micro_batch_seed(self.seed, number)):
                self.optimizer.step()
                if self.clearing is not None:
                    self.clearing.call()
        except PenstockError:
            raise
        except Exception as problem:  # whatever the job's code raises
            message = where(problem, "a step of the job's optimizer fails")
            raise JobError(message, hint="does it run without Penstock?") from problem

    def put(self, tensors: dict[str, Tensor], plain: dict[str, object]) -> None:
        """Add what a checkpoint keeps of it, by parameter name.

        Raises:   CheckpointError: it holds something that cannot be saved.
        """
        put_state(self.optimizer, self.parameters, tensors, plain)  # also of who learns again later
        if self.own is not None:
            self.own.put(self.rates.changed(), tensors, plain)
        if self.clearing is not None:
            self.clearing.put(tensors)

    def lost(self) -> dict[str, str]:
        """Return what belongs to no parameter and no checkpoint could keep: its kind, by name."""
        plain = dict[str, object]()
        if self.own is not None:
            self.own.put(self.rates.changed(), {}, plain)
        kinds = {place.rpartition("/")[2]: lost_kind(value) for place, value in plain.items()}
        return {name: kind for name, kind in kinds.items() if kind}

    def put_of(
        self, names: AbstractSet[str], tensors: dict[str, Tensor], plain: dict[str, object]
    ) -> None:
        """Add what `put` does of some parameters, and nothing that belongs to none.

        Raises:   CheckpointError: it holds something that cannot be saved.
        """
        some = {n: p for n, p in self.parameters.items() if n in names}
        put_state(self.optimizer, some, tensors, plain)
        if self.clearing is not None:
            self.clearing.put(tensors, names)

    def seen_of(self, names: Sequence[str]) -> list[object]:
        """Return what the optimizer keeps of some parameters, each as the object that it is.

        As long as a plain one keeps the same objects, `put_of` adds the same tensors under the same
        keys; what another one keeps is never the same.
        """
        if not (names and self.is_plain):
            return [object() for _ in names]
        state: Mapping[Any, dict[str, object]] = self.optimizer.state
        own = [self.parameters[name] for name in names if name in self.parameters]
        kept = (value for one in own if one in state for value in state[one].values())
        return [value if isinstance(value, _LASTING) else object() for value in kept]

    def take(self, tensors: Mapping[str, Tensor], plain: Mapping[str, object]) -> None:
        """Restore what `put` added.

        Raises:   CheckpointError: that is of another optimizer, or something was not saved.
        """
        take_state(self.optimizer, self.parameters, tensors, plain)
        if self.own is not None:
            self.own.take(tensors, plain)
        if self.clearing is not None:
            self.clearing.take(tensors)

    def held(self) -> list[Tensor]:
        """Return all tensors that it holds beside the parameters."""
        states = {id(one.state): one.state for _, one in nested(self.optimizer)}
        found = [tensor for state in states.values() for tensor in tensors_in([*state.values()])]
        return found if self.clearing is None else [*found, *self.clearing.left.values()]


def lent_to(
    job: Job,
    model: nn.Module,
    names: AbstractSet[str],
    lent: tuple[JobScheduler | None, Mapping[str, Tensor]],
    *,
    stays: bool = False,
) -> Updates:
    """Return an optimizer of its own, made for `model`, that is left some parameters.

    lent:  the schedule, and what the model is lent for the time of a step.
    """
    part, (schedule, values) = whole_optimizer(job, model, is_new=True), lent
    narrow(part, names)
    own = {name: parameter for name, parameter in part.parameters.items() if name in names}
    loan = Loan(part, values, stays=stays)
    return Updates(job, part, schedule, own, loan, is_whole=False)


def held_by(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(model.named_parameters()), **lasting_buffers(model)}
