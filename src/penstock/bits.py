"""Bits: of a number in a message between ranks (graph/wire.py)."""

WIRE_BITS = (2, 16)  # of a number that is packed: fewest, most
AS_IT_IS = 32  # in place of them: it is not packed


def is_wire_bits(value: object) -> bool:
    """Return whether a number of a message can have so many bits; `AS_IT_IS` is one of them."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value == AS_IT_IS or WIRE_BITS[0] <= value <= WIRE_BITS[1]
