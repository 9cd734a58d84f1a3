"""Held parts: the bytes that a rank holds between windows, by what they are for."""

from typing import TYPE_CHECKING

from penstock.device import of

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank


def held_parts(rank: "Rank") -> dict[str, int]:
    """Return bytes by name: weights, gradients, optimizer, versions, others; and what is far.

    Together, but for what is far, they are `Rank.held_bytes`.
    """
    found: dict[str, int] = {}
    for weights in rank.weights.values():
        for name, held in weights.held_by_kind().items():
            size = sum(tensor.untyped_storage().nbytes() for tensor in held)
            found[name] = found.get(name, 0) + size
    constants = sum(t.untyped_storage().nbytes() for t in rank.capture.constants.values())
    sent = rank.transport.held_bytes if of(rank.device).is_queued else 0
    found["others"] = found.get("others", 0) + constants + sent + rank.guarded_bytes()
    found["far"] = far_bytes_of(rank)
    return found


def far_bytes_of(rank: "Rank") -> int:
    """Return the bytes of far memory that a rank has; on a GPU they are pinned memory."""
    weights = rank.weights.values()
    memories = [frames.memory for frames in rank.away]
    memories += [w.far_state.memory for w in weights if w.far_state is not None]
    memories += [w.shard.far_memory for w in weights if w.shard is not None]
    return sum(memory.size_bytes for memory in memories if memory is not None)
