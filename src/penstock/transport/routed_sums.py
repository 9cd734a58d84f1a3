"""Routed: sums over ranks along the rounds of a topology, in place of a transport's own.

Each round is one exchange of the ranks (`Transport.swap`), in which most give each other nothing.
A block is added up at one place, in the order of the hops, and then copied; or both of a pair add
the same two: so all ranks have the same bits.
"""

import torch
from torch import Tensor

from penstock.routes import PIECE_BYTES, BlockHop, OwnRound, SumRoutes, own_rounds, routes_of
from penstock.transport.transport import Transport


def sum_along(
    transport: Transport, tensor: Tensor, ranks: tuple[int, ...], topology: str = ""
) -> None:
    """Replace a tensor by its sum over ranks, bitwise the same on all.

    topology:  as `routes_of` reads it; empty: as the transport sums by itself.
    Raises:    TransportError.
    """
    if not topology:
        transport.all_reduce(tensor, ranks)
        return
    flat, routes = tensor.detach().contiguous().view(-1), routes_of(topology, len(ranks))
    own = own_rounds(topology, len(ranks), ranks.index(transport.rank))
    step = max(1, PIECE_BYTES // flat.itemsize)
    for first in range(0, flat.numel(), step):
        piece = flat[first : first + step]
        for each in own:
            _make(transport, piece, ranks, (routes, each))
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def _make(
    transport: Transport, piece: Tensor, ranks: tuple[int, ...], own: tuple[SumRoutes, OwnRound]
) -> None:
    """Make one round: send this rank's blocks, and add those that come, or put them in place."""
    routes, (adds, given, taken) = own
    gives, takes = [piece[:0]] * len(ranks), [piece[:0]] * len(ranks)

    def parts(hops: tuple[BlockHop, ...]) -> list[Tensor]:
        count = len(piece)
        return [piece[routes.place(h.first, count) : routes.place(h.end, count)] for h in hops]

    for target, hops in given:
        rows = parts(hops)
        gives[target] = rows[0] if len(rows) == 1 else torch.cat(rows)
    for source, hops in taken:
        takes[source] = piece.new_empty(sum(map(len, parts(hops))))
    transport.swap(gives, takes, ranks)
    for source, hops in taken:
        at, came = 0, takes[source]
        for part in parts(hops):
            if adds:
                part.add_(came[at : at + len(part)])
            else:
                part.copy_(came[at : at + len(part)])
            at += len(part)
