"""Cut points: the places between two modules that few bytes cross, found in the graph."""

import bisect
import itertools
import math
from collections.abc import Iterable

from penstock.graph.graph import CutPoint, Graph, Node
from penstock.graph.parts import slice_in


def find_cut_points(graph: Graph) -> tuple[CutPoint, ...]:
    """Return the places where the path of the running module changes and least data crosses.

    A place is kept where no neighbouring place lets fewer bytes cross, and only with work
    before and after it.  Every forward value that is read later crosses, but what each stage
    can compute for itself (see `Graph.free`).  Behind a slice of a parameter (split.py) there is
    one in any case, but for the last slices of all, which have nothing but the loss behind them.
    """
    crossing = _crossing_bytes(graph)
    ops = [i for i, n in enumerate(graph.nodes) if n.kind == "op" and n.phase == "F"]
    ops = [i for i in ops if i <= graph.loss]
    places: list[tuple[int, str]] = []
    forbidden, heavy, ends = _forbidden(graph), heavy_ops(graph), list[CutPoint]()
    inside = _inside_slices(graph, ops)
    for before, at in itertools.pairwise(ops):
        left, right = graph.nodes[before].module, graph.nodes[at].module
        apart = left != right and graph.nodes[at].target != "getitem"
        if not apart or crossing[at] == 0 or forbidden[at] or inside[at]:
            continue
        done = bisect.bisect_left(heavy, at)
        if slice_in(left) and done < len(heavy):
            ends.append(CutPoint(_name(left, right), at, crossing[at]))
        if 0 < done < len(heavy):
            places.append((at, _name(left, right)))
    sizes = [crossing[at] for at, _ in places]
    kept = [
        CutPoint(name, at, sizes[k])
        for k, (at, name) in enumerate(places)
        if sizes[k] <= min(sizes[max(k - 1, 0) : k + 2])
    ]
    found = {point.at: point for point in (*_with_work(heavy, kept), *ends)}
    return _unique_names([found[at] for at in sorted(found)])


def with_places(
    graph: Graph, points: Iterable[CutPoint], places: Iterable[int]
) -> tuple[CutPoint, ...]:
    """Return cut points with those before the nodes `places`, too."""
    crossing, found = _crossing_bytes(graph), {point.at: point for point in points}
    for at in places:
        name = f"before {graph.nodes[at].name}"
        found.setdefault(at, CutPoint(name, at, crossing[at]))
    return _unique_names([found[at] for at in sorted(found)])


def points_at(graph: Graph, points: Iterable[CutPoint]) -> tuple[CutPoint, ...]:
    """Return the cut points of a graph of the same nodes, with the bytes that cross in this one."""
    crossing = _crossing_bytes(graph)
    return tuple(CutPoint(point.name, point.at, crossing[point.at]) for point in points)


def _inside_slices(graph: Graph, ops: Iterable[int]) -> list[bool]:
    """Return the nodes before which a slice of a parameter has begun, and is not at its end."""
    span: dict[str, tuple[int, int]] = {}
    for op in ops:
        if slice_in(path := graph.nodes[op].module):
            span[path] = span.get(path, (op, op))[0], op
    count = len(graph.nodes)
    return [found > 0 for found in _sum_of_ranges(count, [(a, b, 1) for a, b in span.values()])]


def block_ends(graph: Graph) -> tuple[int, ...]:
    """Return the indices of the cut points that divide the model into its blocks.

    A block is a module with a number, as in a list or a sequence, that is inside no other one; the
    last cut point behind ops of it ends it.  A cut point behind an op of none is an end, too.
    """
    blocks = [block_of(module) for module in _modules_before(graph)]
    last = {block: index for index, block in enumerate(blocks)}
    return tuple(index for index, block in enumerate(blocks) if not block or last[block] == index)


def slice_ends(graph: Graph) -> tuple[int, ...]:
    """Return the indices of the cut points behind slices of parameters."""
    modules = enumerate(_modules_before(graph))
    return tuple(index for index, module in modules if slice_in(module))


def _modules_before(graph: Graph) -> list[str]:
    """Return the module of the op before each cut point."""
    ops = [i for i, node in enumerate(graph.nodes) if node.kind == "op" and node.phase == "F"]
    places = (bisect.bisect_left(ops, point.at) - 1 for point in graph.cut_points)
    return [graph.nodes[ops[place]].module for place in places]


def block_of(module: str) -> str:
    """Return the path of the outermost module with a number; empty: there is none.

    A slice of a parameter is a block by itself, whatever it is inside of.
    """
    if slice_in(module):
        return module
    parts = module.split(".")
    numbered = (place for place, part in enumerate(parts) if part.isdecimal())
    return ".".join(parts[: next(numbered, -1) + 1])


def _elements(node: Node) -> int:
    return math.prod(node.shape)


def _results(graph: Graph, i: int) -> int:
    """Return the elements that an op makes, in all its results but a workspace of bytes."""
    parts = [graph.nodes[k] for k in graph.users[i] if graph.nodes[k].target == "getitem"]
    numbers = (part for part in parts if part.dtype != "uint8")
    return sum(map(_elements, numbers)) or _elements(graph.nodes[i])


def _crossing_bytes(graph: Graph) -> list[int]:
    """Return for each node the bytes that would cross a cut made just before it."""
    sizes = ((v, last, graph.nodes[v].size_bytes) for v, last in _last_uses(graph).items())
    return _sum_of_ranges(len(graph.nodes), sizes)


def _last_uses(graph: Graph) -> dict[int, int]:
    """Return, for each forward value that is not free, the last forward place that reads it.

    A backward op reads it at the place of its origin.
    """
    free, last = graph.free, dict[int, int]()
    for i, node in enumerate(graph.nodes):
        place = max(_places(graph, i))
        if node.phase == "B":
            place = node.origin if node.origin >= 0 else graph.loss
        for source in node.inputs:
            made = graph.nodes[source]
            if made.kind == "op" and made.phase == "F" and not free[source]:
                last[source] = max(last.get(source, 0), place)
    return last


def _forbidden(graph: Graph) -> list[bool]:
    """Return the nodes before which no cut can be made.

    Between two uses of a buffer that the step changes (it lives in one stage), and where a value
    would cross whose size depends on data, or that is no tensor.
    """
    ranges: list[tuple[int, int, int]] = []
    for value, last in _last_uses(graph).items():
        node = graph.nodes[value]
        if not node.dtype or (not node.shape and not node.size_bytes):
            ranges.append((value, last, 1))
    for buffer in graph.written:
        users = [i for i in graph.users[buffer] if graph.nodes[i].phase == "F"]
        places = [i for user in users for i in _places(graph, user)]
        ranges.append((min(places), max(places), 1))
    return [count > 0 for count in _sum_of_ranges(len(graph.nodes), ranges)]


def _places(graph: Graph, user: int) -> list[int]:
    """Return where an op is computed: an update of a buffer where the new value is made."""
    node = graph.nodes[user]
    made = [i for i in node.inputs if graph.nodes[i].kind == "op"]
    return made if node.effect == "writes" and made else [user]


def _sum_of_ranges(count: int, ranges: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return for each of `count` places the sum of the sizes of (first, last, size) around it.

    A range is around the places after its first and up to its last.
    """
    change = [0] * (count + 2)
    for first, until, size in ranges:
        if until > first:
            change[first + 1] += size
            change[until + 1] -= size
    return list(itertools.accumulate(change))[:count]


def heavy_ops(graph: Graph) -> list[int]:
    """Return the matrix products of the forward pass, and what is as much work."""
    return [
        i
        for i, node in enumerate(graph.nodes)
        if node.phase == "F" and node.flop > 8 * _results(graph, i)
    ]


def _with_work(heavy: list[int], points: list[CutPoint]) -> list[CutPoint]:
    """Keep only one cut between two `heavy` ops.

    Then those that let more bytes cross than both their neighbours.
    """
    kept: dict[int, CutPoint] = {}
    for point in points:
        before = bisect.bisect_left(heavy, point.at)
        best = kept.get(before)
        if best is None or point.forward_bytes < best.forward_bytes:
            kept[before] = point
    points = sorted(kept.values(), key=lambda point: point.at)
    sizes = [math.inf, *(point.forward_bytes for point in points), math.inf]
    around = zip(sizes, sizes[1:], sizes[2:], strict=False)
    return [p for p, (a, own, b) in zip(points, around, strict=True) if own <= max(a, b)]


def _name(left: str, right: str) -> str:
    a, b = left.split(".") if left else [], right.split(".") if right else []
    pairs = zip(a, b, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if len(a) > common:
        return "after " + ".".join(a[: common + 1])
    return "before " + ".".join(b[: common + 1])


def _unique_names(points: list[CutPoint]) -> tuple[CutPoint, ...]:
    seen: dict[str, int] = {}
    unique: list[CutPoint] = []
    for point in points:
        seen[point.name] = seen.get(point.name, 0) + 1
        suffix = f" ({seen[point.name]})" if seen[point.name] > 1 else ""
        unique.append(CutPoint(point.name + suffix, point.at, point.forward_bytes))
    return tuple(unique)
