"""Code: a Segment as a Python function that calls its ATen ops one after another.

The function takes one list, which it empties, so that every input is freed at its last use;
locals are deleted as soon as nothing reads them.  Random ops draw from a generator that is
seeded for each op from the micro-batch and the op's number, so the same micro-batch draws the
same numbers however the step is cut, repeated or ordered.
"""

import operator
import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.device import here
from penstock.graph.by_rows import LOSS_BACKWARD, loss_backward
from penstock.graph.direct import DIRECT, LAID_OTHERWISE, laid, order_of
from penstock.graph.functional import HIDDEN_MUTATIONS
from penstock.graph.stages import Segment
from penstock.graph.tensor.collect_op import COLLECT, rank_args
from penstock.graph.trace import Capture

aten = torch.ops.aten

# Ops that keep what their backward reads only in grad mode, which a run has switched off.
IN_GRAD_MODE = (aten.mkldnn_rnn_layer.default,)

# Ops whose traced form returns a contiguous tensor, whatever the layout of its argument.
_DRAWN_IN_ORDER = (aten.bernoulli_.float,)


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A segment ready to be called: `run([*statics, *batch leaves, *values], seed)`.

    With `asks`, a function without arguments stands for each parameter among the statics: it is
    called when the parameter is first read, and what it returns is freed after the last use.

    statics:  nodes that stay the same for many micro-batches: parameters, buffers, constants
              and the gradient's scale.
    leaves:   nodes of the batch.
    values:   nodes from messages and earlier segments, those that die here first.
    outputs:  nodes whose values are returned, in order.
    """

    run: Callable[[list[Any], int], tuple[Any, ...]]
    statics: tuple[int, ...]
    leaves: tuple[int, ...]
    values: tuple[int, ...]
    outputs: tuple[int, ...]
    source: str


class Fused(NamedTuple):
    """Consecutive ops of a segment that one call computes.

    call:  takes the values of `inputs` as one list, which it empties; returns those of `outputs`.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: Callable[[list[Any]], Sequence[Any]]


def function_of(
    segment: Segment, capture: Capture, *, asks: bool = False, fused: Sequence[Fused] = ()
) -> Function:
    """Return the function of one segment; `asks`: for each parameter when it is needed.

    fused:  runs of its ops that are called as one; they read no parameter that is asked for.
    """
    nodes = capture.graph.nodes
    computed = set(segment.ops)
    read = {k for i in segment.ops for k in nodes[i].inputs} - computed
    outputs = outputs_of(segment, capture)
    read |= {v for v in outputs if v not in computed}
    values = (*segment.takes, *(v for v in segment.inputs if v not in set(segment.takes)))
    leaves = tuple(sorted(v for v in read if nodes[v].kind == "input" and v not in values))
    kinds = ("parameter", "buffer", "scale", "constant")
    statics = tuple(sorted(v for v in read if nodes[v].kind in kinds))
    missing = read - set(values) - set(leaves) - set(statics)
    assert not missing, f"segment {segment.kind} reads {sorted(missing)} from nowhere"
    asked = {v for v in statics if asks and nodes[v].kind == "parameter"}
    writer = _Writer(capture, segment, asked, fused)
    lines, names = writer.body((*statics, *leaves, *values), outputs)
    source = "def run(inputs, seed):\n" + "\n".join(f"    {line}" for line in lines) + "\n"
    exec(compile(source, f"<segment {segment.kind}>", "exec"), names)  # our own text
    return Function(names["run"], statics, leaves, values, outputs, source)


def outputs_of(segment: Segment, capture: Capture) -> tuple[int, ...]:
    """Return the results of a segment's function: values sent, values kept, gradients, the loss."""
    sent = (v for _, values in segment.sends for v in values)
    inputs = set(segment.inputs)
    kept = (v for v in segment.keeps if v not in inputs)
    gradients = (v for _, v in segment.gradients)
    told = (v for v in segment.ops if v in capture.graph.told)
    return tuple(dict.fromkeys((*sent, *kept, *gradients, *told)))


class _Writer:
    """Writes the lines of a segment's function, and the names that they use."""

    def __init__(
        self,
        capture: Capture,
        segment: Segment,
        asked: AbstractSet[int],
        fused: Sequence[Fused] = (),
    ) -> None:
        self.capture, self.segment, self.asked = capture, segment, asked
        self.own = frozenset(segment.ops)
        self.fused = {op: run for run in fused for op in run.ops}
        self.index = {node: i for i, node in enumerate(capture.fx_nodes)}
        self.names: dict[str, Any] = {"_reseed": reseed, "_generator": _compat.GENERATOR}
        rows = enumerate(capture.graph.nodes)
        self.ordinals = {
            i: k for k, i in enumerate(i for i, node in rows if node.effect == "random")
        }

    def body(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> tuple[list[str], dict[str, Any]]:
        last = self._last_uses(inputs, outputs)
        dead: dict[int, list[str]] = {}
        for value, place in last.items():
            dead.setdefault(place, []).append(f"n{value}")
        lines = [f"{''.join(f'n{i}, ' for i in inputs)}= inputs"] if inputs else []
        lines.append("inputs.clear()")
        unused = [i for i in inputs if i not in last and i not in outputs]
        lines += [f"del {', '.join(f'n{i}' for i in unused)}"] if unused else []
        due = set(self.asked)
        for op in self.segment.ops:
            if (run := self.fused.get(op)) is not None:
                lines += self._run_lines(run, dead.get(op, [])) if op == run.ops[-1] else []
                continue
            first = due.intersection(self.capture.graph.nodes[op].inputs)
            lines += [f"n{i} = n{i}()" for i in sorted(first)]
            due -= first
            line = f"n{op} = {self._call(op)}"
            if op in self.ordinals:
                lines.append(f"with _generator: _reseed(seed, {self.ordinals[op]}); {line}")
            else:
                lines.append(line)
            lines += [f"del {', '.join(dead[op])}"] if op in dead else []
        lines += [f"n{i} = n{i}()" for i in sorted(due.intersection(outputs))]
        lines.append(f"return ({''.join(f'n{i}, ' for i in outputs)})")
        return lines, self.names

    def _run_lines(self, run: Fused, dead: Sequence[str]) -> list[str]:
        """Return the lines that call a run; nothing but its arguments holds what dies in it."""
        given, made = ([f"n{i}" for i in values] for values in (run.inputs, run.outputs))
        name = self._name(f"run{run.ops[0]}", run.call)
        dying = [each for each in dead if each in given]
        return [
            f"arguments = [{', '.join(given)}]",
            *([f"del {', '.join(dying)}"] if dying else []),
            f"{''.join(f'{each}, ' for each in made)}= {name}(arguments)",
        ]

    def _last_uses(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict[int, int]:
        """Return for each value that is not returned the op after which it is dead.

        A run ends with its last op, and what it only has inside was never there.
        """
        last: dict[int, int] = {}
        inside = {op for run in self.fused.values() for op in {*run.ops} - {*run.outputs}}
        known = (set(inputs) | set(self.segment.ops)) - inside
        for op in self.segment.ops:
            run = self.fused.get(op)
            place = op if run is None else run.ops[-1]
            for source in (op, *self.capture.graph.nodes[op].inputs):
                if source in known:
                    last[source] = place
        return {i: place for i, place in last.items() if i not in set(outputs)}

    def _call(self, op: int) -> str:
        node = self.capture.fx_nodes[op]
        if node.target is COLLECT and self.index[node.all_input_nodes[0]] not in self.own:
            return self._text(node.args[0])  # it came so from another stage
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        name = re.sub(r"\W", "_", f"op_{node.target}")  # also "<built-in function add>", of sizes
        target = self._name(name, callable_of(node.target))
        args = list(rank_args(node, self.capture.rank))
        repeats = self.segment.kind != "F" and self.capture.graph.nodes[op].effect == "mutates"
        if repeats and node.target in HIDDEN_MUTATIONS:
            args[3] = args[4] = None  # a repeated batch norm leaves the running statistics alone
        parts = [self._text(arg) for arg in args]
        parts += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        call = f"{target}({', '.join(parts)})"
        if node.target in LAID_OTHERWISE:
            return f"{self._name('_laid', laid)}({call}, {order_of(node.meta['val'])})"
        return call

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"n{self.index[value]}"
        if isinstance(value, list | tuple):
            texts = map(self._text, value)  # pyright: ignore[reportUnknownArgumentType]
            return f"[{', '.join(texts)}]"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._name(f"c{len(self.names)}", value)

    def _name(self, name: str, value: Any) -> str:
        self.names[name] = value
        return name


def callable_of(target: Any) -> Callable[..., Any]:
    """Return the function that computes an op of a traced step while grad mode is off."""
    if target in DIRECT:
        return DIRECT[target]
    if target is LOSS_BACKWARD:  # past the dispatcher
        return loss_backward
    if target not in IN_GRAD_MODE:
        return target

    def in_grad_mode(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return target(*args, **kwargs)

    return in_grad_mode


_SEEDS, _OF_SEED, _OF_NUMBER = 2**63, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def micro_batch_seed(seed: int, micro_batch: int) -> int:
    """Return the seed of the random ops of micro-batch `micro_batch` of the whole run."""
    return (seed * _OF_SEED + micro_batch * _OF_NUMBER + 1) & (_SEEDS - 1)


def seed_ahead(seed: int, count: int) -> int:
    """Return the seed by which micro-batch k draws what micro-batch k + count draws by `seed`.

    There is always one: the factor of seeds is odd.
    """
    return (seed + count * _OF_NUMBER * pow(_OF_SEED, -1, _SEEDS)) % _SEEDS


def reseed(seed: int, ordinal: int) -> None:
    """Seed torch's generators for one random op.  Splitmix64 of seed and ordinal."""
    mixed = (seed + (ordinal + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    value = (mixed ^ (mixed >> 31)) >> 1
    torch.default_generator.manual_seed(value)
    here().seed(value)


class SeededRandom(_compat.DispatchMode):
    """Eager code under this mode draws what the traced step draws for that micro-batch.

    Random ops are numbered as they come.  In a backward pass, one that finds torch's generator in
    the state that an op of the forward pass found has that op's number: `torch.utils.checkpoint`
    puts the state back before it computes again, and must draw the same again.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.seed, self.count = seed, 0
        self.numbers: dict[bytes, int] = {}  # of each op, by the generator's state before it

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        if not _compat.draws_random(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        with _compat.GENERATOR:
            before, number = torch.default_generator.get_state().numpy().tobytes(), self.count
            if _compat.in_backward():
                number = self.numbers.get(before, number)
            self.numbers.setdefault(before, number)
            self.count = max(self.count, number + 1)
            reseed(self.seed, number)
            return _drawn(func, args, kwargs or {})


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if not _compat.schema_of(func).is_mutable or args[0].is_contiguous():
        return func(*args, **kwargs)
    # A traced op draws into a new tensor; one drawn in place goes by the order in memory.
    new = args[0].contiguous() if func in _DRAWN_IN_ORDER else args[0].clone()
    return args[0].copy_(func(new, *args[1:], **kwargs))
