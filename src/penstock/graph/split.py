"""Split: a step of which huge parameters are cut along their rows, so that no op reads one whole.

    before   logits = x @ head.T                       loss = cross_entropy(logits, targets)
    after    logits 1 = x @ (head, rows 0 to 255).T    greatest, sum and target's so far
             logits 2 = x @ (head, rows 256 to ...).T  the same, carried on          ...  loss

A slice is a parameter of its own, called by its part of the whole one (graph/parts.py); behind each
there is a cut point, so that a slice can be a stage: gathered, loaded, repeated, updated alone.

Keeps:   loss, gradients (each slice has the rows of the whole one's) and buffers, to rounding: sums
         over slices are made in another order.  Embeddings and their gradients are kept to the bit.
Gains:   what is gathered of a parameter, its gradient and, behind a head, logits and their gradient
         at once: all but one slice of them.
Costs:   calls; a few passes over the logits more than log-softmax takes; an embedding looks each
         token up in every slice.
Source:  operator splitting: OSDP, arXiv:2209.13258.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from torch import fx
from torch.fx.node import map_aggregate

from penstock.errors import GraphError
from penstock.graph.by_rows import LOSS_BACKWARD
from penstock.graph.cut_points import find_cut_points
from penstock.graph.dims import PRODUCTS, SUMS, VIEWS, is_elementwise
from penstock.graph.functional import results_of
from penstock.graph.graph import Graph, Node, NodeKind, with_cut_points
from penstock.graph.parts import key_in, part_key
from penstock.graph.rows import Placeholder, rows_of
from penstock.graph.sliced_embedding import embedding, embedding_backward
from penstock.graph.sliced_loss import (
    joined_backward,
    log_softmax,
    log_softmax_backward,
    loss,
    loss_backward,
)
from penstock.graph.sliced_ops import (
    elementwise,
    product,
    summed,
    viewed,
    wanted_of,
)
from penstock.graph.slicing import Ends, NewNode, Slicing, State, aten, ends_of
from penstock.graph.trace import Capture


def split(capture: Capture, slices: Mapping[str, int]) -> Capture:
    """Return `capture` with parameters cut along their rows: by name, the number of slices.

    The bias of a product is cut with its weight.  Nothing to cut returns `capture` itself.
    Raises:   GraphError: no such parameter, too few rows, or an op reads all of it at once.
    """
    if not slices:
        return capture
    if capture.graph.slices:
        message = f"the step is cut into slices already: {dict(capture.graph.slices)}"
        raise GraphError(message, hint="split the step that was traced")
    shapes = {n.name: n.shape for n in capture.graph.nodes if n.kind == "parameter"}
    ends: dict[str, Ends] = {}
    for name, count in slices.items():
        if name not in shapes or not shapes[name]:
            raise GraphError(f"there is no parameter {name} with rows", hint="name another one")
        if count < 2:
            raise GraphError(f"{name} in {count} slices", hint="take 2 or more")
        ends[name] = ends_of(shapes[name][0], count)
    for name in list(ends):
        ends |= dict.fromkeys(_biases(capture, name), ends[name])
    slicing = Slicing(capture, ends, _ruled, wanted_of(capture, ends))
    results = _results(capture, slicing)
    return _captured(capture, _ordered(slicing, results), results, ends)


def _ruled(made: Slicing, node: fx.Node) -> State | None:
    """Return the result of an op on slices; None: the op takes whole tensors only."""
    match node.target:
        case aten.embedding.default:
            return embedding(made, node)
        case aten.embedding_dense_backward.default:
            return embedding_backward(made, node)
        case aten._log_softmax.default:
            return log_softmax(made, node)
        case aten._log_softmax_backward_data.default:
            return log_softmax_backward(made, node)
        case aten.nll_loss_forward.default:
            return loss(made, node)
        case aten.nll_loss_backward.default:
            return loss_backward(made, node)
        case target if target is LOSS_BACKWARD:
            return joined_backward(made, node)
        case target if target in PRODUCTS:
            return product(made, node)
        case target if target in SUMS:
            return summed(made, node)
        case target if target in VIEWS:
            return viewed(made, node)
        case target:
            return elementwise(made, node) if is_elementwise(target) else None


def _biases(capture: Capture, name: str) -> list[str]:
    """Return the parameters that are added to products with the rows of a weight."""
    rows = dict(zip(capture.fx_nodes, capture.graph.nodes, strict=True))
    found: list[str] = []
    for node in capture.fx_nodes:
        if node.target is aten.addmm.default:
            bias, _, weight = (_parameter_behind(each) for each in node.args)
            if bias is not None and weight is not None and rows[weight].name == name:
                alike = rows[bias].shape == rows[weight].shape[:1]
                found += [rows[bias].name] if alike and rows[bias].kind == "parameter" else []
    return found


def _parameter_behind(value: Any) -> fx.Node | None:
    """Return the input that a value is made of alone."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        if len(value.all_input_nodes) != 1:
            return None
        value = value.all_input_nodes[0]
    return value if isinstance(value, fx.Node) else None


# -- the new step ---------------------------------------------------------------------------------


class _Results(NamedTuple):
    """What the new step returns: the loss, gradients by parameter, figures."""

    loss: NewNode
    gradients: dict[str, NewNode | None]
    figures: list[NewNode]

    @property
    def items(self) -> list[NewNode | None]:
        """Return loss, gradients and figures in the order in which a step returns them."""
        return [self.loss, *self.gradients.values(), *self.figures]


def _results(capture: Capture, slicing: Slicing) -> _Results:
    loss, *others = results_of(capture.fx_nodes[0].graph)
    names = list(capture.graph.gradients)
    gradients: dict[str, NewNode | None] = {}
    for name, node in zip(names, others, strict=False):
        if name not in slicing.ends:
            gradients[name] = None if node is None else slicing.whole(node, node)
            continue
        own = _part_names(capture.graph, name, slicing.ends[name])
        gradients |= dict.fromkeys(own)
        if node is not None:
            gradients |= zip(own, slicing.gradient(name, node), strict=True)
    figures = [slicing.whole(node, node) for node in others[len(names) :]]
    return _Results(slicing.whole(loss, loss), gradients, figures)


def _part_names(graph: Graph, name: str, ends: Sequence[int]) -> list[str]:
    """Return the names of the slices of a parameter."""
    shape = next(n.shape for n in graph.nodes if n.kind == "parameter" and n.name == name)
    return [part_key(name, start * prod(shape[1:]), shape) for start in (0, *ends[:-1])]


def _ordered(slicing: Slicing, results: _Results) -> list[NewNode]:
    """Return the items that are needed in the order of the new step, each behind all that it reads.

    Raises:   GraphError: ops that draw random numbers, or change a buffer, would change places.
    """
    kept = [i for i in slicing.items if i.kind == "placeholder" or i.target is aten.copy_.default]
    needed, stack = set[int](), [*kept, *(i for i in results.items if i is not None)]
    while stack:
        item = stack.pop()
        if id(item) not in needed:
            needed.add(id(item))
            stack += _read(item)
    placed = [(item.place, item) for item in slicing.items if item.place and id(item) in needed]
    placed.sort(key=lambda row: (row[1].kind != "placeholder", row[0]))
    found: dict[int, NewNode] = {}
    for _, item in placed:
        stack = [item]
        while stack:
            missing = [each for each in _read(stack[-1]) if id(each) not in found]
            if missing:
                stack += missing
            else:
                top = stack.pop()
                found.setdefault(id(top), top)
    return list(found.values())


def _read(item: NewNode) -> list[NewNode]:
    found: list[NewNode] = []

    def note(given: Any) -> None:
        if isinstance(given, NewNode):
            found.append(given)

    map_aggregate((item.args, dict(item.kwargs)), note)  # pyright: ignore
    return found


def _captured(
    capture: Capture, items: Sequence[NewNode], results: _Results, ends: Mapping[str, Ends]
) -> Capture:
    """Return the capture of a step of these items."""
    graph, made = fx.Graph(), dict[int, fx.Node]()

    def there(given: Any) -> Any:
        return made[id(given)] if isinstance(given, NewNode) else given

    for item in items:
        args, kwargs = map_aggregate((item.args, dict(item.kwargs)), there)  # pyright: ignore
        target = f"input{len(made)}" if item.kind == "placeholder" else item.target
        node = graph.create_node(item.kind, target, args, kwargs)
        node.meta["val"], node.meta["custom"] = item.value, item.notes
        made[id(item)] = node
    graph.output([there(item) for item in results.items])
    nodes = rows_of(graph, _placeholders(capture.graph, items, ends))
    _check_effects(capture.graph, nodes, [item.copied for item in items])
    new = _graph(capture.graph, nodes, {id(item): i for i, item in enumerate(items)}, results)
    inputs = [i for i, node in enumerate(nodes) if node.kind == "input"]
    held = {capture.fx_nodes[i].target: value for i, value in capture.constants.items()}
    return replace(
        capture,
        graph=with_cut_points(new, find_cut_points(new)),
        fx_nodes=tuple(made[id(item)] for item in items),
        inputs=dict(zip(inputs, capture.inputs.values(), strict=True)),
        constants={i: held[x.target] for i, x in enumerate(items) if x.kind == "get_attr"},
    )


def _graph(
    old: Graph, nodes: tuple[Node, ...], index: Mapping[int, int], results: _Results
) -> Graph:
    """Return the graph of the new step, without cut points."""
    gradients = results.gradients.items()
    figures = zip(old.figures, results.figures, strict=True)
    return replace(
        old,
        nodes=nodes,
        loss=index[id(results.loss)],
        gradients={name: None if item is None else index[id(item)] for name, item in gradients},
        cut_points=(),
        figures=tuple((name, index[id(item)]) for (name, _), item in figures),
        masters=_masters(old, nodes),
    )


def _placeholders(
    graph: Graph, items: Sequence[NewNode], ends: Mapping[str, Ends]
) -> list[Placeholder]:
    """Return the meaning of each input of the new step."""
    kinds: dict[str, NodeKind] = {n.name: n.kind for n in graph.nodes if n.kind != "op"}
    parts = {name: iter(_part_names(graph, name, row)) for name, row in ends.items()}
    names = (item.name for item in items if item.kind == "placeholder")
    return [
        Placeholder(next(parts[name]) if name in parts else name, kinds[name]) for name in names
    ]


def _masters(graph: Graph, nodes: Sequence[Node]) -> dict[str, int]:
    """Return the bytes of parameters that are kept in more bits than the step reads."""
    found: dict[str, int] = {}
    for node in nodes:
        name = key_in(node.name)
        if node.kind == "parameter" and name in graph.masters:
            whole = next(n for n in graph.nodes if n.kind == "parameter" and n.name == name)
            found[node.name] = graph.masters[name] * prod(node.shape) // prod(whole.shape)
    return found


def _check_effects(graph: Graph, nodes: Sequence[Node], copied: Sequence[int]) -> None:
    """Raise where random ops, which are numbered as they come, would change places.

    copied:  which op of the recorded step each node is.
    """
    old = [number for number, node in enumerate(graph.nodes) if node.effect == "random"]
    new = [which for which, node in zip(copied, nodes, strict=True) if node.effect == "random"]
    if old != new:
        message = "cut into slices, the step would draw other random numbers"
        raise GraphError(message, hint="leave the parameters whole")
