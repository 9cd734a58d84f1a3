"""Ring: seconds of the collectives that go round a ring of ranks, each with a part of a tensor.

    all-gather, reduce-scatter   (n - 1) * max over links of (latency_s + part / bytes_per_s)
    all-reduce                   both, one after the other

n - 1 times every rank hands one part to the next one, and all wait for the slowest; a part is
1 / n of the bytes, or the largest share where shares differ.

Ignores:  other traffic on the links; trees for small messages; the time of the additions.
Source:   "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster import Cluster, Link
from penstock.errors import PlanError


@dataclass(frozen=True, slots=True)
class Ring:
    """So many ranks, and the links between neighbours; equal ones once.

    Raises:   PlanError: no rank; more than one without a link.
    """

    count: int
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        if self.count < 1 or (self.count > 1 and not self.links):
            what = f"a ring of {self.count} ranks with {len(self.links)} links"
            raise PlanError(what, hint="give at least one rank, and a link if there are more")

    def half_s(self, part_bytes: float) -> float:
        """Return the seconds in which parts of so many bytes go round to all others."""
        if self.count == 1:
            return 0.0
        longest = max(link.latency_s + part_bytes / link.bytes_per_s for link in self.links)
        return (self.count - 1) * longest

    def all_gather_s(self, size_bytes: float, *, largest: float | None = None) -> float:
        """Return the seconds until all ranks have `size_bytes`, of which each holds a part.

        largest   share of the rank that holds most; default: 1 / n
        """
        return self.half_s(size_bytes * (1 / self.count if largest is None else largest))

    def reduce_scatter_s(self, size_bytes: float, *, largest: float | None = None) -> float:
        """Return the seconds until each rank has its part of the sum: as long as an all-gather."""
        return self.all_gather_s(size_bytes, largest=largest)

    def all_reduce_s(self, size_bytes: float) -> float:
        """Return the seconds until all ranks have the sum: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather_s(size_bytes)


def ring_of(cluster: Cluster, ranks: Sequence[int] | None = None) -> Ring:
    """Return the ring over `ranks` in the order in which they stand; default: all of them.

    Raises:   ClusterError: two neighbours have no link.
    """
    order = range(cluster.num_ranks) if ranks is None else ranks
    n = len(order)
    pairs = ((a, order[(at + 1) % n]) for at, a in enumerate(order)) if n > 1 else ()
    return Ring(n, tuple(dict.fromkeys(cluster.link(a, b) for a, b in pairs)))
