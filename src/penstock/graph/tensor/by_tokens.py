"""By tokens: a step of which each of several ranks has some tokens of every sequence.

All weights are on every rank, and a rank's gradients are its summands (docs/tensor.md).
"""

from penstock.errors import GraphError
from penstock.graph.cut import cut
from penstock.graph.graph import Graph
from penstock.graph.tensor.cuts import collect_points
from penstock.graph.tensor.divided import divided
from penstock.graph.tensor.placed import Placing, RankSpeed
from penstock.graph.tensor.token_slices import multiple
from penstock.graph.trace import Capture


def by_tokens(capture: Capture, ranks: int) -> Capture:
    """Return the step of rank 0 of `ranks` that divide the tokens of each sequence.

    Raises:   GraphError: they cannot be divided.
    """
    layout = Placing(capture, ranks, RankSpeed(), tokens=True).layout({})
    try:
        made = divided(capture, layout, {}, ranks, sums_due=True)
        cut(made.graph, collect_points(made.graph))
    except GraphError as why:
        message = f"the tokens of this step cannot be divided among {ranks} ranks: {why.message}"
        raise GraphError(message, hint=_HINT) from why
    if made.graph.tensor != ranks:
        raise GraphError(_why_not(capture.graph, ranks), hint=_HINT)
    return made


_HINT = "leave out context; replicas, pipelines and tensor divide other things"


def _why_not(graph: Graph, ranks: int) -> str:
    lengths = {n.shape[1] for n in graph.nodes if n.kind == "input" and len(n.shape) > 1}
    found = ", ".join(map(str, sorted(lengths))) or "none"
    return (
        f"no attention can be divided by tokens among {ranks} ranks: sequences of {found} tokens, "
        f"and a multiple of {multiple(ranks)} is needed"
    )
