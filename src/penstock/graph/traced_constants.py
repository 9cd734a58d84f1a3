"""Constants: values that a step computes from constants alone are known while it is traced.

Fake tensors have none.  So what a model asks of a constant (`steps.max().item()`, a branch on a
mask, `x[mask]`) stops a trace, though it is the same number in every micro-batch.  Here the ops
that led to it are run again on real tensors, when somebody asks.

numbers      `.item()`, `.tolist()`, `bool()`: the number itself
shapes       `nonzero`, `unique`, `x[mask]`: what comes out, as a tensor that the graph holds
generators   what `torch.Generator().manual_seed(0)`, made in the step, draws: likewise
caches       what the step computes and somebody keeps (an lru_cache, a dict, a global) is made
             real afterwards, so that a plain loop in this process finds what it would have kept

A generator that the model holds, or that has drawn before, goes on from one step to the next: it
is refused.

Ignores:  one that a closure or a global holds, and that has not drawn yet (`examine/impure` sees
          that it goes on).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock import _compat
from penstock.errors import GraphError
from penstock.graph.answers import Questions
from penstock.graph.functional import arguments_of, mutates
from penstock.graph.graph import NodeKind

aten = torch.ops.aten

_MOST = 1 << 24  # elements of a value that is computed for this
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
_MASKS = (torch.bool, torch.uint8)
# what a value follows: nothing; a buffer or frozen weight; the batch alone; all else
_CONSTANT, _FIXED, _BATCH, _MOVING = range(4)


class NotConstantError(Exception):
    """A value follows the batch, the weights or chance, or is too large."""


class KnownValues(_compat.DispatchMode):
    """Answers questions about constants while it is active, inside make_fx.

    tensors:  the real inputs of the step, and of which kind each is.
    model:    whose generators last.
    asked:    notes numbers that follow the batch, which then are what they are now; None: such
              have no value.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        tensors: Sequence[Tensor],
        kinds: Sequence[NodeKind],
        asked: Questions | None = None,
    ) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.asked = asked
        self.held = {_compat.storage_key(t) for t in tensors if t.layout is torch.strided}
        values = (value for module in model.modules() for value in vars(module).values())
        self.lasting = [value for value in values if isinstance(value, torch.Generator)]
        self.model = model
        self.drawn: list[tuple[torch.Generator, Tensor]] = []  # from, and its state before
        self.results: list[weakref.ref[Tensor]] = []
        self.alive: list[tuple[weakref.ref[Tensor], fx.Node | None, int]] = []  # what it may follow
        self.kept: list[tuple[weakref.ref[Tensor], Tensor]] = []
        self.recipes = _Recipes(tensors, kinds)

    def watching(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `step` that runs under this."""

        def watched(*inputs: Tensor) -> Any:
            results: Any = ()
            try:
                with _compat.causal_masks(self._is_known), self:
                    results = step(*inputs)
            finally:
                self._note_alive({id(value) for value in (*inputs, *results)})
            return results

        return watched

    def _is_known(self, tensor: Tensor) -> bool:
        """Return whether a question about a tensor's values has an answer."""
        try:
            most = _CONSTANT if self.asked is None else _BATCH
            self.recipes.led_to(_compat.node_of(tensor), most)
        except NotConstantError:
            return False
        return True

    def make_kept_real(self) -> None:
        """Give its value to each tensor that the step computed and somebody still holds."""
        self.compute_kept()
        for generator, state in self.drawn:
            generator.set_state(state)
        for alive, value in self.kept:
            tensor = alive()
            if tensor is not None and tensor.grad_fn is None:  # else its graph holds it
                _compat.become(tensor, value)
                _made_real[id(tensor)] = tensor
        self.kept.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = self._run(func, args, dict(kwargs or {}))
        self.results += [weakref.ref(tensor) for tensor in _tensors(result)]
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if _is_own(kwargs.get("generator")):
                return self._drawn(func, args, kwargs)
            if func in _INDEXED:
                return func(args[0], self._numbered(args[1]), *args[2:], **kwargs)
            if _asks(func):
                return self._lifted(self._computed(func, args, kwargs))
        except NotConstantError:
            if self.asked is not None and _tells(func):
                return self._told(self.asked, func, args)
        return func(*args, **kwargs)

    def _told(self, asked: Questions, func: Any, args: tuple[Any, ...]) -> Any:
        """Return a number that follows the batch alone, if it does, and note that it was asked."""
        given = [_compat.node_of(one) for one in args if isinstance(one, Tensor)]
        try:
            led = [self.recipes.led_to(node, _BATCH) for node in given]
            real = _compat.pytree.tree_map_only(Tensor, self._of_batch, args)
        except NotConstantError:
            return func(*args)
        with _compat.no_modes():
            answer = func(*real)
        nodes = sorted(set[fx.Node]().union(*led), key=self.recipes.at.__getitem__)
        asked.note(func, args, {n: self.recipes.numbers.get(n, -1) for n in nodes}, answer)
        return answer

    def _of_batch(self, tensor: Tensor) -> Tensor:
        return self.recipes.value(_compat.node_of(tensor), _BATCH)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._real(args), self._real(kwargs)
        with _compat.no_modes():
            return func(*args, **kwargs)

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the numbers that an op draws now; in the graph they are a constant."""
        is_in_place = func.overloadpacket.__name__.endswith("_")
        stands_in = is_in_place or func.overloadpacket.__name__.endswith("_like")
        self._note(kwargs["generator"])
        given = (None, *self._real(args[1:])) if stands_in else self._real(args)
        with _compat.no_modes():
            drawn = func(*((_blank(args[0]), *given[1:]) if stands_in else given), **kwargs)
        return args[0].copy_(self._lifted(drawn)) if is_in_place else self._lifted(drawn)

    def _note(self, generator: torch.Generator) -> None:
        """Note that an op draws from a generator.

        Raises:   GraphError: it goes on from one step to the next.
        """
        if any(_is_one(generator, one) for one, _ in self.drawn):
            return
        state = generator.get_state()
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        lasts = any(_is_one(generator, one) for one in self.lasting)
        if lasts or not torch.equal(fresh.get_state(), state):
            message = "the model draws random numbers from a torch.Generator of its own"
            raise GraphError(message, hint="draw without `generator=`: the job's seed decides")
        self.drawn.append((generator, state))

    def _numbered(self, indices: Sequence[Any]) -> list[Any]:
        """Return indices with numbers in place of constant masks."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in _MASKS:
                mask = self._value(index)
                with _compat.no_modes():
                    places = mask.nonzero(as_tuple=True)
                found += map(self._lifted, places)
            else:
                found.append(index)
        return found

    # -- values -----------------------------------------------------------------------------------

    def _real(self, values: Any) -> Any:
        return _compat.pytree.tree_map_only(Tensor, self._value, values)

    def _value(self, tensor: Tensor) -> Tensor:
        """Return the value of a constant.

        Raises:   NotConstantError: it is none.
        """
        if _compat.is_fake(tensor):
            return self.recipes.value(_compat.node_of(tensor), _CONSTANT)
        if _compat.storage_key(tensor) in self.held:
            raise NotConstantError
        return tensor

    def _lifted(self, value: Any) -> Any:
        """Return a value with its real tensors lifted into the trace as constants of the graph."""
        return _compat.pytree.tree_map_only(Tensor, aten.lift_fresh_copy.default, value)

    def _note_alive(self, others: set[int]) -> None:
        """Note the tensors that are alive at the step's end, and what each of them may follow."""
        alive = {id(tensor): tensor for one in self.results if (tensor := one()) is not None}
        self.results.clear()
        attributes = (value for module in self.model.modules() for value in vars(module).values())
        put_back = {id(value) for value in attributes}
        for tensor in (tensor for at, tensor in alive.items() if at not in others):
            most = _FIXED if id(tensor) in put_back else _MOVING
            if (node := _compat.node_of(tensor)) is not None:
                self.recipes.look(node.graph)
            self.alive.append((weakref.ref(tensor), node, most))

    def compute_kept(self) -> None:
        """Compute the tensors that are alive though what the step gave is gone: somebody has them.

        What gradients are views of goes with them: a hundred tensors of a GPT.
        The graph has to be as it was recorded.
        """
        alive = [(one, node, most) for one, node, most in self.alive if one() is not None]
        self.alive.clear()
        values = self.recipes.values_of([(node, most) for _, node, most in alive])
        for (tensor, _, _), value in zip(alive, values, strict=True):
            if isinstance(value, Tensor):  # the op that stopped a trace may have given nothing
                self.kept.append((tensor, value))


class _Recipes:
    """What each node of the graph so far follows, and how its value is computed again."""

    def __init__(self, tensors: Sequence[Tensor], kinds: Sequence[NodeKind]) -> None:
        self.tensors, self.kinds = tensors, kinds
        self.follows: dict[fx.Node, int] = {}
        self.root: dict[fx.Node, fx.Node] = {}  # of a view, what it looks at
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        self.at: dict[fx.Node, int] = {}
        self.values: dict[fx.Node, Tensor] = {}  # of inputs
        self.read: dict[fx.Node, Any] = {}  # constants that nodes read
        self.numbers: dict[fx.Node, int] = {}  # of inputs
        self.last: fx.Node | None = None

    def value(self, node: fx.Node | None, most: int) -> Any:
        """Return the value of a node by running the ops that lead to it.

        most:     what it may follow.
        Raises:   NotConstantError: it follows more, or is too large.
        """
        needed = self.led_to(node, most)
        assert node is not None, "else nothing leads to it"
        return self._run(needed, [node])[node]

    def values_of(self, wanted: Sequence[tuple[fx.Node | None, int]]) -> list[Any]:
        """Return the values of nodes, each with what it may follow; None: it has none.

        All writers of what a node reads lead to it, so ops run once for all nodes together.
        """
        known = dict[fx.Node, set[fx.Node]]()
        for node, most in wanted:
            with suppress(NotConstantError):
                led = self.led_to(node, most)
                assert node is not None, "else nothing leads to it"
                known[node] = led
        try:
            found = self._run(set[fx.Node]().union(*known.values()), known) if known else {}
        except (IndexError, RuntimeError):  # as of ids out of range: the step itself says so
            found = dict[fx.Node, Any]()
            for node, needed in known.items():
                with suppress(IndexError, RuntimeError):
                    found |= self._run(needed, [node])
        return [None if node is None else found.get(node) for node, _ in wanted]

    def _run(self, needed: set[fx.Node], wanted: Iterable[fx.Node]) -> dict[fx.Node, Any]:
        """Return copies of the values of some nodes; needed: these, and all that led to them."""
        found: dict[fx.Node, Any] = {n: self.read[n] for n in needed if n.op == "get_attr"}
        found |= {one: self.values[one] for one in needed if one.op == "placeholder"}
        with _compat.no_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):  # pyright: ignore
            found = {one: value.clone() for one, value in found.items()}  # it may be written
            for one in sorted(needed - found.keys(), key=self.at.__getitem__):
                target: Any = one.target
                args, kwargs = fx.map_arg((one.args, one.kwargs), found.__getitem__)
                found[one] = target(*args, **kwargs)
            values = {one: found[one] for one in wanted}
            return {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}

    def led_to(self, node: fx.Node | None, most: int) -> set[fx.Node]:
        """Return a node and all that led to it.

        Raises:   NotConstantError: as `value`.
        """
        if node is None:
            raise NotConstantError
        self.look(node.graph)
        needed, todo = set[fx.Node](), [node]
        while todo:
            one = todo.pop()
            if one in needed:
                continue
            self._check(one, most)
            needed.add(one)
            todo += [*one.all_input_nodes, *self.writers.get(self.root[one], ())]
        return needed

    def _check(self, node: fx.Node, most: int) -> None:
        value, root = node.meta.get("val"), self.root[node]
        is_large = isinstance(value, Tensor) and not _is_small(value)
        is_written = most < _MOVING and root.op == "placeholder" and root in self.writers
        levels = {self.follows[node], self.follows[root]}
        beside = most == _BATCH and _FIXED in levels
        if max(levels) > most or beside or is_large or is_written:
            raise NotConstantError

    def look(self, graph: fx.Graph) -> None:
        """Note what has been recorded since the last time."""
        nodes = iter(graph.nodes) if self.last is None else _after(self.last)
        for node in nodes:
            self.at[node] = len(self.at)
            self.root[node], written = node, list[fx.Node]()
            if node.op == "placeholder":
                self._input(node)
            else:
                if node.op == "get_attr":
                    self.read[node] = _compat.traced_constant(node)
                inputs = (self.follows[self.root[one]] for one in node.all_input_nodes)
                own = _MOVING if _moves(node) else _CONSTANT
                self.follows[node] = max(own, *inputs, _CONSTANT)
                written = self._aliases(node)
            for root in written:
                self.writers.setdefault(root, []).append(node)
                self.follows[root] = max(self.follows[root], self.follows[node])
            self.last = node

    def _input(self, node: fx.Node) -> None:
        at = len(self.values)
        tensor, kind = self.tensors[at], self.kinds[at]
        self.values[node], self.numbers[node] = tensor, at
        is_fixed = kind == "buffer" or (kind == "parameter" and not tensor.requires_grad)
        self.follows[node] = _FIXED if is_fixed else _BATCH if kind == "input" else _MOVING

    def _aliases(self, node: fx.Node) -> list[fx.Node]:
        """Note the tensors behind a node's views; return the roots that it writes into."""
        written: list[fx.Node] = []
        if _compat.schema_of(node.target) is None:  # one of several results
            self.root[node] = self.root[node.all_input_nodes[0]] if node.all_input_nodes else node
        for argument, value in arguments_of(node):
            if argument.alias_info is None:
                continue
            for one in value if isinstance(value, list | tuple) else (value,):  # pyright: ignore
                if isinstance(one, fx.Node):
                    self.root[node] = self.root[one]
                    written += [self.root[one]] if argument.alias_info.is_write else []
        statistics = node.args[3:5] if mutates(node) else ()
        return written + [self.root[one] for one in statistics if isinstance(one, fx.Node)]


def _is_small(value: Tensor) -> bool:
    """Return whether a traced value is known to have few elements; its sizes may be data's."""
    is_known = not any(isinstance(size, torch.SymInt) for size in value.shape)
    return is_known and value.numel() <= _MOST


def _after(node: fx.Node) -> Iterator[fx.Node]:
    node = node.next
    while node.op != "root":
        yield node
        node = node.next


def _moves(node: fx.Node) -> bool:
    """Return whether a node gives other values by chance, or is not an op that is known."""
    if node.op == "get_attr" or getattr(node.target, "__name__", "") == "getitem":
        return False
    tags: Sequence[Any] = getattr(node.target, "tags", ())
    is_op = hasattr(node.target, "overloadpacket")
    return not is_op or torch.Tag.nondeterministic_seeded in tags


@cache
def _asks(func: Any) -> bool:
    """Return whether a result, or its shape, is that of values."""
    tags: Sequence[Any] = getattr(func, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _tells(func: Any) -> bool:
    """Return whether a result is a number of Python's."""
    return torch.Tag.data_dependent_output in getattr(func, "tags", ())


def _is_own(generator: Any) -> bool:
    return isinstance(generator, torch.Generator) and generator is not torch.default_generator


def _is_one(generator: torch.Generator, other: torch.Generator) -> bool:
    """Return whether two Python objects are one generator, which moves both."""
    state, its = generator.get_state(), other.get_state()
    if generator.device != other.device or not torch.equal(state, its):
        return False
    generator.manual_seed(generator.initial_seed() ^ 1)
    is_one = not torch.equal(other.get_state(), its)
    generator.set_state(state)
    return is_one


def _blank(tensor: Tensor) -> Tensor:
    """Return memory that is laid out as that of a tensor."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        yield from (one for one in result if isinstance(one, Tensor))  # pyright: ignore


_made_real: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()


def was_traced(tensor: Tensor) -> bool:
    """Return whether a trace has made a tensor that somebody has kept, real by now or not."""
    return _compat.is_fake(tensor) or _made_real.get(id(tensor)) is tensor
