"""Server parts: which server has which parameters, where several divide them by bytes.

Parameters stand in a row, stage by stage as these list them; each server has a run of that row, so
that what goes to it is one piece of each flat tensor.  The largest run has as few bytes as any
division of the row into so many runs leaves it.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from penstock.errors import GraphError
from penstock.graph.graph import Graph
from penstock.graph.stages import Stage


class ServerParts(NamedTuple):
    """What each of several servers has.

    owners:      of each trained parameter of each stage, the number of its server.
    size_bytes:  by server, of its parameters, which are those of their gradients, too.
    """

    owners: Mapping[tuple[int, int], int]
    size_bytes: tuple[int, ...]


def server_parts(graph: Graph, stages: Sequence[Stage], servers: int) -> ServerParts:
    """Return who has what of the parameters that are trained.

    Raises:   GraphError: there are more servers than parameters.
    """
    row = [
        (stage.index, node)
        for stage in stages
        for node in stage.parameters
        if graph.nodes[node].name in graph.gradients
    ]
    if servers > max(1, len(row)):
        message = f"{servers} servers for {len(row)} parameters"
        raise GraphError(message, hint=f'take topology="server:{max(1, len(row))}" or fewer')
    sizes = [graph.kept_bytes(node) for _, node in row]
    ends = in_runs(sizes, servers)
    owners = {
        key: number
        for number, (first, end) in enumerate(pairwise((0, *ends)))
        for key in row[first:end]
    }
    return ServerParts(owners, tuple(sum(sizes[a:b]) for a, b in pairwise((0, *ends))))


def in_runs(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return where each of `count` runs of a row ends, none empty, the largest as small as can be.

    Of a row that is shorter than that, empty ones are last.
    """
    sums, least, most = [0, *accumulate(sizes)], max(sizes, default=0), sum(sizes)
    while least < most:
        cap = (least + most) // 2
        if len(_ends(sums, cap, count)) <= count:
            most = cap
        else:
            least = cap + 1
    ends = _ends(sums, least, count)
    return (*ends, *[len(sizes)] * (count - len(ends)))


def _ends(sums: Sequence[int], cap: int, count: int) -> list[int]:
    """Return the ends of runs of at most `cap`, each as long as it may be and leaves others one."""
    ends, first = list[int](), 0
    for at in range(1, len(sums)):
        leaves_few = len(sums) - at <= count - len(ends) - 1 and at - 1 > first
        if sums[at] - sums[first] > cap or leaves_few:
            ends.append(at - 1)
            first = at - 1
    return [*ends, len(sums) - 1]
