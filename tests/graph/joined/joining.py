"""Joining: a joined step run op by op, beside the mean of what its micro-batches have alone."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from penstock import Job, _compat
from penstock.graph.code import IN_GRAD_MODE, SeededRandom, micro_batch_seed, reseed
from penstock.graph.joined.divided_batch import divided
from penstock.graph.joined.joined import joined
from penstock.graph.joined.joiner import Apart, Joiner
from penstock.graph.joined.joining_rules import ruled
from penstock.graph.merge import merged
from penstock.graph.trace import Capture, build, capture, loss_and_figures, on_device

Row = tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]  # loss, gradients, figures


def in_64_bits(job: Job) -> Job:
    """Return the job with weights and floats of the batch in float64."""

    def wide(leaf):
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf

    def data(start: int) -> Iterator[object]:
        return (_compat.pytree.tree_map(wide, batch) for batch in job.data(start))

    return replace(job, model=lambda: job.model().double(), data=data)


def run(captured: Capture, batch: object, scale: float = 1.0, seed: int = 0) -> Row:
    """Return what the ops of a step make of a batch, with the model's first weights.

    scale:    of the gradients; seed: of the random ops.
    """
    drawn = 0
    graph, leaves, values = captured.graph, captured.leaves(batch), dict[fx.Node, object]()
    state = {**captured.parameters, **dict(captured.model.named_buffers())}
    for at, (node, row) in enumerate(zip(captured.fx_nodes, graph.nodes, strict=True)):
        match row.kind:
            case "parameter" | "buffer":
                values[node] = state[row.name].detach().contiguous()
            case "input":
                values[node] = leaves[captured.inputs[at]]
            case "scale":
                values[node] = torch.tensor(scale, dtype=node.meta["val"].dtype)
            case "constant":
                values[node] = captured.constants[at]
            case "op":
                if row.effect == "random":
                    reseed(seed, drawn)
                    drawn += 1
                args, kwargs = map_aggregate((node.args, dict(node.kwargs)), _value(values))
                with torch.set_grad_enabled(node.target in IN_GRAD_MODE):
                    values[node] = node.target(*args, **kwargs)

    def value(at):
        return None if at is None else values[captured.fx_nodes[at]]

    gradients = {name: value(at) for name, at in graph.gradients.items()}
    return value(graph.loss), gradients, {name: value(at) for name, at in graph.figures}


def _value(values: dict[fx.Node, object]) -> Callable[[object], object]:
    return lambda given: values[given] if isinstance(given, fx.Node) else given


def plainly(job: Job, count: int, first: int = 0) -> Row:
    """Return the mean loss, gradients and figures of some micro-batches, by the author's loss."""
    model, _ = build(job)
    data, total, figures = job.data(first), torch.zeros((), dtype=torch.float64), {}
    for number in range(first, first + count):
        batch = on_device(copy.deepcopy(next(data)))
        with SeededRandom(micro_batch_seed(job.seed, number)):
            loss, told = loss_and_figures(job, model, batch)
            (loss / count).backward()
        total += loss.detach().double() / count
        for name, each in told.items():
            figures[name] = figures.get(name, 0.0) + each.detach().double() / count
    return total, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, figures


def apart(captured: Capture, count: int = 2) -> Counter[str]:
    """Return the ops that the joined step runs once for each micro-batch, but getitem."""
    made = Joiner(captured, count, ruled)
    names = (str(n.target) for n in captured.fx_nodes if isinstance(made.states[n], Apart))
    return Counter(name for name in names if "getitem" not in name)


def difference(job: Job, count: int, first: int = 0) -> float:
    """Return the largest relative difference of the joined step from the mean of its parts."""
    job = replace(job, micro_batches=2 * count)
    step = joined(capture(job), count)
    batch = next(iter(merged(job, count).data(first // count)))
    found, wanted = run(step, batch, float(count)), plainly(job, count, first)
    gradients = {n: None if g is None else g / count for n, g in found[1].items()}
    rows = [(found[0], wanted[0])]
    for one, other in zip((gradients, found[2]), wanted[1:], strict=True):
        assert one.keys() == other.keys()
        rows += [(one[name], other[name]) for name in other]
    least = 1e-3 * max(_greatest(other) for _, other in rows)
    return max(_apart(one, other, least) for one, other in rows)


def difference_of_parts(job: Job, parts: int, first: int = 0) -> float:
    """Return the largest relative difference of a micro-batch from what its parts add up to.

    Raises:   GraphError: it is not divided so.
    """
    whole = capture(job)
    step, batch = divided(whole, parts), on_device(next(iter(job.data(first))))
    leaves = whole.leaves(batch)
    assert step.batch.division is not None
    pieces = [step.batch.division.part_of(leaves, number) for number in range(parts)]
    seed = micro_batch_seed(job.seed, first)
    found = [run(step, piece, 1.0 / parts, seed) for piece in pieces]
    wanted = plainly(job, 1, first)
    rows = [(torch.stack([loss.double() for loss, *_ in found]).mean(), wanted[0])]
    for at, count in ((1, 1.0), (2, parts)):
        assert all(each[at].keys() == wanted[at].keys() for each in found)
        for name, other in wanted[at].items():
            given = [each[at][name] for each in found]
            rows.append(
                (
                    None if any(g is None for g in given) else torch.stack(given).sum(0) / count,
                    other,
                )
            )
    least = 1e-3 * max(_greatest(other) for _, other in rows)
    return max(_apart(one, other, least) for one, other in rows)


def _greatest(value: Tensor | None) -> float:
    if value is None or not value.numel():
        return 0.0
    return float(value.detach().double().nan_to_num().abs().max())


def _apart(one: Tensor | None, other: Tensor | None, least: float) -> float:
    if one is None or other is None:
        return 0.0 if _greatest(one) == _greatest(other) == 0.0 else float("inf")
    assert torch.equal(one.isnan(), other.isnan())
    one, other = one.detach().double().nan_to_num(), other.detach().double().nan_to_num()
    return _greatest(one - other) / max(_greatest(other), least, 1e-30)


def net(width: int = 6, out: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, out))
