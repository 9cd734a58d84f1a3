"""Ring: what searches ask of the ranks that share a tensor, each with a part of it.

The seconds are the cluster's, of its ring (cluster/collectives.py): n - 1 times every rank hands a
part to the next one, and all wait for the slowest.  A part is 1 / n of the bytes, or the largest
share where shares differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.cluster.collectives import way_of
from penstock.cluster.rounds import Way


@dataclass(frozen=True, slots=True)
class Ring:
    """So many ranks, and how an all-gather goes round them."""

    count: int
    gather: Way

    def all_gather_s(self, size_bytes: float, *, largest: float | None = None) -> float:
        """Return the seconds until all ranks have `size_bytes`, of which each holds a part.

        largest   share of the rank that holds most; default: 1 / n
        """
        parts = 1.0 if largest is None else largest * self.count
        return self.gather.seconds(size_bytes * parts)

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
    return Ring(len(order), way_of(cluster, "all_gather", "ring", order))


def alike(count: int, link: Link) -> Ring:
    """Return the ring of `count` ranks with the same link between any two.

    Raises:   ClusterError: no rank.
    """
    kind = DeviceKind("any", 1, (), 1.0)
    return ring_of(Cluster((kind,), (Host("any", "any", count),), inside=link))
