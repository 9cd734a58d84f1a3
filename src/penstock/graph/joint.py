"""Joint: the weight gradients of several micro-batches at once, each product of matrices once.

A gradient that is a sum over micro-batches of products A_k B_k is one product, of all A_k side by
side and all B_k one below the other:

    each    of every micro-batch: what the products read; gradients that are no product (of biases,
            norms, embeddings, convolutions), which are added up
    once    the products, of operands that are concatenated, and what only reshapes their results

Source:  2BP, arXiv:2405.18047, section 3: backward-p2 on concatenated micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.graph.graph import Graph
from penstock.graph.segment_memory import MemoryOwner, segment_memory
from penstock.graph.stages import Segment, Stage, Stages

_PRODUCT = "aten.mm.default"
_TURNED = "aten.t.default"
# Linear, with one operand, and no sum over more than one micro-batch in them.
_RESHAPES = tuple(
    f"aten.{name}"
    for name in (
        "t.default",
        "transpose.int",
        "permute.default",
        "view.default",
        "_unsafe_view.default",
        "clone.default",
        "alias.default",
        "detach.default",
        "squeeze.dim",
        "unsqueeze.default",
        "_to_copy.default",
    )
)


@dataclass(frozen=True, slots=True)
class Joint:
    """What W of `count` micro-batches runs: `each` for every one of them, then `once` for all.

    along:  the operands of `once` that are concatenated, each with the dim; in the order in which
            that is done.  Where there are none, nothing can be done at once, and `once` is empty.
    """

    each: Segment
    once: Segment
    along: tuple[tuple[int, int], ...]
    count: int


def joint_of(graph: Graph, segment: Segment, count: int) -> Joint:
    """Return W, or B of a stage that sends no gradient, in the form for `count` micro-batches."""
    ops, along = _products(graph, segment)
    own = set(ops)
    parts = tuple(pair for pair in segment.gradients if pair[1] in own)
    operands = tuple(value for value, _ in along)
    others = tuple(op for op in segment.ops if op not in own)
    read = {value for op in others for value in graph.nodes[op].inputs}
    each = replace(
        segment,
        ops=others,
        inputs=tuple(v for v in segment.inputs if v not in operands or v in read),
        takes=tuple(v for v in segment.takes if v not in operands),
        keeps=tuple(v for v in operands if v not in segment.inputs),
        gradients=tuple(pair for pair in segment.gradients if pair[1] not in own),
    )
    once = Segment("W", ops, operands, operands, gradients=parts, times=count)
    return Joint(each, once, along, count)


def _products(
    graph: Graph, segment: Segment
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return the ops that run once, and the operands to concatenate, each with its dim."""
    nodes, inside = graph.nodes, set(segment.ops)
    users: dict[int, list[int]] = {}
    for op in segment.ops:
        for value in nodes[op].inputs:
            users.setdefault(value, []).append(op)
    asked = {value for _, value in segment.gradients}
    asked_elsewhere = {*segment.keeps, *graph.told, *(v for _, vs in segment.sends for v in vs)}

    def tail(value: int) -> set[int] | None:
        """Return the ops behind a product; None where one of them is more than a reshape."""
        if value in asked_elsewhere:
            return None
        found = set[int]()
        for user in users.get(value, []):
            behind = tail(user) if nodes[user].target in _RESHAPES else None
            if behind is None or nodes[user].inputs != (value,):
                return None
            found |= {user, *behind}
        return found if found or value in asked else None

    ops, along = set[int](), dict[int, int]()
    for op in segment.ops:
        if nodes[op].target != _PRODUCT or (behind := tail(op)) is None:
            continue
        own, wanted = _operands(graph, op, inside, users)
        if any(along.get(value, dim) != dim for value, dim in wanted) or _is_shared(graph, wanted):
            continue
        ops |= {op, *own, *behind}
        along.update(wanted)
    return tuple(sorted(ops)), tuple(along.items())


def _operands(
    graph: Graph, op: int, inside: set[int], users: dict[int, list[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return the ops that move with a product, and its operands, each with the dim it sums over.

    Rows are cheaper to concatenate than columns: a left operand that is only turned for the
    product is taken before that.
    """
    left, right = graph.nodes[op].inputs
    turned = graph.nodes[left]
    if left in inside and turned.target == _TURNED and users[left] == [op]:
        return (left,), ((turned.inputs[0], 0), (right, 0))
    return (), ((left, 1), (right, 0))


def _is_shared(graph: Graph, wanted: tuple[tuple[int, int], ...]) -> bool:
    """Return whether an operand is the same for all micro-batches, or stands at both places."""
    kinds = ("parameter", "buffer", "constant", "scale")
    operands = [value for value, _ in wanted]
    return len(set(operands)) < 2 or any(graph.nodes[value].kind in kinds for value in operands)


def joint_memory(
    graph: Graph,
    stages: Stages,
    stage: Stage,
    workspace_bytes: Sequence[int] = (),
    *,
    count: int,
    whole: bool,
) -> int:
    """Return the most bytes held above those before, while B or W of `count` micro-batches runs.

    whole:    B: I of one micro-batch after the other, what they send being held, before all W.
    Ignores:  what products hold only while they run, beside their results.
    """
    received = {v for e in stages.edges if e.target == stage.index for v in e.values}
    held = MemoryOwner(graph, received)
    joint = joint_of(graph, stage.weight_gradient, count)
    now = peak = 0
    if whole:
        inner = stage.input_gradient
        before, _, change = segment_memory(held, inner, workspace_bytes)
        sent = sum(held.size_bytes(held.of(v)) for _, values in inner.sends for v in values)
        for _ in range(count):
            peak = max(peak, now + before)
            now += change + sent
    before, _, change = segment_memory(held, joint.each, workspace_bytes)
    for _ in range(count):
        peak = max(peak, now + before)
        now += change
    for value, _ in joint.along:  # the parts are freed when they have been copied
        size = count * graph.nodes[value].size_bytes
        peak = max(peak, now + size)
        now += size - count * held.size_bytes(held.of(value))
    return max(peak, now + _peak_of_products(graph, joint))


def _peak_of_products(graph: Graph, joint: Joint) -> int:
    """Return the most bytes held above the operands while the products are made."""
    operands = {value for value, _ in joint.along}
    own = MemoryOwner(graph, operands)
    last = {own.of(v): op for op in joint.once.ops for v in (op, *graph.nodes[op].inputs)}
    lasting = own.of_all(value for _, value in joint.once.gradients)
    held, now, peak = set(operands), 0, 0
    for op in joint.once.ops:
        if (root := own.of(op)) not in held:
            held.add(root)
            now += own.size_bytes(root)
        peak = max(peak, now)
        for dead in [one for one in held - lasting if last.get(one) == op]:
            held.remove(dead)
            now -= own.size_bytes(dead) * (joint.count if dead in operands else 1)
    return peak
