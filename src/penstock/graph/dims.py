"""Dims: what ops do with the dims of their inputs; for values in slices, and for joined ones."""

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_ALIKE = (  # elementwise, and not tagged so; what they make depends on shape and dtype alone
    aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
)
SIZED = (  # whose first argument beside the tensor are sizes
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.slice_backward.default,
)
VIEWS = (
    *SIZED,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.slice.Tensor,
    aten.unsqueeze.default,
)
SUMS = aten.sum.dim_IntList, aten.sum.default
PRODUCTS = aten.mm.default, aten.addmm.default


def is_elementwise(target: Any) -> bool:
    """Return whether each number of a result comes from those at its place."""
    tags: Any = getattr(target, "tags", ())
    is_random = torch.Tag.nondeterministic_seeded in tags
    return (torch.Tag.pointwise in tags and not is_random) or target in _ALIKE


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a value; () where it is no tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def summed_dims(node: fx.Node) -> tuple[int, list[int], bool]:
    """Return the number of dims of a sum's input, those summed over, and whether they are kept."""
    count, more = len(shape_of(node.all_input_nodes[0])), node.args[1:]
    dims: Any = more[0] if more else None
    over = sorted({int(d) % count for d in dims} if dims else range(count))
    return count, over, bool(more[1]) if len(more) > 1 else False


def view_dim(node: fx.Node, old: tuple[int, ...], dim: int, new: tuple[int, ...]) -> int | None:
    """Return the dim of a view that is dim `dim` of the tensor behind it; None: there is none."""
    more: Any = node.args[1:]
    match node.target:
        case aten.t.default:
            return 1 - dim if len(old) == 2 else dim
        case aten.transpose.int:
            a, b = (d % len(old) for d in more[:2])
            return {a: b, b: a}.get(dim, dim)
        case aten.permute.default:
            return [d % len(old) for d in more[0]].index(dim)
        case aten.unsqueeze.default:
            return dim + (more[0] % len(new) <= dim)
        case aten.expand.default:
            at = dim + len(new) - len(old)
            return at if new[at] == old[dim] else None
        case aten.slice.Tensor:
            return None if (more[0] % len(old) if more else 0) == dim else dim
        case aten.slice_backward.default:
            return None if more[1] % len(new) == dim else dim
        case _:
            sides = prod(old[:dim]), prod(old[dim + 1 :])
            alike = (d for d, size in enumerate(new) if size == old[dim])
            return next((d for d in alike if (prod(new[:d]), prod(new[d + 1 :])) == sides), None)
