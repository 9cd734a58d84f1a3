"""Divided: the step of a part of a micro-batch, made from that of all of it.

    before   one micro-batch: forward, loss, gradients
    after    some of its samples: forward and backward of these; what they add to the loss of the
             micro-batch, times the number of parts, so that the mean over the parts is its loss

Keeps:   loss, figures and gradients of the micro-batch, to rounding, whatever the batch holds: what
         a loss divides by - how many labels count, the sum of a mask - is that of the whole batch,
         of which each part has the leaves that say so, and random numbers are drawn for all of it.
Gains:   one micro-batch is divided among replicas, or goes through a pipeline in parts; a part
         holds fewer activations than the whole.
Costs:   smaller products, more calls; what is made of the batch alone, and random numbers, are
         made in each part.
Ignores: steps that change a buffer, or work on several samples of what the model makes together (a
         norm over the batch, a contrastive loss): they are refused.
"""

from dataclasses import replace

from torch import fx

from penstock.errors import GraphError
from penstock.graph.batch import Division, describe
from penstock.graph.joined.divider import Divider
from penstock.graph.joined.joined import check_pure, rebuilt
from penstock.graph.joined.over_samples import of_part
from penstock.graph.rows import Placeholder
from penstock.graph.trace import Capture


def divided(capture: Capture, parts: int) -> Capture:
    """Return the step of one of `parts` parts of a micro-batch of `capture`.

    Raises:   GraphError: the micro-batch has no samples that so many can share; CouplesError: the
              step works on several of them together.
    """
    if parts == 1:
        return capture
    for name, effect, module in capture.graph.effects():
        if effect != "random":
            where = f"module {module}" if module else "the model"
            raise GraphError(f"{name} in {where} changes a buffer by a whole micro-batch")
    check_pure(capture, may_draw=True)
    nodes = dict(zip(capture.fx_nodes, capture.graph.nodes, strict=True))
    cut = _cut(capture, parts)
    made = Divider(capture, parts, cut, of_part)
    leaf_of = {capture.fx_nodes[at]: leaf for at, leaf in capture.inputs.items()}
    rows = {made.rows[node]: leaf_of[node] for node in cut}
    wholes = {made.wholes[node]: leaf_of[node] for node in cut}
    others = {n: leaf for n, leaf in leaf_of.items() if n not in made.rows}
    wholes |= {made.same(node): leaf for node, leaf in others.items()}
    rows, wholes = _read(rows, made.graph), _read(wholes, made.graph)
    division = Division(parts, tuple(rows.values()), tuple(wholes.values()), capture.batch)
    key, graph = division.part_key(), capture.graph
    given = {node: Placeholder(f"rows {leaf}", "input") for node, leaf in rows.items()}
    given |= {node: Placeholder(f"whole {leaf}", "input") for node, leaf in wholes.items()}
    given[made.part] = Placeholder("part", "input")
    places = {node: at for at, node in enumerate(given)}
    for new, node in made.placed_for.items():
        if new not in given and node.op == "placeholder":
            given[new] = Placeholder(nodes[node].name, nodes[node].kind)
    new = replace(
        graph,
        key=(f"batch: {describe(key.leaves)}", *graph.key[1:], f"divided by {parts}"),
        samples=graph.samples // parts,
        tokens=graph.tokens // parts,
    )
    order = [given[node] for node in made.graph.nodes if node.op == "placeholder"]
    found = rebuilt(replace(capture, graph=new, batch=key), made, order)
    inputs = {at: places[node] for at, node in enumerate(found.fx_nodes) if node in places}
    return replace(found, inputs=inputs)


def done_by_each(capture: Capture, count: int) -> Capture:
    """Return the step of a micro-batch that each of `count` replicas does whole.

    Each adds to the mean what the others do; where samples cannot be shared nothing is lost by it.
    Raises:   GraphError: the step changes a buffer, and would more than once.
    """
    check_pure(capture, may_draw=True)
    leaves = tuple(dict.fromkeys(capture.inputs.values()))
    division = Division(count, (), leaves, capture.batch)
    inputs = {at: leaves.index(leaf) for at, leaf in capture.inputs.items()}
    return replace(capture, batch=division.part_key(), inputs=inputs)


def _cut(capture: Capture, parts: int) -> list[fx.Node]:
    """Return the inputs of which a part has its rows: as many as the first has.

    Raises:   GraphError: they cannot be divided so.
    """
    sizes = [(capture.fx_nodes[at], capture.graph.nodes[at].shape) for at in capture.inputs]
    count = next((shape[0] for _, shape in sizes if shape), 0)
    if count % parts or not count:
        raise GraphError(f"a micro-batch of {count} samples cannot be divided by {parts}")
    return [node for node, shape in sizes if shape[:1] == (count,)]


def _read(inputs: dict[fx.Node, int], graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the inputs that some op reads; the others are no more."""
    for node in [node for node in inputs if not node.users]:
        graph.erase_node(node)
    return {node: leaf for node, leaf in inputs.items() if node.users}
