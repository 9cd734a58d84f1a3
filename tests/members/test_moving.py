"""Moving: every tensor comes from whoever has it, whole or in parts, to whoever needs it."""

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.members.moving import PIECE_BYTES, held_row, missing_of, move, moves_to
from penstock.members.words import HeldTensor
from penstock.state.tensor_parts import part_key, whole
from penstock.transport.threads import thread_transports

KEYS = [f"weights/{letter}" for letter in "abcd"]


def catalog_of(tensors: dict[str, torch.Tensor]) -> list[HeldTensor]:
    return [held_row(key, value) for key, value in tensors.items()]


def value_of(key: str, count: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(sum(map(ord, key)))
    return torch.randn(count, generator=source)


@st.composite
def holdings(draw) -> tuple[int, dict[int, dict[str, torch.Tensor]]]:
    """Return a number of members, and what each of them holds: tensors, and parts of them."""
    members, held = draw(st.integers(1, 4)), dict[int, dict[str, torch.Tensor]]()
    for member in range(members):
        held[member] = {}
        for key in KEYS:
            count = 4 + len(key) + ord(key[-1]) % 7
            value = value_of(key, count)
            match draw(st.sampled_from(["none", "whole", "part"])):
                case "whole":
                    held[member][key] = value
                case "part":
                    start = draw(st.integers(0, count - 1))
                    end = draw(st.integers(start + 1, count))
                    held[member][part_key(key, start, (count,))] = value[start:end]
    return members, held


@given(holdings(), st.data())
def test_what_can_be_put_together_comes_to_who_needs_it(case, data) -> None:
    members, held = case
    catalogs = {member: catalog_of(rows) for member, rows in held.items()}
    needs = [data.draw(st.sets(st.sampled_from(KEYS))) for _ in range(members)]
    wanted = [moves_to(m, need.__contains__, catalogs) for m, need in enumerate(needs)]
    ends, found = thread_transports(members), dict[int, dict[str, torch.Tensor]]()

    def live(rank: int) -> None:
        found[rank] = whole(move(ends[rank], range(members), held[rank], wanted).tensors)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lacks = {*missing_of(KEYS, catalogs)}
    for rank, need in enumerate(needs):
        assert found[rank].keys() == need - lacks
        for key, value in found[rank].items():
            assert torch.equal(value, value_of(key, len(value)))
        own = {key for key in need if key in held[rank]}
        assert all(each.source == rank for each in wanted[rank] if each.key in own)
    assert lacks == {key for key in KEYS if not _covers(held, key)}


def _covers(held: dict[int, dict[str, torch.Tensor]], key: str) -> bool:
    """Return whether parts of a key lie end to end, by trying all reachable ends."""
    count = 4 + len(key) + ord(key[-1]) % 7
    spans = set()
    for rows in held.values():
        if key in rows:
            return True
        for name, value in rows.items():
            if name.endswith(f"/{key}"):
                start = int(name.split()[1])
                spans.add((start, start + len(value)))
    reached = {0}
    for _ in range(count + 1):
        reached |= {end for start, end in spans if start in reached}
    return count in reached


def test_large_tensors_go_in_pieces_with_their_dtypes() -> None:
    size = PIECE_BYTES // 4 + 11
    held = {
        0: {"weights/a": torch.arange(size, dtype=torch.float32), "buffers/n": torch.tensor(7)},
        1: {"weights/b": torch.ones(3, dtype=torch.bfloat16)},
    }
    catalogs = {member: catalog_of(rows) for member, rows in held.items()}
    wanted = [moves_to(member, lambda key: True, catalogs) for member in (0, 1)]
    ends, found = thread_transports(2, copies=True), {}

    def live(rank: int) -> None:
        found[rank] = move(ends[rank], (0, 1), held[rank], wanted)

    thread = threading.Thread(target=live, args=(1,))
    thread.start()
    live(0)
    thread.join()
    for key, value in {**held[0], **held[1]}.items():
        assert torch.equal(found[0].tensors[key], value)
        assert torch.equal(found[1].tensors[key], value)
        assert found[1].tensors[key].dtype == value.dtype
    assert found[1].received_bytes == 4 * size + 8
    assert found[0].received_bytes == 6


def test_a_catalog_names_what_is_held() -> None:
    found = catalog_of(
        {"weights/b": torch.ones(2, 3), "weights/a": torch.ones((), dtype=torch.int8)}
    )
    assert found == [
        HeldTensor("weights/b", "float32", (2, 3)),
        HeldTensor("weights/a", "int8", ()),
    ]
