"""Expert load: how many rows each expert of a mixture sees, in each of some micro-batches.

Ranks that divide experts wait at the next collect for the one whose experts see most rows, in each
layer and micro-batch anew.  So what counts of a layer is the mean, over micro-batches, of the most
rows that a rank has; each rank has as many experts, one after the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import ProfileError
from penstock.graph.graph import Graph
from penstock.graph.tensor.cuts import OWN_ROWS

BY_EXPERTS = OWN_ROWS, "penstock.own_experts_mm.default"  # of a rank's own
_GROUPED = *BY_EXPERTS, "aten._grouped_mm.default"


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The rows of each expert of one layer.

    ends:   the op that tells where they end.
    rows:   [micro-batch][expert].
    """

    ends: int
    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows or len({len(row) for row in self.rows}) > 1:
            raise ProfileError("a load has no micro-batch, or micro-batches of other experts")
        if any(count < 0 for row in self.rows for count in row):
            raise ProfileError("an expert has fewer than no rows")

    def busiest_rows(self, ranks: int) -> float:
        """Return the most rows that one of `ranks` has, in the mean over micro-batches."""
        return sum(max(map(sum, _blocks(row, ranks))) for row in self.rows) / len(self.rows)

    def busiest_part(self, ranks: int) -> float:
        """Return the busiest rank's part of all rows; 1 / ranks where each has as many."""
        return self.busiest_rows(ranks) / self.mean_rows if self.mean_rows else 1 / ranks

    @property
    def mean_rows(self) -> float:
        """Return the rows of all experts, in the mean over micro-batches."""
        return sum(map(sum, self.rows)) / len(self.rows)

    def busiest_block(self, ranks: int) -> tuple[int, ...]:
        """Return the rows of each expert of a rank that has as many as the busiest, or nearly."""
        wanted = self.busiest_rows(ranks)
        blocks = (max(_blocks(row, ranks), key=sum) for row in self.rows)
        return tuple(min(blocks, key=lambda block: abs(sum(block) - wanted)))


def _blocks(row: Sequence[int], ranks: int) -> list[Sequence[int]]:
    size = len(row) // ranks
    return [row[first : first + size] for first in range(0, size * ranks, size)]


def ends_by_product(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield the products by groups of rows, and what tells where the groups of each end."""
    for at, node in enumerate(graph.nodes):
        if node.target in _GROUPED and len(node.inputs) == 3:
            yield at, node.inputs[2]


def parts_of_products(graph: Graph, loads: Sequence[ExpertLoad], ranks: int) -> dict[int, float]:
    """Return by product the part of its rows that the busiest of `ranks` has, where it is known."""
    parts = {load.ends: load.busiest_part(ranks) for load in loads if _shares(load, ranks)}
    return {at: parts[ends] for at, ends in ends_by_product(graph) if ends in parts}


def _shares(load: ExpertLoad, ranks: int) -> bool:
    return len(load.rows[0]) % ranks == 0


def loads_in_words(graph: Graph, loads: Sequence[ExpertLoad]) -> str:
    """Return a sentence on how unlike the ranks are that divide experts; "" where none do."""
    divided = {
        graph.nodes[at].inputs[2] for at, n in enumerate(graph.nodes) if n.target == OWN_ROWS
    }
    own = [load for load in loads if load.ends in divided]
    if not own:
        return ""
    times = [graph.tensor * load.busiest_part(graph.tensor) for load in own]
    rows = sum(load.busiest_rows(graph.tensor) for load in own) / len(own)
    mean = sum(load.mean_rows for load in own) / len(own) / graph.tensor
    return (
        f"the rank whose experts see most has {rows:,.0f} rows of a layer where the mean is "
        f"{mean:,.0f} (up to {max(times):.2f} times; {len(own[0].rows)} micro-batches)"
    )
