"""Roofline: the least seconds that an op can take on a device, and the share of that it reaches.

    seconds = launch_s + max(FLOP / (peak * efficiency), bytes / (bandwidth * efficiency))

FLOP count only for products, convolutions and attention; everything else is as fast as memory.
The peak is the one that the device has for the dtype of the op's result: with "float32" that is
what float32 is computed with, so a job that allows TF32 wants the rate of TF32 there.

Ignores:  caches; the shapes of products (small and thin ones are slower); fused kernels.
Source:   "Roofline: an insightful visual performance model", CACM 2009.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from penstock.cluster.cluster import DeviceKind
from penstock.errors import ProfileError
from penstock.graph.graph import Graph, Node

OpClass = Literal["product", "convolution", "attention", "reduction", "gather", "element-wise"]
CLASSES: tuple[OpClass, ...] = get_args(OpClass)
_COMPUTES = ("product", "convolution", "attention")
_GATHERS = ("embedding", "index", "gather", "scatter", "take")
_REDUCES = (
    "norm", "softmax", "logsumexp", "sum", "mean", "var", "std", "loss", "amax", "amin", "argmax",
    "argmin", "cumsum", "cumprod", "pool", "sort", "topk", "prod", "any", "all",
)  # fmt: skip


class Work(NamedTuple):
    """What an op does: its class, FLOP, bytes read and written."""

    of: OpClass
    flop: int
    moved_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of its roofline that a class of ops reaches, and the seconds of starting one op.

    share     by class, of the peak where FLOP bound it, else of the memory's bandwidth
    Raises:   ProfileError: a class is missing, a share is not above 0, a launch below 0.
    """

    share: tuple[tuple[OpClass, float], ...]
    launch_s: float

    def __post_init__(self) -> None:
        known = sorted(name for name, _ in self.share)
        if known != sorted(CLASSES):
            raise ProfileError(f"shares of {known}, not of {sorted(CLASSES)}")
        for name, value in self.share:
            if not 0 < value < math.inf:
                raise ProfileError(f"the share of {name} is {value}; it must be above 0")
        if not 0 <= self.launch_s < math.inf:
            raise ProfileError(f"launch_s is {self.launch_s}; it must be 0 or more")


# Products: 271 of an A100's 312 TFLOP/s are reached at best, and 0.54 to 0.83 in whole steps of
# Transformers, attention 0.2 to 0.5, what memory bounds 0.65 to 0.95 (fitted: estimate.md).  The
# launch is what AutoParallel takes for the least that a kernel costs.  The others are guesses.
DEFAULT = Efficiency(
    (
        ("product", 0.7),
        ("convolution", 0.5),
        ("attention", 0.4),
        ("reduction", 0.5),
        ("gather", 0.5),
        ("element-wise", 0.7),
    ),
    launch_s=7e-6,
)


def op_seconds(graph: Graph, device: DeviceKind, efficiency: Efficiency) -> tuple[float, ...]:
    """Return the seconds of each node of `graph` on `device`; 0 for inputs and views.

    Raises:   ClusterError: the device has no FLOP/s for the dtype of a product.
    """
    share = dict(efficiency.share)
    return tuple(
        0.0 if one is None else efficiency.launch_s + roofline_s(one, device) / share[one.of]
        for one in works_of(graph)
    )


def roofline_s(work: Work, device: DeviceKind) -> float:
    """Return the least seconds of `work` on `device`.

    Raises:   ClusterError: the device has no FLOP/s for its dtype.
    """
    moved_s = work.moved_bytes / device.memory_bytes_per_s
    if work.of not in _COMPUTES:
        return moved_s
    return max(work.flop / device.peak_flop_per_s(work.dtype), moved_s)


def works_of(graph: Graph) -> tuple[Work | None, ...]:
    """Return the work of each node; None for inputs, views and parts of a result."""
    parts = Counter[int]()
    dtypes: dict[int, str] = {}
    for node in graph.nodes:
        if node.target == "getitem":
            parts[node.inputs[0]] += node.size_bytes
            dtypes.setdefault(node.inputs[0], node.dtype)
    return tuple(
        _work(graph, at, node, parts, dtypes) if _computes(at, node) else None
        for at, node in enumerate(graph.nodes)
    )


def _computes(at: int, node: Node) -> bool:
    is_view = node.storage != at and not node.flop
    return node.kind == "op" and node.target != "getitem" and not is_view


def _work(
    graph: Graph, at: int, node: Node, parts: Mapping[int, int], dtypes: Mapping[int, str]
) -> Work:
    of, written = class_of(node), node.size_bytes or parts.get(at, 0)
    read = sum(graph.nodes[source].size_bytes for source in set(node.inputs))
    if of == "gather":  # of a table only what is taken from it
        read = min(read, 2 * written)
    return Work(of, node.flop, read + written, node.dtype or dtypes.get(at, ""))


def class_of(node: Node) -> OpClass:
    """Return the class of an op, by its name; what does more FLOP than it writes is a product."""
    name = node.target
    if "scaled_dot_product" in name or "flex_attention" in name:
        return "attention"
    if "convolution" in name or ".conv" in name:
        return "convolution"
    if any(word in name for word in _GATHERS):
        return "gather"
    if any(word in name for word in _REDUCES):
        return "reduction"
    return "product" if node.flop > math.prod(node.shape) else "element-wise"
