"""Linear: how the value that a traced step writes into a buffer follows from the value before.

A value is linear in a buffer if it is L(old) + x: L is the same for every micro-batch, and x does
not depend on the buffer.  That is read off the ops between the two, each by a rule that says in
which of its arguments it is linear, and which others then have to be constants: numbers, tensors
that a step does not change.  What has no rule, and a rule whose others depend on the batch or on
weights (a mask, a share by a count), leaves nothing but the order.

Ignores:  what L is: it has to be found by trying (state/laws/buffers.py).
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from penstock import _compat
from penstock.graph.functional import BACKWARD_OF_HIDDEN, custom, mutates
from penstock.graph.graph import Node
from penstock.graph.trace import Capture

Form = Mapping[str, str]  # by buffer: why a value is not linear in it; "": it is
_EXACT = ("float32", "float64")
_STATISTICS = slice(3, 5)  # where a batch norm and its backward take the running statistics
_ALL = ("*",)  # all other arguments have to be constants

# Ops that are linear in `self`, the others constant: most only move elements, or add some up.
_OF_ONE = (
    *("alias", "as_strided", "clone", "constant_pad_nd", "contiguous", "cumsum", "detach"),
    *("diagonal", "expand", "flip", "lift_fresh", "lift_fresh_copy", "mean", "narrow", "neg"),
    *("permute", "pixel_shuffle", "positive", "repeat", "reshape", "_reshape_alias", "roll"),
    *("select", "slice", "split", "split_with_sizes", "squeeze", "sum", "t", "_to_copy"),
    *("transpose", "tril", "triu", "unbind", "unfold", "_unsafe_view", "unsqueeze", "view"),
    *("index_select", "gather", "index", "take", "div", "true_divide", "_conj", "movedim"),
)
_PAIR = {"self": ("other",), "other": ("self",)}
_PLACED = {"self": (), "src": ()}
_CHOSEN = {"self": ("condition",), "other": ("condition",)}

# In which arguments an op is linear, and which others have to be constants where one depends.
_RULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **{name: {"self": _ALL} for name in _OF_ONE},
    **{name: {"self": (), "other": ()} for name in ("add", "sub", "rsub")},
    **dict.fromkeys(("select_scatter", "slice_scatter", "diagonal_scatter"), _PLACED),
    **{name: {"tensors": ()} for name in ("cat", "stack")},
    "as_strided_scatter": _PLACED,
    "mul": _PAIR,
    "where": _CHOSEN,
    "copy": {"src": ()},
    "fill": {"value": ()},
    "lerp": {"self": ("weight",), "end": ("weight",)},
    "addcmul": {"self": (), "tensor1": ("tensor2",), "tensor2": ("tensor1",)},
    "addcdiv": {"self": (), "tensor1": ("tensor2",)},
    "mm": {"self": ("mat2",), "mat2": ("self",)},
    "bmm": {"self": ("mat2",), "mat2": ("self",)},
    "addmm": {"self": (), "mat1": ("mat2",), "mat2": ("mat1",)},
    "scatter_add": {"self": (), "src": ("index",)},
    "index_add": {"self": (), "source": ("index",)},
    "scatter": {"self": ("index",), "src": ("index",), "value": ("index",)},
    "index_copy": {"self": ("index",), "source": ("index",)},
    "index_fill": {"self": ("index",), "value": ("index",)},
    "masked_fill": {"self": ("mask",), "value": ("mask",)},
}
_PUT = {"self": ("indices",), "values": ("indices",)}
_ADDED = {"self": (), "values": ("indices",)}  # whatever the places are
_FOREACH, _NAMES = "_foreach_", {"tensors1": "end", "weights": "weight"}

# Of these arguments an op takes nothing but the shape.
_SHAPES = {"copy": ("self",), "fill": ("self",)}
_OF_A_SHAPE = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")


def crooked(capture: Capture) -> dict[str, str]:
    """Return for each buffer that a step writes the reason why it has no linear law, or "".

    A reason is that the next value is not linear in the old one, or that something else depends
    on the old one too.
    """
    graph = capture.graph
    written = {graph.nodes[at].name for at in graph.written}
    if not written:
        return {}
    forms = _Forms(capture, written)
    found = {name: forms.written.get(name, {}).get(name, "") for name in sorted(written)}
    for what, form in (*_told(capture, forms), *_others(forms)):
        for name in form:
            found[name] = found[name] or f"{what} depends on it"
    for name in written:
        before = forms.written.get(name, {}).keys() - {name}
        if before and not found[name]:
            found[name] = f"it depends on {min(before)}"
    return found


def _told(capture: Capture, forms: "_Forms") -> Iterator[tuple[str, Form]]:
    """Yield each result of a step with the buffers that it depends on."""
    graph = capture.graph
    yield "the loss", forms.at(graph.loss)
    for name, node in graph.figures:
        yield f"the figure {name}", forms.at(node)
    for name, node in graph.gradients.items():
        if node is not None:
            yield f"the gradient of {name}", forms.at(node)


def _others(forms: "_Forms") -> Iterator[tuple[str, Form]]:
    """Yield every written buffer, and on which others it depends."""
    for name, form in forms.written.items():
        yield name, {other: why for other, why in form.items() if other != name}


class _Forms:
    """The form of each value of a step in the buffers that it writes.

    written:  the form of what is written, by buffer.
    """

    def __init__(self, capture: Capture, names: set[str]) -> None:
        self.nodes, rows = capture.fx_nodes, capture.graph.nodes
        self.dtypes = {node: row.dtype for node, row in zip(self.nodes, rows, strict=True)}
        self.storage = {node: row.storage for node, row in zip(self.nodes, rows, strict=True)}
        self.of: dict[fx.Node, Form | Sequence[Form]] = {}
        self.constant: set[fx.Node] = set()
        self.written: dict[str, Form] = {}
        self.buffers: dict[fx.Node, str] = {}
        for node, row in zip(self.nodes, rows, strict=True):
            if row.kind == "buffer" and row.name in names:
                self.buffers[node], self.of[node] = row.name, {row.name: ""}
            elif row.kind in ("buffer", "constant"):
                self.constant.add(node)
            elif row.kind == "op":
                self._op(node, row)

    def at(self, index: int) -> Form:
        """Return the form of a node of the graph."""
        return self._form(self.nodes[index])

    def _form(self, value: Any) -> Form:
        """Return the form of an argument: of all that it holds together."""
        found: dict[str, str] = {}
        for node in _nodes_in(value):
            form = self.of.get(node, {})
            for one in [form] if isinstance(form, Mapping) else form:
                found |= {name: why or found.get(name, "") for name, why in one.items()}
        return found

    def _op(self, node: fx.Node, row: Node) -> None:
        inputs = node.all_input_nodes
        others = inputs[1:] if _name(node).endswith(_OF_A_SHAPE) else inputs
        if row.effect == "pure" and self.constant.issuperset(others):
            self.constant.add(node)
        if not any(self.of.get(one) for one in inputs):
            return
        if mutates(node):
            self._normalized(node)
        elif node.target in BACKWARD_OF_HIDDEN and _is_training(node):
            args = (*node.args[: _STATISTICS.start], *node.args[_STATISTICS.stop :])
            self.of[node] = _bent(self._form(args), _why(node))
        elif row.effect == "writes":
            self._write(inputs[0], self._kept(self._form(node.args[1]), node.args[1], node))
        elif node.target is operator.getitem:
            whole: Any = self.of[inputs[0]]
            self.of[node] = whole if isinstance(whole, Mapping) else whole[node.args[1]]
        else:
            self.of[node] = self._made(node)

    def _write(self, buffer: fx.Node, form: Form) -> None:
        name = self.buffers[buffer]
        again = name in self.written
        self.written[name] = {**form, name: "it is written in two ways"} if again else form

    def _normalized(self, node: fx.Node) -> None:
        """Note a batch norm in training: its output does not depend on its statistics."""
        read = _bent(self._form(node.args[: _STATISTICS.start]), _why(node))
        self.of[node] = read
        for statistics in node.args[_STATISTICS]:
            if not isinstance(statistics, fx.Node):
                continue
            form = {**self._form(statistics), **read}
            place = self.storage[statistics]
            self.of |= dict.fromkeys((n for n in self.of if self.storage[n] == place), form)
            if statistics in self.buffers:
                self.written[self.buffers[statistics]] = form

    def _made(self, node: fx.Node) -> Form | Sequence[Form]:
        """Return the form of the result of an op without effects."""
        schema, name = _compat.schema_of(node.target), _name(node)
        if schema is None:
            return _bent(self._form((node.args, node.kwargs)), _why(node))
        named = ((one.name, value) for one, value in zip(schema.arguments, node.args, strict=False))
        args: dict[str, Any] = {**dict(named), **node.kwargs}
        if name.endswith(_OF_A_SHAPE):
            return {}
        if not name.startswith(_FOREACH):
            return self._by_rule(node, name, args)
        count = len(args["self"])
        args = {_NAMES.get(key, key): value for key, value in args.items()}
        return [
            self._by_rule(node, name.removeprefix(_FOREACH), _member(args, at, count))
            for at in range(count)
        ]

    def _by_rule(self, node: fx.Node, name: str, args: Mapping[str, Any]) -> Form:
        rule = _RULES.get(name, {})
        if name in ("index_put", "_index_put_impl", "_unsafe_index_put"):
            rule = _ADDED if args.get("accumulate") is True else _PUT
        found: dict[str, str] = {}
        for key, value in args.items():
            form = self._form(() if key in _SHAPES.get(name, ()) else value)
            others = [args.get(other) for other in rule.get(key, ())]
            if rule.get(key) == _ALL:
                others = [one for other, one in args.items() if other != key]
            if key not in rule or args.get("rounding_mode") is not None:
                form = _bent(form, _why(node))
            elif not self.constant.issuperset(_nodes_in(others)):
                form = _bent(form, f"how much of it stays is up to the data ({_place(node)})")
            else:
                form = self._kept(form, value, node)
            found |= {buffer: why or found.get(buffer, "") for buffer, why in form.items()}
        return found

    def _kept(self, form: Form, source: Any, node: fx.Node) -> Form:
        """Return a form, bent where a conversion of dtypes loses something of the value."""
        new, olds = self.dtypes[node], {self.dtypes[one] for one in _nodes_in(source)}
        if not form or new == "" or all(_is_kept(old, new) for old in olds if old):
            return form
        return _bent(form, f"it is rounded to {new} on the way ({_place(node)})")


def _is_kept(old: str, new: str) -> bool:
    if old == new or new in _EXACT:
        return True
    whole = [getattr(torch, name) for name in (old, new)]
    return not any(dtype.is_floating_point or dtype.is_complex for dtype in whole) and new != "bool"


def _bent(form: Form, why: str) -> Form:
    return {name: before or why for name, before in form.items()}


def _why(node: fx.Node) -> str:
    return f"its next value is not a constant * old + new ({_place(node)})"


def _place(node: fx.Node) -> str:
    """Return an op and the module that it is in, in words."""
    module = custom(node).get("module")
    return f"{_name(node).strip('_')}{f' in {module}' if module else ''}"


def _name(node: fx.Node) -> str:
    schema = _compat.schema_of(node.target)
    return str(node.target) if schema is None else schema.name.partition("::")[2]


def _is_training(node: fx.Node) -> bool:
    """Return whether it is the backward of a batch norm in training; cudnn has no other."""
    native = node.target is torch.ops.aten.native_batch_norm_backward.default
    return not native or bool(node.args[7])


def _member(args: Mapping[str, Any], at: int, count: int) -> dict[str, Any]:
    """Return the arguments of the op for one of the lists' members."""
    return {
        key: value[at] if isinstance(value, list | tuple) and len(value) == count else value  # pyright: ignore[reportUnknownArgumentType]
        for key, value in args.items()
    }


def _nodes_in(value: Any) -> list[fx.Node]:
    leaves = _compat.pytree.tree_leaves(value, is_leaf=lambda one: isinstance(one, fx.Node))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
