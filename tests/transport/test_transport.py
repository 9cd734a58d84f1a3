"""What every transport promises."""

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.transport import TensorSpec, TransportError
from penstock.transport.narrow_sums import sum_over
from tests.draws import examples
from tests.transport.transport_ranks import RUNNERS, errors, run_shared_memory, run_threads, values

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.uint8)
every_transport = pytest.mark.parametrize("run", [*RUNNERS.values()])
fast_transport = pytest.mark.parametrize("run", [run_threads, run_shared_memory])

specs_st = st.lists(
    st.builds(
        TensorSpec,
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(DTYPES),
    ),
    max_size=3,
).map(tuple)


def message(specs, seed):
    """Return tensors of `specs`, different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 100, spec.shape, generator=generator).to(spec.dtype) for spec in specs]


def same(tensors, others):
    return len(tensors) == len(others) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(tensors, others, strict=True)
    )


def exchange(end, edges, plan):
    """Send and receive (edge, sender, receiver) in the order of `plan`; count what differs."""
    ends = {}
    for edge, sender, receiver in sorted(set(plan)):
        if end.rank == sender:
            ends[edge, sender, receiver] = end.bind_send(edge, receiver, edges[edge])
        elif end.rank == receiver:
            _, wait = end.bind_receive(edge, sender, edges[edge])
            ends[edge, sender, receiver] = wait
    end.barrier()
    counts, wrong = dict.fromkeys(plan, 0), 0
    for edge, sender, receiver in plan:
        seed = hash((edge, sender, receiver, counts[edge, sender, receiver])) % 2**31
        counts[edge, sender, receiver] += 1
        if end.rank == sender:
            ends[edge, sender, receiver](message(edges[edge], seed))
        elif end.rank == receiver:
            wrong += not same(ends[edge, sender, receiver](), message(edges[edge], seed))
    end.barrier()
    end.close()
    return wrong


@st.composite
def exchanges(draw):
    num_ranks = draw(st.integers(2, 4))
    edges = draw(st.lists(specs_st, min_size=1, max_size=4))
    rank = st.integers(0, num_ranks - 1)
    stream = st.tuples(st.integers(0, len(edges) - 1), rank, rank).filter(lambda s: s[1] != s[2])
    return num_ranks, edges, draw(st.lists(stream, min_size=1, max_size=60))


@fast_transport
@examples(10)
@given(exchanges())
def test_messages_arrive_whole_and_in_order(run, case):
    num_ranks, edges, plan = case
    assert values(run(num_ranks, lambda end: exchange(end, edges, plan))) == [0] * num_ranks


def test_messages_arrive_whole_and_in_order_over_gloo():
    edges = [
        (),
        (TensorSpec((0, 3), torch.float32),),
        (TensorSpec((), torch.bool), TensorSpec((7,), torch.float64)),
        (TensorSpec((3, 5), torch.bfloat16),),
    ]
    plan = [(edge, a, b) for edge in range(4) for a in range(3) for b in range(3) if a != b] * 7
    assert values(RUNNERS["gloo"](3, lambda end: exchange(end, edges, plan))) == [0] * 3


@every_transport
def test_edges_do_not_wait_for_each_other(run):
    spec = (TensorSpec((2,), torch.int64),)

    def body(end):
        if end.rank == 0:
            sends = [end.bind_send(edge, 1, spec) for edge in range(4)]
            end.barrier()
            for edge, send in enumerate(sends):
                for number in range(3):
                    send([torch.tensor([edge, number])])
        else:
            waits = [end.bind_receive(edge, 0, spec)[1] for edge in range(4)]
            end.barrier()
            return [wait()[0].tolist() for wait in waits[::-1] for _ in range(3)]
        end.close()

    assert values(run(2, body))[1] == [[e, n] for e in (3, 2, 1, 0) for n in range(3)]


@every_transport
def test_two_ranks_may_send_before_they_receive(run):
    spec = (TensorSpec((1000,), torch.float32),)

    def body(end):
        send, (_, wait) = (
            end.bind_send(0, 1 - end.rank, spec),
            end.bind_receive(0, 1 - end.rank, spec),
        )
        end.barrier()
        total = 0.0
        for number in range(20):
            send([torch.full((1000,), float(number))])
            send([torch.full((1000,), float(number))])
            total += wait()[0].sum().item() + wait()[0].sum().item()
        end.barrier()
        end.close()
        return total

    assert values(run(2, body)) == [190 * 2 * 1000.0] * 2


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (run_threads, {"copies": True}),
        (run_threads, {"copies": True, "capacity": 1}),
        (run_shared_memory, {}),
        (RUNNERS["gloo"], {}),
    ],
)
def test_sender_and_receiver_own_their_tensors(run, options):
    spec = (TensorSpec((300,), torch.float32), TensorSpec((2,), torch.int64))

    def body(end):
        if end.rank == 0:
            send = end.bind_send(5, 1, spec)
            end.barrier()
            tensors = [torch.zeros(300), torch.zeros(2, dtype=torch.int64)]
            for _ in range(10):
                send(tensors)
                for tensor in tensors:
                    tensor += 1
        else:
            _, wait = end.bind_receive(5, 0, spec)
            end.barrier()
            kept = []
            for _ in range(10):
                kept.append(wait())
                kept[-1][1][0] = -1  # a write of the receiver
            end.barrier()
            return [[tensor.unique().tolist() for tensor in tensors] for tensors in kept]
        end.barrier()
        end.close()

    expected = [[[float(n)], sorted({-1, n})] for n in range(10)]
    assert values(run(2, body, **options))[1] == expected


@every_transport
def test_message_is_contiguous_and_without_gradient(run):
    spec = (TensorSpec((3, 4), torch.float32),)
    sent = torch.arange(12.0).view(4, 3).t().requires_grad_()
    assert not sent.is_contiguous()

    def body(end):
        if end.rank == 0:
            send = end.bind_send(0, 1, spec)
            end.barrier()
            send([sent * 1])
            send([sent])
        else:
            _, wait = end.bind_receive(0, 0, spec)
            end.barrier()
            for (got,) in (wait(), wait()):
                assert torch.equal(got, sent)
                assert got.is_contiguous()
                assert not got.requires_grad
        end.barrier()
        end.close()

    values(run(2, body))


@every_transport
def test_sender_keeps_no_tensor_or_graph_alive(run):
    spec = (TensorSpec((4,), torch.float32),)

    def body(end):
        alive = []
        if end.rank == 0:
            send = end.bind_send(0, 1, spec)
            end.barrier()
            leaf = torch.ones(4, requires_grad=True)
            send([leaf])
            alive = weakref.ref(leaf)
            del leaf
            alive = alive() is not None
        else:
            _, wait = end.bind_receive(0, 0, spec)
            end.barrier()
            wait()
        end.barrier()
        end.close()
        return alive

    assert values(run(2, body))[0] is False


@every_transport
@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ([torch.zeros(3)], "float32[3]"),
        ([torch.zeros(2, dtype=torch.float64)], "float64[2]"),
        ([], "()"),
        ([torch.zeros(2)] * 2, "float32[2], float32[2]"),
        ([torch.zeros(())], "float32[]"),
    ],
)
@pytest.mark.sampled(3)
def test_message_unlike_its_specs_is_refused_and_harms_nothing(run, tensors, what):
    spec = (TensorSpec((2,), torch.float32),)

    def body(end):
        if end.rank == 0:
            send = end.bind_send(0, 1, spec)
            end.barrier()
            with pytest.raises(
                ValueError, match=r"edge 0 carries \(float32\[2\]\), not"
            ) as refused:
                send(tensors)
            assert what in str(refused.value)
            send([torch.ones(2)])
        else:
            _, wait = end.bind_receive(0, 0, spec)
            end.barrier()
            assert wait()[0].tolist() == [1, 1]
        end.barrier()
        end.close()

    values(run(2, body))


@fast_transport
def test_ends_that_disagree_on_a_message_are_refused(run):
    def body(end):
        specs = (TensorSpec((2 + end.rank,), torch.float32),)
        try:
            if end.rank == 0:
                end.bind_send(3, 1, specs)
            else:
                end.bind_receive(3, 0, specs)
        except TransportError as error:
            end.abort(str(error))
            raise
        end.barrier()

    assert any("rank 0" in error and "edge 3" in error for error in errors(run(2, body)))


@every_transport
def test_bad_arguments_are_refused(run):
    def body(end):
        for peer in (end.rank, 2, -1):
            with pytest.raises(ValueError, match="edge 0 of rank"):
                end.bind_send(0, peer, ())
            with pytest.raises(ValueError, match="edge 0 of rank"):
                end.bind_receive(0, peer, ())
        for ranks in ((), (1 - end.rank,), (0, 1, 1), (0, 1, 2)):
            with pytest.raises(ValueError, match="calls for the ranks"):
                end.all_reduce(torch.zeros(1), ranks)
            with pytest.raises(ValueError, match="calls for the ranks"):
                end.all_gather_bytes(b"", ranks)
        end.barrier()
        end.close()

    values(run(2, body))


# sums


def summands(num_ranks, numel, dtype):
    generator = torch.Generator().manual_seed(numel)
    return [(torch.randn(numel, generator=generator) * 100).to(dtype) for _ in range(num_ranks)]


def added_in_order(tensors):
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


@fast_transport
@examples(10)
@given(
    num_ranks=st.integers(1, 5),
    numels=st.lists(st.integers(0, 300) | st.integers(0, 2**20), min_size=1, max_size=4),
    dtype=st.sampled_from((*DTYPES, torch.int16, torch.float16)),
)
def test_sum_is_that_of_adding_in_the_order_of_the_ranks(run, num_ranks, numels, dtype):
    def body(end):
        right = []
        for numel in numels:
            brought = summands(num_ranks, numel, dtype)
            own = brought[end.rank].clone()
            end.all_reduce(own, tuple(range(num_ranks)))
            right.append(torch.equal(own, added_in_order(brought)))
        end.barrier()
        end.close()
        return right

    assert values(run(num_ranks, body)) == [[True] * len(numels)] * num_ranks


@fast_transport
def test_sum_of_a_tensor_larger_than_any_buffer_is_right(run):
    def body(end):
        brought = summands(3, 3_000_001, torch.float32)
        own = brought[end.rank].clone()
        end.all_reduce(own, (2, 0, 1))
        right = torch.equal(own, added_in_order([brought[2], brought[0], brought[1]]))
        end.barrier()
        end.close()
        return right

    assert values(run(3, body)) == [True] * 3


@every_transport
def test_sums_among_some_of_the_ranks_do_not_meet_the_others(run):
    def body(end):
        groups = [(0, 1), (2, 3)] if end.rank in (0, 2) else [(0, 1), (2, 3)][::-1]
        got = []
        for ranks in [*groups, (0, 3), (1, 2), (0, 2, 3)] * 2:
            if end.rank in ranks:
                own = torch.full((5,), 10.0**end.rank)
                end.all_reduce(own, ranks)
                got.append(int(own[4]))
        end.barrier()
        end.close()
        return got

    assert values(run(4, body)) == [
        [11, 1001, 1101] * 2,
        [11, 110] * 2,
        [1100, 110, 1101] * 2,
        [1100, 1001, 1101] * 2,
    ]


def test_sums_over_gloo_are_equal_on_all_ranks_and_right():
    def body(end):
        digests = []
        for dtype in (*DTYPES, torch.int16, torch.int32, torch.float16):
            for numel in (0, 1, 7, 100_003):
                brought = summands(3, numel, dtype)
                own = brought[end.rank].clone()
                end.all_reduce(own, (0, 1, 2))
                exact = added_in_order([tensor.double() for tensor in brought]).to(dtype)
                if dtype == torch.bool:
                    assert torch.equal(own.view(torch.uint8), exact.view(torch.uint8))
                elif dtype in (torch.float16, torch.bfloat16):
                    torch.testing.assert_close(own, exact, rtol=0.02, atol=2.0)
                elif dtype != torch.uint8:  # overflows, differently in double
                    torch.testing.assert_close(own, exact, rtol=1e-4, atol=1e-4)
                digests.append(own.view(torch.uint8).tolist()[:999])
        end.barrier()
        end.close()
        return digests

    first, *others = values(RUNNERS["gloo"](3, body))
    assert others == [first, first]


@every_transport
def test_sum_reaches_tensors_that_are_strided_scalar_or_parameters(run):
    def body(end):
        strided, scalar = torch.ones(4, 6).t(), torch.tensor(2.0)
        parameter = torch.nn.Parameter(torch.full((3,), 3.0))
        for tensor in (strided, strided[::2], scalar, parameter):
            end.all_reduce(tensor, (0, 1))
        end.barrier()
        end.close()
        return [strided.sum().item(), scalar.item(), parameter.tolist()]

    assert values(run(2, body)) == [[24 * 2 + 12 * 2, 4.0, [6.0] * 3]] * 2


@fast_transport
@pytest.mark.parametrize("numel", [10, 1_000_000])
def test_summands_that_differ_are_refused_on_every_rank(run, numel):
    def body(end):
        end.all_reduce(torch.zeros(numel + (end.rank == 1)), (0, 1))

    for error in errors(run(2, body)):
        assert error.startswith("TransportError: rank 1 sums")
        assert str(numel) in error
        assert str(numel + 1) in error


CUTS = [(0, 5, 5, 9), (0, 0, 0, 4), (0, 700_000, 700_001, 3_000_001)]  # large, small, no parts


@every_transport
@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 2)])
@pytest.mark.sampled(2)
def test_parts_are_gathered_and_sums_are_left_where_they_belong(run, ranks):
    def body(end):
        right = []
        for cuts in CUTS if end.rank in ranks else []:
            cuts = cuts if len(ranks) == 3 else (0, *cuts[2:])
            brought = summands(3, cuts[-1], torch.float32)
            at = ranks.index(end.rank)
            mine, own = slice(cuts[at], cuts[at + 1]), brought[end.rank].clone()
            end.reduce_scatter(own, cuts, ranks)
            total = added_in_order([brought[rank] for rank in ranks])
            right.append(torch.equal(own[mine], total[mine]))
            own[: cuts[at]] = own[cuts[at + 1] :] = torch.nan
            end.all_gather(own, cuts, ranks)
            right.append(torch.equal(own, total))
            with pytest.raises(ValueError, match="cut at"):
                end.all_gather(own, (0, cuts[-1] + 1), ranks)
        end.barrier()
        end.close()
        return right

    expected = [[True] * 6 if rank in ranks else [] for rank in range(3)]
    assert values(run(3, body)) == expected


# bytes


@every_transport
def test_gathered_and_broadcast_bytes_are_those_brought(run):
    payloads = [b"", b"one", bytes(range(256)) * 20_000]

    def body(end):
        gathered = end.all_gather_bytes(payloads[end.rank], (0, 1, 2))
        pair = (
            end.all_gather_bytes(payloads[end.rank], (2, 1))
            if end.rank
            else [payloads[2], payloads[1]]
        )
        shown = end.broadcast_bytes(payloads[end.rank], (1, 2, 0))
        small = [end.all_gather_bytes(bytes([end.rank, n]), (0, 1, 2)) for n in range(20)]
        end.barrier()
        end.close()
        return [
            gathered == payloads,
            pair == [payloads[2], payloads[1]],
            shown == payloads[1],
            small == [[bytes([rank, n]) for rank in range(3)] for n in range(20)],
        ]

    assert values(run(3, body)) == [[True] * 4] * 3


@every_transport
def test_one_rank_alone_needs_no_other(run):
    def body(end):
        own = torch.ones(3)
        end.all_reduce(own, (0,))
        end.barrier()
        gathered = end.all_gather_bytes(b"me", (0,))
        end.close()
        return [own.tolist(), gathered == [b"me"], end.broadcast_bytes(b"x", (0,)) == b"x"]

    assert values(run(1, body)) == [[[1.0] * 3, True, True]]


@every_transport
def test_barrier_waits_for_every_rank(run, tmp_path):
    def body(end):
        seen = []
        for number in range(30):
            (tmp_path / f"{number} {end.rank}").touch()
            end.barrier()
            seen.append(all((tmp_path / f"{number} {rank}").exists() for rank in range(3)))
        end.close()
        return all(seen)

    assert values(run(3, body)) == [True] * 3


# failures


def until(condition):
    while not condition():
        time.sleep(0.001)


def let_others_wait():
    """Sleep: nothing shows that another rank waits, and what follows must hold either way."""
    time.sleep(0.2)


def waits(end, how):
    """Wait for what rank 0 will never do."""
    spec = (TensorSpec((4,), torch.float32),)
    if how == "receive":
        _, wait = end.bind_receive(0, 0, spec)
        end.barrier()
        wait()
    elif how == "send":
        send = end.bind_send(1, 0, spec)
        end.barrier()
        for _ in range(20):
            send([torch.zeros(4)])
        end.all_reduce(torch.zeros(4), (0, 1, 2, 3))  # unless the transport took them all
    elif how == "sum":
        end.barrier()
        end.all_reduce(torch.zeros(4), (0, 1, 2, 3))


def rank_0_binds(end):
    spec = (TensorSpec((4,), torch.float32),)
    end.bind_send(0, 1, spec)
    end.bind_receive(1, 2, spec)
    end.barrier()


HOWS = ("", "receive", "send", "sum")
OPTIONS = {"threads": {"capacity": 2}, "shared_memory": {}, "gloo": {}, "hosts": {}}
every_kind = pytest.mark.parametrize("kind", RUNNERS)


@every_kind
def test_abort_ends_every_wait_with_its_rank_and_reason(kind):
    def body(end):
        if end.rank == 0:
            rank_0_binds(end)
            let_others_wait()
            end.abort("the disk is full")
            end.abort("a later reason")
            end.barrier()
        waits(end, HOWS[end.rank])

    got = errors(RUNNERS[kind](4, body, **OPTIONS[kind]))
    assert got == ["TransportError: rank 0 failed: the disk is full"] * 4


@every_kind
def test_abort_reaches_ranks_that_call_later(kind, tmp_path):
    def body(end):
        spec, peer = (TensorSpec((4,), torch.float32),), 1 - end.rank
        send, (_, wait) = end.bind_send(0, peer, spec), end.bind_receive(0, peer, spec)
        end.barrier()
        (tmp_path / str(end.rank)).touch()
        if end.rank == 0:
            until((tmp_path / "1").exists)  # else it may not have left the barrier
            end.abort("no " * 2000)
        calls = (
            wait,
            lambda: send([torch.zeros(4)]),
            lambda: end.all_reduce(torch.zeros(2), (0, 1)),
            end.barrier,
        )
        for call in calls:
            with pytest.raises(TransportError, match="rank 0 failed: no no") as failed:
                call()
            assert failed.value.rank == 0

    values(RUNNERS[kind](2, body))


@every_kind
def test_rank_that_leaves_fails_those_who_still_wait_for_it(kind, tmp_path):
    def body(end):
        if end.rank == 0:
            rank_0_binds(end)
            end.close()  # and lives on, so that no broken connection tells of it
            until(lambda: len(list(tmp_path.iterdir())) == 3)
            return
        try:
            waits(end, HOWS[end.rank])
        finally:
            end.close()
            (tmp_path / str(end.rank)).touch()

    ok, *got = errors(RUNNERS[kind](4, body, **OPTIONS[kind]))
    assert ok == ""
    assert all(error.startswith("TransportError: rank 0 has left") for error in got), got


@every_kind
def test_what_was_sent_can_be_received_after_the_sender_has_left(kind, tmp_path):
    spec = (TensorSpec((4,), torch.int64),)

    def body(end):
        if end.rank == 0:
            send = end.bind_send(0, 1, spec)
            end.barrier()
            for number in range(3):
                send([torch.full((4,), number)])
            end.close()
            (tmp_path / "left").touch()
            return []
        _, wait = end.bind_receive(0, 0, spec)
        end.barrier()
        if kind in (
            "threads",
            "shared_memory",
        ):  # over gloo senders leave when all has been received
            until((tmp_path / "left").exists)
        got = [wait()[0].tolist() for _ in range(3)]
        for _ in range(2):
            with pytest.raises(TransportError, match="rank 0 has left"):
                wait()
        return got

    assert values(RUNNERS[kind](2, body))[1] == [[number] * 4 for number in range(3)]


# --- what was waited ---------------------------------------------------------------------------


HERE = threading.local()
LATE_S = 100.0


class Clock:
    """For who waits it is 0 until the other goes on, which that does once the clock is read."""

    def __init__(self, folder: Path) -> None:
        self.waits, self.goes_on, self.plain = folder / "waits", folder / "goes", time.perf_counter

    def __call__(self) -> float:
        if not getattr(HERE, "waits", False):
            return self.plain()
        now_s = LATE_S if self.goes_on.exists() else 0.0  # at first before anybody can let it go
        self.waits.touch()
        return now_s

    @contextmanager
    def for_me(self) -> Iterator[None]:
        HERE.waits = True
        yield
        HERE.waits = False

    def let_go(self) -> None:
        until(self.waits.exists)
        self.goes_on.touch()


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that transports read."""
    made = Clock(tmp_path)
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def late(clock, end):
    """Send a message late, then one that lies there when it is asked for; return the waiting."""
    spec, tensors = (TensorSpec((2,), torch.int64),), [torch.ones(2, dtype=torch.int64)]
    if end.rank == 0:
        send = end.bind_send(0, 1, spec)
        end.barrier()
        clock.let_go()
        send(tensors)
        send(tensors)
        end.barrier()
        waited = [end.waited.to_send_s]
    else:
        _, wait = end.bind_receive(0, 0, spec)
        end.barrier()
        with clock.for_me():
            wait()
        end.barrier()
        waited = [end.waited.to_receive_s]
        wait()
        waited.append(end.waited.to_receive_s)
    end.close()
    return waited


@fast_transport
def test_waiting_for_a_message_is_told_and_taking_one_is_none(run, clock):
    assert values(run(2, partial(late, clock))) == [[0.0], [LATE_S, LATE_S]]


def test_waiting_over_gloo_is_told(clock):
    assert values(RUNNERS["gloo"](2, partial(late, clock)))[1][0] == LATE_S


def crowded(clock, end):
    """Send more than there is room for to a rank that reads late; return what was waited."""
    spec, count = (TensorSpec((2,), torch.int64),), 9
    if end.rank == 0:
        send = end.bind_send(0, 1, spec)
        end.barrier()
        with clock.for_me():
            for _ in range(count):
                send([torch.ones(2, dtype=torch.int64)])
        clock.waits.touch()  # or else it had no need to
    else:
        _, wait = end.bind_receive(0, 0, spec)
        end.barrier()
        clock.let_go()
        for _ in range(count):
            wait()
    waited = end.waited.to_send_s
    end.close()
    return waited


@pytest.mark.parametrize(
    ("run", "room"), [(run_shared_memory, {"slots": 4}), (run_threads, {"capacity": 4})]
)
def test_waiting_for_room_is_told(run, room, clock):
    assert values(run(2, partial(crowded, clock), **room)) == [LATE_S, 0.0]


def test_where_there_is_room_nobody_waits_for_it(clock):
    assert values(run_threads(2, partial(crowded, clock))) == [0.0, 0.0]


class Summing:
    sums = "bfloat16"


@every_transport
def test_a_sum_in_16_bits_rounds_each_rank_and_the_sum_of_all(run):
    """For any number of numbers, none and more than a block included, in any order of ranks."""
    sizes = (0, 1, 5, 2**20 + 7)

    def body(end):
        right = []
        for ranks in ((2, 0, 1), (0, 1, 2)):
            for numel in sizes:
                brought = [
                    torch.randn(numel, generator=torch.Generator().manual_seed(rank))
                    for rank in range(3)
                ]
                own = brought[end.rank].clone()
                sum_over(end, own, ranks, Summing())
                first, *others = (brought[rank].bfloat16().float() for rank in ranks)
                for other in others:
                    first = first + other
                right.append(torch.equal(own, first.bfloat16().float()))
        end.barrier()
        end.close()
        return right

    assert values(run(3, body)) == [[True] * 2 * len(sizes)] * 3
