"""Loop body: what the statements of a training loop in a script are of a job.

    for number, (x, y) in enumerate(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)         the loss, a function of model and micro-batch
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  the largest norm
        optimizer.step()
        scheduler.step()                          the scheduler; under an `if`, of each epoch
        print(number, loss.item())                what is said of each step, once it is done

Nothing of the script is run here.  What is none of these is refused with its line.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, NoReturn, TypeAlias, cast, get_args

from penstock.errors import JobError
from penstock.training.accumulated import RATES, WRITE, is_sum_of, num_summed, updated_in
from penstock.training.loop_names import (
    CHANGES,
    LoopChange,
    chains_in,
    changed_in,
    changes_in,
    is_kept_in,
    known_part,
    numbers_of,
)
from penstock.training.loop_reads import LoopReads, kept_inside

Role = Literal["backward", "step", "clip", "schedule", "zero", "mode", "other"]
MODEL, BATCH = "_model", "_batch"  # of the loss that is made
MISSING = object()
_Roles: TypeAlias = Sequence[tuple[Role, ast.stmt]]
_JOB = "make the job by hand: ps.Job(model=, loss=, data=, optimizer=)"
_TOLD = {  # roots of modules whose functions and methods look at no model
    "builtins", "math", "time", "logging", "collections", "tqdm", "datetime", "sys", "_io", "json",
    "tensorboardX", "wandb", "mlflow", "statistics",
}  # fmt: skip
_WRITER = "torch.utils.tensorboard"


class Scope(NamedTuple):
    """What names mean where the loop stands.

    locals:     of a function; the globals themselves in a module.
    """

    locals: Mapping[str, object]
    globals: Mapping[str, object]
    builtins: Mapping[str, object]

    @property
    def is_module(self) -> bool:
        return self.locals is self.globals

    def of(self, node: ast.expr, hidden: frozenset[str] = frozenset()) -> object:
        """Return what a name, or an attribute of what one names, is; MISSING: nobody knows."""
        if isinstance(node, ast.Name):
            if node.id in hidden:
                return MISSING
            for names in self:
                if node.id in names:
                    return names[node.id]
        elif isinstance(node, ast.Attribute):
            owner = self.of(node.value, hidden)
            return owner if owner is MISSING else getattr(owner, node.attr, MISSING)
        return MISSING


class Objects(NamedTuple):
    """What a loop trains with, by identity."""

    steps: object
    model: object
    optimizer: object
    clips: object  # torch.nn.utils.clip_grad_norm_
    parts: frozenset[int] = frozenset()  # ids of the model's modules, parameters and buffers

    def is_steps(self, scope: Scope) -> Callable[[ast.expr], bool]:
        """Return what says whether an expression is the steps."""
        return lambda node: scope.of(node) is self.steps

    def is_trained(self, found: object) -> bool:
        """Return whether something changes while a run goes on."""
        return id(found) in self.parts or found is self.optimizer or self.is_scheduler(found)

    def is_scheduler(self, found: object) -> bool:
        """Return whether something has this optimizer, as schedulers have it."""
        owner = getattr(found, "optimizer", None)
        return owner is self.optimizer and hasattr(found, "step")


class LoopBody(NamedTuple):
    """The parts of a loop.

    loss:       the statements before backward, as a function of MODEL and BATCH.
    free:       names that it takes from the function around it.
    of_loss:    the name of what backward is called on; "": it has none.
    figures:    names that the loss sets and `after` reads.
    numbers:    those of them that are Python's numbers, not tensors.
    after:      what is said of each step.
    counts:     the name that counts the steps, if one does, and its first value.
    clip:       the largest norm, as it is written.
    scheduler:  that is stepped after each update, or after so many.
    updates:    after which the scheduler is stepped once.
    summed:     batches whose gradients an update sums; the loss is so many times the script's,
                for a job's gradient is their mean.
    """

    line: int
    loss: ast.FunctionDef
    free: tuple[str, ...]
    of_loss: str
    figures: tuple[str, ...]
    numbers: frozenset[str]
    after: tuple[ast.stmt, ...]
    counts: tuple[str, int] | None
    clip: ast.expr | None
    scheduler: object | None
    updates: int
    summed: int


def loop_at(tree: ast.Module, line: int, is_steps: Callable[[ast.expr], bool]) -> ast.For:
    """Return the loop of a script whose steps are being asked for at a line.

    Raises:   JobError: it is no `for x in steps:`, or goes through them more than once.
    """
    around: list[ast.For | ast.While] = []
    for node in _path(tree, line):
        if isinstance(node, ast.For) and _steps_of(node, is_steps) is not None:
            if around:
                _refuse(node, "the loop stands in another one", "say epochs=3 to ps.loop instead")
            if node.orelse:
                _refuse(node.orelse[0], "the loop has an else", "put it behind the loop")
            return node
        if isinstance(node, ast.With):
            around = []
        elif isinstance(node, ast.For | ast.While):
            around.append(node)
    message = (
        f"line {line}: ps.loop takes `for batch in steps:` and `for k, batch in enumerate(steps):`"
    )
    raise JobError(message, hint="write the loop so; a bar of progress is shown by itself")


def _path(tree: ast.Module, line: int) -> Iterator[ast.stmt]:
    """Yield the statements that hold a line, from the outermost on."""
    inside: Sequence[ast.AST] = tree.body
    while inside:
        here = [node for node in inside if _holds(node, line)]
        if not here:
            return
        if isinstance(here[0], ast.stmt):
            yield here[0]
        inside = list(ast.iter_child_nodes(here[0]))


def _holds(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.match_case | ast.ExceptHandler):
        return any(_holds(child, line) for child in node.body)
    return isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)


def _steps_of(
    node: ast.For, is_steps: Callable[[ast.expr], bool]
) -> tuple[ast.expr, tuple[str, int] | None] | None:
    """Return the target of a batch, and what counts; None: the loop is over something else."""
    if is_steps(node.iter):
        return node.target, None
    call, target = node.iter, node.target
    if not isinstance(call, ast.Call) or not isinstance(target, ast.Tuple):
        return None
    is_counted = isinstance(call.func, ast.Name) and call.func.id == "enumerate"
    if not is_counted or not call.args or not is_steps(call.args[0]) or len(target.elts) != 2:
        return None
    starts = [*call.args[1:], *(each.value for each in call.keywords), ast.Constant(0)]
    first, name = starts[0], target.elts[0]
    value = first.value if isinstance(first, ast.Constant) else None
    if not isinstance(value, int) or not isinstance(name, ast.Name):
        return None
    return target.elts[1], (name.id, value)


def body_of(tree: ast.Module, node: ast.For, scope: Scope, objects: Objects) -> LoopBody:
    """Return the parts of a loop of a script.

    Raises:   JobError: a statement has no place in a job.
    """
    target, index = _steps_of(node, objects.is_steps(scope)) or (node.target, None)
    return _BodyReader(scope, objects, node, target, index, read_behind(tree, node)).read()


def read_behind(tree: ast.Module, node: ast.For) -> frozenset[str]:
    """Return the names that are read behind a loop, in the function or module where it stands."""
    end = node.end_lineno or node.lineno
    around: Sequence[ast.stmt] = tree.body
    for stmt in _path(tree, node.lineno):
        if isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef):
            around = stmt.body
    return frozenset(
        each.id
        for stmt in around
        for each in ast.walk(stmt)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and each.lineno > end
    )


def _refuse(node: ast.AST, message: str, hint: str = _JOB) -> NoReturn:
    text = ast.unparse(node).splitlines()[0]
    raise JobError(f"line {cast('ast.stmt', node).lineno}, `{text:.60}`: {message}", hint=hint)


def _misplaced(role: Role, at: int, backward: int, step: int) -> str:
    """Return what is wrong with a statement that stands where it does; "": nothing."""
    between = backward < at < step
    wrong: Mapping[Role, tuple[bool, str]] = {
        "step": (at < backward, "the update comes before the gradients of its micro-batch"),
        "zero": (between, "gradients are cleared before they are used"),
        "clip": (not between, "gradients are clipped where there are none"),
        "schedule": (at < step, "the scheduler is stepped before the optimizer"),
        "mode": (at > backward, "the model is set to train after its loss was computed"),
    }
    is_wrong, words = wrong.get(role, (False, ""))
    return words if is_wrong else ""


@dataclass
class _BodyReader:
    scope: Scope
    objects: Objects
    node: ast.For
    target: ast.expr
    index: tuple[str, int] | None
    behind: frozenset[str]
    hidden: frozenset[str] = field(init=False)  # names that the loop itself gives values
    _summed: int = field(init=False, default=1)
    _batches: int = field(init=False, default=0)  # of an epoch, if rates change by epochs

    def __post_init__(self) -> None:
        self.hidden = _stored([self.node.target, *self.node.body])

    def read(self) -> LoopBody:
        self._summed, stmts = self._flat()
        roles: _Roles = [(self._role(stmt), stmt) for stmt in stmts]
        order = [role for role, _ in roles]
        self._check_order(roles)
        backward, step = order.index("backward"), order.index("step")
        before = [stmt for role, stmt in roles[:backward] if role == "other"]
        after = [stmt for role, stmt in roles[backward:] if role == "other"]
        call = cast("ast.Call", cast("ast.Expr", roles[backward][1]).value)
        loss = cast("ast.Attribute", call.func).value
        clips = [stmt for role, stmt in roles if role == "clip"]
        schedules = [stmt for role, stmt in roles[step:] if role == "schedule"]
        figures = self._figures(before, after, loss)
        self._check_flow([*before, *after])
        self._check_before(before)
        self._check_after(after)
        self._check_told(before, after, loss)
        self._check_kept(before, after, loss)
        function = self._function(before, loss, figures)
        return LoopBody(
            self.node.lineno,
            function,
            self._free(function),
            loss.id if isinstance(loss, ast.Name) else "",
            figures,
            numbers_of(before) & {*figures},
            tuple(after),
            self.index,
            _second(clips[0]) if clips else None,
            self._owner(schedules[0]) if schedules else None,
            self._updates(),
            self._summed,
        )

    def _flat(self) -> tuple[int, Sequence[ast.stmt]]:
        """Return how many batches an update follows, and all statements, with those of its `if`."""
        body = self._by_epochs(self.node.body)
        under = updated_in(body, lambda stmt: self._role(stmt) == "step")
        if under is None:
            return 1, body
        count = num_summed(under.test, self.index, self._known)
        if isinstance(count, str):
            _refuse(under, count, WRITE)
        if under.orelse:
            _refuse(under.orelse[0], "a batch without an update does more than to add gradients")
        at = body.index(under)
        inside, behind = self._by_epochs(under.body), body[at + 1 :]
        rates = behind if self._batches and [*map(self._role, behind)] == ["schedule"] else []
        self._check_apart(body[:at], inside, [] if rates else behind)
        return count, [*body[:at], *inside, *rates]

    def _by_epochs(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return the statements, with `scheduler.step()` for the `if` under which it stands."""
        return [self._rate_of(stmt) or stmt for stmt in body]

    def _rate_of(self, stmt: ast.stmt) -> ast.stmt | None:
        if not isinstance(stmt, ast.If) or [*map(self._role, stmt.body)] != ["schedule"]:
            return None
        count = num_summed(stmt.test, self.index, self._known)
        if isinstance(count, str):
            told = count.replace("the weights are updated", "rates change")
            told = told.replace("the first update does", "the first change of rates does")
            _refuse(stmt, told, RATES)
        if stmt.orelse:
            _refuse(stmt.orelse[0], "a batch without a change of rates does more than others")
        self._batches = count
        return stmt.body[0]

    def _updates(self) -> int:
        """Return after how many updates rates change."""
        if self._batches % self._summed:
            told = f"rates change after {self._batches} batches, an update follows {self._summed}"
            _refuse(self.node, told, "let rates change after a whole number of updates")
        return max(1, self._batches // self._summed)

    def _known(self, node: ast.expr) -> object:
        """Return what an expression is before the loop: a name, or the length of what it names."""
        if isinstance(node, ast.Call) and self.scope.of(node.func, self.hidden) is len:
            found = self.scope.of(node.args[0], self.hidden) if node.args else MISSING
            with suppress(TypeError):  # a DataLoader has a length that its dataset may not have
                return len(found) if isinstance(found, Sized) else MISSING
            return MISSING
        return self.scope.of(node, self.hidden)

    def _check_apart(
        self, before: Sequence[ast.stmt], inside: Sequence[ast.stmt], behind: Sequence[ast.stmt]
    ) -> None:
        """Raise where what stands outside or inside of the update's `if` should stand elsewhere."""
        if behind:
            hint = "put it before the `if`, or into it"
            _refuse(behind[0], "it stands behind the update, and most batches have none", hint)
        roles = [self._role(stmt) for stmt in before]
        for role, stmt in zip(roles, before, strict=True):
            if role in ("zero", "clip", "schedule"):
                _refuse(stmt, "each batch does it, not each update", "put it into the `if`")
        if "backward" not in roles:
            return
        at = roles.index("backward")
        call = cast("ast.Call", cast("ast.Expr", before[at]).value)
        loss = cast("ast.Attribute", call.func).value
        name = loss.id if isinstance(loss, ast.Name) else ""
        for stmt in before[at + 1 :]:
            if not name or not is_sum_of(stmt, name):
                hint = "sum losses as `total += loss.item()`; say the rest in the `if`"
                _refuse(stmt, "each batch says it, and a job speaks once for each update", hint)
        given = _stored([self.target, *before[:at]])
        for stmt in inside:
            if read := sorted(given & _loaded([stmt])):
                hint = "sum losses as `total += loss.item()` before the `if`, and say the sum"
                _refuse(stmt, f"`{read[0]}` is that of the last batch alone", hint)

    # -- what statements are -----------------------------------------------------------------------

    def _role(self, stmt: ast.stmt) -> Role:
        call = stmt.value if isinstance(stmt, ast.Expr) else None
        if not isinstance(call, ast.Call):
            return "other"
        if self.scope.of(call.func, self.hidden) is self.objects.clips:
            return "clip"
        if not isinstance(call.func, ast.Attribute):
            return "other"
        owner, name = self._owner(stmt), call.func.attr
        if name == "backward":
            return "backward"
        if name == "zero_grad" and (owner is self.objects.optimizer or self._is_model(owner)):
            return "zero"
        if name == "step" and owner is self.objects.optimizer:
            return "step"
        if name == "step" and self.objects.is_scheduler(owner):
            return "schedule"
        return "mode" if name == "train" and self._is_model(owner) and not call.args else "other"

    def _owner(self, stmt: ast.stmt) -> object:
        """Return what the method that a statement calls belongs to."""
        call = cast("ast.Call", cast("ast.Expr", stmt).value)
        return self.scope.of(cast("ast.Attribute", call.func).value, self.hidden)

    def _is_model(self, found: object) -> bool:
        return found is self.objects.model

    def _check_order(self, roles: _Roles) -> None:
        """Raise where a step would not be that of a job."""
        order = [role for role, _ in roles]
        for role in get_args(Role):
            self._check_count(role, [stmt for each, stmt in roles if each == role])
        backward, step = order.index("backward"), order.index("step")
        for at, (role, stmt) in enumerate(roles):
            if words := _misplaced(role, at, backward, step):
                _refuse(stmt, words)
            if role == "clip":
                self._check_clip(stmt)

    def _check_count(self, role: Role, rows: Sequence[ast.stmt]) -> None:
        needed = {"backward": "loss.backward()", "step": "optimizer.step()"}
        if role in ("other", "zero", "mode"):
            if role == "zero" and not rows:
                message = "nothing clears the gradients, so each step would add to those before"
                _refuse(self.node, message, "write optimizer.zero_grad() into the loop")
            return
        if not rows and role in needed:
            what = f"`{needed[role]}` is no statement of the loop itself"
            hint = "write it there, without `if` or `with`; ps.Job(micro_batches=) sums gradients"
            _refuse(self.node, what, hint)
        if len(rows) > 1:
            _refuse(rows[1], "a step does it a second time", "ps.in_turn takes losses by turns")
        if role in ("step", "backward", "schedule"):
            for stmt in rows:
                call = cast("ast.Call", cast("ast.Expr", stmt).value)
                if call.args or call.keywords:
                    _refuse(stmt, "it is given something, and a job gives it nothing")

    def _check_clip(self, stmt: ast.stmt) -> None:
        call = cast("ast.Call", cast("ast.Expr", stmt).value)
        match call:
            case ast.Call(
                args=[ast.Call(func=ast.Attribute(value=owner, attr="parameters"), args=[]), _],
                keywords=[],
            ) if self._is_model(self.scope.of(owner, self.hidden)):
                return
            case _:
                message = "a job clips by the norm of the whole model's gradient"
                _refuse(stmt, message, "write clip_grad_norm_(model.parameters(), 1.0)")

    # -- the loss ----------------------------------------------------------------------------------

    def _figures(
        self, before: Sequence[ast.stmt], after: Sequence[ast.stmt], loss: ast.expr
    ) -> tuple[str, ...]:
        given = _stored([self.target, *before]) - _stored(after)
        own = {loss.id} if isinstance(loss, ast.Name) else set[str]()
        return tuple(sorted((given & _loaded(after)) - own))

    def _check_flow(self, stmts: Sequence[ast.stmt]) -> None:
        leaving = ast.Return | ast.Yield | ast.YieldFrom | ast.Await
        for stmt in stmts:
            for node in _inside(stmt, loops=True):
                if isinstance(node, leaving | ast.Global | ast.Nonlocal | ast.Delete):
                    _refuse(stmt, "a step has no such statement")
            for node in _inside(stmt, loops=False):
                if isinstance(node, ast.Break | ast.Continue):
                    _refuse(stmt, "the number of steps is known before", "say num_steps to ps.loop")

    def _check_before(self, before: Sequence[ast.stmt]) -> None:
        """Raise where the loss reads what it cannot have."""
        given = _stored([self.target])
        for stmt in before:
            self._check_mentions(stmt, lambda found: found is self.objects.optimizer)
            if isinstance(stmt, ast.AugAssign):
                name = stmt.target.id if isinstance(stmt.target, ast.Name) else ""
                if name and name not in given:
                    hint = "put it behind optimizer.step(), where each step is told of"
                    _refuse(stmt, f"`{name}` goes on from step to step", hint)
            if self.index is not None and self.index[0] in _loaded([stmt]):
                hint = "put the number into the micro-batches, as one of their fields"
                _refuse(stmt, "a loss is a function of its micro-batch, not of its number", hint)
            given |= _stored([stmt])

    def _check_mentions(self, stmt: ast.stmt, is_wrong: Callable[[object], bool]) -> None:
        for node in ast.walk(stmt):
            if isinstance(node, ast.Attribute) and node.attr == "backward":
                hint = "call loss.backward() in the loop itself; a scaler is Job.precision"
                _refuse(stmt, "gradients are taken inside another statement", hint)
            found = self.scope.of(node, self.hidden) if isinstance(node, ast.expr) else MISSING
            if found is MISSING:
                continue
            if is_wrong(found) or self.objects.is_scheduler(found):
                hint = "ps.Job(micro_batches=) sums gradients; Job.scheduler sets rates"
                _refuse(stmt, f"it uses `{ast.unparse(node)}` in its own way", hint)

    def _function(
        self, before: Sequence[ast.stmt], loss: ast.expr, figures: Sequence[str]
    ) -> ast.FunctionDef:
        """Return the loss: its lines are those of the script."""
        value: ast.expr = loss
        if self._summed > 1:
            value = ast.BinOp(loss, ast.Mult(), ast.Constant(self._summed))
        if figures:
            keys: list[ast.expr | None] = [ast.Constant(name) for name in figures]
            values: list[ast.expr] = [ast.Name(name, ast.Load()) for name in figures]
            value = ast.Tuple([value, ast.Dict(keys, values)], ast.Load())
        batch = ast.Assign([self.target], ast.Name(BATCH, ast.Load()))
        given = ast.copy_location(ast.Return(value), loss)
        stmts = [ast.copy_location(batch, self.node), *before, given]
        names = ast.arguments([], [ast.arg(MODEL), ast.arg(BATCH)], None, [], [], None, [])
        function = ast.FunctionDef(f"loss_of_line_{self.node.lineno}", names, stmts, [])
        function = _OwnModel(self).visit(function)
        return ast.fix_missing_locations(ast.copy_location(function, self.node))

    def _free(self, function: ast.FunctionDef) -> tuple[str, ...]:
        if self.scope.is_module:
            return ()
        names = _loaded(function.body) - {MODEL, BATCH}
        return tuple(sorted(name for name in names if name in self.scope.locals))

    # -- what is said of a step --------------------------------------------------------------------

    def _check_after(self, after: Sequence[ast.stmt]) -> None:
        for stmt in after:
            self._check_mentions(stmt, self.objects.is_trained)
            for node in ast.walk(stmt):
                if isinstance(node, ast.Call):
                    self._check_call(stmt, node)

    def _check_told(
        self, before: Sequence[ast.stmt], after: Sequence[ast.stmt], loss: ast.expr
    ) -> None:
        """Raise where the loss reads what a step has told, or tells what is read elsewhere."""
        known = partial(self.scope.of, hidden=self.hidden)
        given, read = _stored([self.target]), set[str]()
        for stmt in (*before, ast.Expr(loss)):
            read |= _loaded([stmt]) - given
            heard = changed_in(stmt, known) - given - _stored([stmt])
            if lost := sorted(heard & (self.behind | _loaded(after)) - self._trained_names()):
                hint = "put it behind optimizer.step(), where each step is told of"
                _refuse(stmt, f"`{lost[0]}` is changed with the loss, which others compute", hint)
            given |= _stored([stmt])
        reads = self._reads([*before, ast.Expr(loss)], read)
        for stmt in after:
            told = _stored([stmt]) & (read | reads.names)
            told |= {each.name for each in self._changes(stmt) if self._is_read(each, reads, read)}
            if told:
                hint = "keep it in a buffer of the model that the loss sets"
                _refuse(
                    stmt, f"`{min(told)}` is set from step to step, and the loss reads it", hint
                )

    def _reads(self, stmts: Sequence[ast.stmt], names: set[str]) -> LoopReads:
        """Return what the loss and its functions read, of names that are read from outside."""
        reads = LoopReads(self.scope.globals, self.scope.locals)
        for stmt in stmts:
            for root, attributes in chains_in(stmt):
                found = self.scope.of(ast.Name(root.id, ast.Load()))
                if root.id in names and found is not MISSING:
                    reads.add(found, attributes)
        reads.add(self.objects.model)
        return reads

    def _changes(self, stmt: ast.stmt) -> Iterator[LoopChange]:
        yield from changes_in(stmt, partial(self.scope.of, hidden=self.hidden), MISSING)
        for node in ast.walk(stmt):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                found = self.scope.of(ast.Name(node.target.id, ast.Load()))  # it may be in place
                if found is not MISSING:
                    yield LoopChange(node.target.id, (found,), None)

    def _is_read(self, change: LoopChange, reads: LoopReads, names: set[str]) -> bool:
        if change.owners is not None:
            return any(reads.has(owner, change.attribute) for owner in change.owners)
        others = [each for found in self._named(change.name) for each in kept_inside(found)]
        return change.name in names | reads.names or any(reads.has(one, None) for one in others)

    def _named(self, name: str) -> Iterator[object]:
        """Yield the objects of before the loop to which it gives another name."""
        for node in ast.walk(self.node):
            match node:
                case ast.Assign(targets=[ast.Name(other)], value=value) if other == name:
                    yield known_part(value, partial(self.scope.of, hidden=self.hidden), MISSING)[0]
                case ast.For(target=ast.Name(other), iter=value) if other == name:
                    yield known_part(value, partial(self.scope.of, hidden=self.hidden), MISSING)[0]
                case _:
                    pass

    def _trained_names(self) -> frozenset[str]:
        """Return the names of what is trained, and of its parts."""
        each = (*self.scope.globals.items(), *self.scope.locals.items())
        return frozenset(name for name, found in each if self.objects.is_trained(found))

    def _check_kept(
        self, before: Sequence[ast.stmt], after: Sequence[ast.stmt], loss: ast.expr
    ) -> None:
        """Raise where a name would keep a value that it had before the loop."""
        of_steps = _stored([self.node.target, *before])
        if self.scope.is_module:  # there, names get the values of the last step
            of_steps -= set(self._figures(before, after, loss))
            of_steps -= {loss.id} if isinstance(loss, ast.Name) else set()
            if self._summed > 1 and isinstance(loss, ast.Name) and loss.id in self.behind:
                hint = "sum losses as `total += loss.item()`, and read the sum there"
                _refuse(self.node, f"`{loss.id}` behind the loop is the last batch's alone", hint)
        else:
            of_steps |= _stored(after)
        for name in sorted(of_steps & self.behind & frozenset(self.scope.locals)):
            message = f"`{name}` is read behind the loop, and steps elsewhere leave it as it was"
            hint = f"append to a list in the loop, as losses.append(loss.item()), or rename {name}"
            _refuse(self.node, message, hint)
        for stmt in () if self.scope.is_module else after:
            told = stmt.target if isinstance(stmt, ast.AugAssign) else None
            if isinstance(told, ast.Name) and told.id in self.scope.locals:
                hint = "append to a list in the loop, as losses.append(loss.item())"
                _refuse(stmt, f"`{told.id}` of a function cannot be set from elsewhere", hint)

    def _check_call(self, stmt: ast.stmt, call: ast.Call) -> None:
        root: ast.expr = call.func
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name) or root.id in self.hidden:
            return
        match call.func:
            case ast.Attribute(value=ast.Subscript(value=ast.Name()), attr=name):
                if name in CHANGES and is_kept_in(self.scope.of(root)):
                    return
            case _:
                pass
        found = self.scope.of(call.func, self.hidden)
        owner = getattr(found, "__self__", None)
        module = getattr(found, "__module__", None) or ""
        if owner is not None and not isinstance(owner, type(ast)):
            module = type(owner).__module__
        if module.split(".")[0] not in _TOLD and not module.startswith(_WRITER):
            hint = "put it behind the loop, or give it as on_step= to ps.loop"
            _refuse(stmt, f"`{ast.unparse(call.func)}` may look at the model in mid-run", hint)


class _OwnModel(ast.NodeTransformer):
    """Names MODEL what a script names otherwise."""

    def __init__(self, reader: _BodyReader) -> None:
        self.reader = reader

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._put(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        put = self._put(node)
        return put if put is not node else cast("ast.expr", self.generic_visit(node))

    def _put(self, node: ast.Name | ast.Attribute) -> ast.expr:
        is_read = isinstance(node.ctx, ast.Load)
        found = self.reader.scope.of(node, self.reader.hidden) if is_read else MISSING
        if found is not self.reader.objects.model:
            return node
        return ast.copy_location(ast.Name(MODEL, ast.Load()), node)


def _second(stmt: ast.stmt) -> ast.expr:
    return cast("ast.Call", cast("ast.Expr", stmt).value).args[1]


def _stored(nodes: Sequence[ast.AST]) -> frozenset[str]:
    """Return the names that get values, those of comprehensions and functions aside."""
    found: set[str] = set()
    for node in nodes:
        for each in _inside(node, loops=True):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                found.add(each.id)
            elif isinstance(each, ast.FunctionDef | ast.ClassDef):
                found.add(each.name)
            elif isinstance(each, ast.alias):
                found.add((each.asname or each.name).split(".")[0])
    return frozenset(found)


def _loaded(nodes: Sequence[ast.AST]) -> frozenset[str]:
    return frozenset(
        each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    )


def _inside(node: ast.AST, *, loops: bool) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that are of the same function, and with `loops` those of
    loops inside it."""
    yield node
    apart = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    apart |= ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    if isinstance(node, apart) or (not loops and isinstance(node, ast.For | ast.While)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _inside(child, loops=loops)
