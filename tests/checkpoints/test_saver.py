"""Checkpoints written beside training: from a copy, whole or not at all, with checksums."""

import json
import logging
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from penstock.checkpoints import beside, checkpoint, folders, saver, writer
from penstock.checkpoints.control import Control
from penstock.checkpoints.folders import Keep
from penstock.checkpoints.part_file import pour
from penstock.checkpoints.saver import SavePolicy, Saver, interval_s, saving
from penstock.checkpoints.snapshot import Snapshot, bytes_of, described
from penstock.checkpoints.writer import Order, OrderLines
from penstock.errors import CheckpointError, PlanError, RunError
from penstock.runtime.launch import run_processes, run_threads
from tests.runtime.test_launch import result

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return (
        torch.tensor(list(Random(seed).randbytes(size)), dtype=torch.uint8).view(dtype).view(shape)
    )


# -- the file of a part ---------------------------------------------------------------------------


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=6
    )
)
def test_a_part_is_the_file_that_the_library_of_the_format_writes_and_reads(rows, tmp_path_factory):
    """Of every type and shape, scalars and empty ones too."""
    tensors = {f"weights/{n}": tensor(d, tuple(s), n) for n, (d, s) in enumerate(rows)}
    pieces, content = described(tensors), bytearray()
    pour(pieces, (bytes_of(tensors[piece.key]) for piece in pieces), content.extend)
    path = tmp_path_factory.mktemp("part") / "a.safetensors"
    path.write_bytes(content)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
        assert bytes(bytes_of(found[key])) == bytes(bytes_of(value))
    assert len(content) == len(save(tensors))


def test_what_lies_across_memory_is_copied_in_order():
    lying = torch.arange(6.0).view(2, 3)
    across, sparse = lying.t(), torch.eye(3).to_sparse()
    tensors = {"a/across": across, "a/sparse": sparse, "a/negative": torch.ones(2).neg()}
    tensors |= {"a/conjugate": torch.tensor([1 + 2j]).conj(), "a/empty": torch.empty(0)}
    shot, pieces = Snapshot(), described(tensors)
    shot.grow(sum(piece.size_bytes for piece in pieces))
    shot.take(tensors, pieces)
    content = os.pread(shot.file, shot.size_bytes, 0)
    assert content == b"".join(bytes(bytes_of(tensors[piece.key])) for piece in pieces)
    shot.close()


def test_a_type_that_no_file_can_hold_is_named():
    with pytest.raises(CheckpointError, match=r"optimizer/a/z is a tensor of torch\.complex128"):
        described({"optimizer/a/z": torch.zeros(2, dtype=torch.complex128)})


# -- checksums ------------------------------------------------------------------------------------

SMALL = {"weights/a": torch.arange(5.0), "weights/b": torch.arange(3), "buffers/c": torch.ones(())}


def kept(folder: Path, step: int = 4) -> Path:
    checkpoint.write_part(folder, step, 0, (SMALL, {"optimizer/a/rate": 0.5}))
    return checkpoint.finish(folder, step)


def test_every_flipped_byte_is_told_and_its_tensor_named(tmp_path):
    """Where it lies in a tensor, by that tensor's place in the file: said by the library."""
    part = kept(tmp_path) / "rank-0.safetensors"
    content = part.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    owners = {
        8 + length + place: key
        for key, row in header.items()
        for place in range(*row["data_offsets"])
    }
    for at in range(len(content)):
        part.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(part.parent)
        assert f"checkpoint file {part} is damaged" in caught.value.message
        if at in owners:
            assert f"the bytes of tensor {owners[at]} have changed" in caught.value.message
    part.write_bytes(content)
    assert checkpoint.load(part.parent).step == 4


def test_every_flipped_bit_of_the_manifest_is_told_or_means_the_same(tmp_path):
    """A space that becomes another space is the same JSON."""
    state = kept(tmp_path) / "state.json"
    content, whole = state.read_bytes(), checkpoint.load(state.parent)
    refused = 0
    for at in range(len(content)):
        for bit in (1, 4, 16):
            state.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            try:
                found = checkpoint.load(state.parent)
            except CheckpointError:
                refused += 1
            else:
                assert (found.step, found.plain) == (whole.step, whole.plain)
    assert refused > 2.9 * len(content)


def test_checkpoints_without_checksums_are_read(tmp_path):
    """As older versions wrote them."""
    state = kept(tmp_path) / "state.json"
    told = json.loads(state.read_text())
    state.write_text(json.dumps({name: told[name] for name in ("step", "parts", "plain")}))
    assert checkpoint.load(state.parent).step == 4


@pytest.mark.parametrize("damage", ["rank-0.safetensors", "state.json"])
def test_the_one_before_is_taken_where_the_newest_is_damaged(damage, tmp_path):
    for step in (2, 4, 6):
        kept(tmp_path, step)
    for step in (4, 6):
        path = tmp_path / f"step-{step:06d}" / damage
        path.write_bytes(path.read_bytes()[:-9])
    told: list[str] = []
    found = checkpoint.newest_whole(tmp_path, told.append)
    assert found == (tmp_path / "step-000002", 2)
    assert [damage in words and "going back to step-000002" in words for words in told] == [
        True
    ] * 2
    names = checkpoint.set_aside(tmp_path, 2)
    assert sorted(path.name for path in names) == ["damaged-step-000004", "damaged-step-000006"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000002"


def test_where_all_are_damaged_the_newest_is_refused(tmp_path):
    for step in (2, 4):
        (kept(tmp_path, step) / "rank-0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="step-000004"):
        checkpoint.newest_whole(tmp_path)
    assert checkpoint.newest_whole(tmp_path / "none") is None


# -- beside training ------------------------------------------------------------------------------


def state_of(rank: int, step: int, size: int = 1000):
    value = torch.full((size,), float(step))
    return {f"weights/{rank}": value}, {f"optimizer/{rank}/step": step}


def orders() -> OrderLines:
    """Return what comes where nobody says anything."""
    return OrderLines(os.pipe()[0])


def saved(folder: Path, steps, launcher=run_threads, ranks: int = 2, parts: int = 2, size=1000):
    """Have ranks save after `steps`, the last one to the end; return what each told."""

    def work(transport, report):
        def state(step):
            return state_of(transport.rank, step, size) if transport.rank < parts else None

        with saving(SavePolicy(folder), transport, Control(None)) as own:
            own.begin(state(0))
            for step in steps:
                with own.timed():
                    found = state(step)
                    own.save(step, found, waits=step == steps[-1])
                    if found is not None:
                        found[0][f"weights/{transport.rank}"].fill_(-1.0)  # training goes on
            return replace(result(transport.rank), saves=own.told)

    return [each.saves for each in launcher(work, ranks, lambda step: None)]


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
def test_what_is_saved_is_the_state_at_the_end_of_the_step(launcher, tmp_path):
    """Though it changes at once, and also where some ranks have no part."""
    told = saved(tmp_path, [3, 5, 9], launcher, ranks=3)
    assert folders.steps_in(tmp_path) == [5, 9]
    for step in (5, 9):
        found = checkpoint.load(folders.folder_of(tmp_path, step))
        assert found.step == step
        assert found.plain == {f"optimizer/{rank}/step": step for rank in (0, 1)}
        for rank in (0, 1):
            values = found.tensors[f"weights/{rank}"]
            assert values.tolist() == ([float(step)] * 1000 if step == 5 else values.tolist())
    assert [len(each.blocked_s) for each in told] == [2, 2, 2]
    assert [len(each.written_s) for each in told] == [2, 2, 0]
    assert [each.size_bytes for each in told] == [4000, 4000, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005", "step-000009"]


def test_state_that_grows_has_room(tmp_path):
    def work(transport, report):
        with saving(SavePolicy(tmp_path), transport, Control(None)) as own:
            own.begin(({}, {}))
            own.save(1, state_of(0, 1, 10), waits=False)
            own.save(2, state_of(0, 2, 10_000_000), waits=False)
            own.settle()
        return result(0)

    run_threads(work, 1, lambda step: None)
    assert len(checkpoint.load(tmp_path / "step-000002").tensors["weights/0"]) == 10_000_000


def test_the_process_that_writes_loads_no_torch():
    program = "import sys, penstock.checkpoints.writer as w; print('torch' in sys.modules, w.main)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("False"), done.stderr


@contextmanager
def held(own: Saver):
    """Keep the process that writes from writing meanwhile."""
    assert own._writer is not None
    os.kill(own._writer.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(own._writer.process.pid, signal.SIGCONT)


def test_one_due_by_the_clock_is_put_off_while_the_one_before_is_written(tmp_path, caplog):
    """And no rank finds itself asked for one that it would have to wait for."""

    def work(transport, report):
        with saving(SavePolicy(tmp_path), transport, control := Control(None)) as own:
            own.begin(state_of(0, 0))
            own.settle()
            assert not control.put_off()
            own.save(1, state_of(0, 1), waits=False)
            with held(own):
                assert [control.put_off(), control.put_off()] == [True, True]
            own.settle()
            assert not control.put_off()
            assert (own.told.postponed, own.told.waited) == (1, 0)
        return result(0)

    with caplog.at_level(logging.WARNING):
        run_threads(work, 1, lambda step: None)
    assert [r.getMessage() for r in caplog.records] == [
        "a checkpoint is put off until that after step 1 is there"
    ]


def test_one_that_was_asked_for_waits_for_the_one_before_and_says_so(tmp_path, caplog, monkeypatch):
    answer = beside.Beside.answer

    def woken(own, wait_s):
        if wait_s is None:
            os.kill(own.process.pid, signal.SIGCONT)
        return answer(own, wait_s)

    def work(transport, report):
        with saving(SavePolicy(tmp_path), transport, Control(None)) as own:
            own.begin(state_of(0, 0))
            own.save(1, state_of(0, 1), waits=False)
            os.kill(own._writer.process.pid, signal.SIGSTOP)
            own.save(2, state_of(0, 2), waits=False)
            own.settle()
            assert own.told.waited == 1
        return result(0)

    monkeypatch.setattr(beside.Beside, "answer", woken)
    with caplog.at_level(logging.WARNING):
        run_threads(work, 1, lambda step: None)
    assert folders.steps_in(tmp_path) == [1, 2]
    assert "step 2 waits for the checkpoint after step 1" in caplog.text


def test_without_memory_for_a_copy_training_waits_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saver, "free_bytes", lambda: 9_999)
    with caplog.at_level(logging.WARNING):
        told = saved(tmp_path, [3, 5])
    assert [each.blocked_s for each in told] == [(), ()]
    assert folders.steps_in(tmp_path) == [3, 5]
    assert "no memory for copies" in caplog.text
    assert all(saved(tmp_path / "more", [3, 5], size=900)[rank].blocked_s for rank in (0, 1))


# -- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_part_that_cannot_be_written_ends_the_run_and_leaves_nothing(guilty, tmp_path):
    """RLIMIT_FSIZE makes a real write fail, of the process that writes for one rank."""

    def work(transport, report):
        with saving(SavePolicy(tmp_path), transport, Control(None)) as own:
            own.begin(state_of(transport.rank, 0))
            if transport.rank == guilty:
                limit = 1000, resource.RLIM_INFINITY
                resource.prlimit(own._writer.process.pid, resource.RLIMIT_FSIZE, limit)
            own.save(3, state_of(transport.rank, 3), waits=False)
            own.settle()
        return result(transport.rank)

    kept(tmp_path, 2)
    about = rf"rank {guilty} failed: cannot write checkpoint .*File too large"
    with pytest.raises(RunError, match=about) as caught:
        run_processes(work, 2, lambda step: None)
    assert "earlier checkpoints are intact" in caught.value.hint
    checkpoint.discard(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_writer_whose_folder_has_its_name_by_now_knows_that_it_is_complete(tmp_path):
    order = Order(str(tmp_path), 3, 1, "-a", (0, 1), 0, Keep())
    order.hidden.mkdir()
    (order.hidden / "rank-1.failed").touch()
    assert writer._given_up(order)
    (order.hidden / "rank-1.failed").unlink()
    folders.finish(tmp_path, 3, "-a")
    assert not writer._given_up(order)
    assert writer._completed(order, os.getppid(), orders())


@pytest.mark.parametrize("late", [0, 1])
def test_a_writer_that_comes_late_hears_that_it_is_given_up(late, tmp_path):
    """Also once the first one has removed what there was."""
    own = Order(str(tmp_path), 3, 1, "-a", (0, 1), 0, Keep())
    if late:
        folders.give_up(own.hidden, 0)
    else:
        folders.put_part(own.hidden, 0, (), (), {})
        folders.call_off(own.hidden, 0)
    with mmap.mmap(-1, 1) as memory:
        reply = writer.written(own, memory, os.getppid(), orders())
    assert reply.follows
    assert not list(own.hidden.glob("rank-0.[!f]*"))


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_writer_that_is_alone_waits_for_what_was_ordered(is_ordered, tmp_path, monkeypatch):
    """The process of the other rank may be slow, where the machine has much to do."""
    monkeypatch.setattr(writer, "_ABSENT_S", 0.05)
    ordered = Order(str(tmp_path), 3, 0, "-a", (0, 1), 0, Keep())
    folders.announce(ordered.hidden, 0)
    if is_ordered:
        folders.announce(ordered.hidden, 1)
    late = threading.Timer(0.5, folders.put_part, (ordered.hidden, 1, (), (), {}))
    late.start()
    with mmap.mmap(-1, 1) as memory:
        reply = writer.written(ordered, memory, -1, orders())
    late.join()
    assert reply.follows != is_ordered
    assert [path.name for path in folders.complete(tmp_path)] == ["step-000003"] * is_ordered
    if is_ordered:
        names = sorted(path.name for path in (tmp_path / "step-000003").iterdir())
        assert names == ["rank-0.safetensors", "rank-1.safetensors", "state.json"]


@pytest.mark.parametrize("first", range(len(writer.END)))
def test_a_writer_ends_at_the_last_word_though_the_pipe_stays_open(first):
    """Processes that the data forks hold it open; the word may come in two parts."""
    read, write = os.pipe()
    come = OrderLines(read)
    os.write(write, writer.LOST + writer.END[:first])
    assert come.is_alone()
    os.write(write, writer.END[first:])
    assert come.next() is None
    assert come.is_alone()
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("word", [b"", writer.LOST, writer.END, writer.LOST + writer.END])
def test_an_order_is_heard_though_the_last_word_comes_with_it(word, tmp_path):
    """As of a rank that ends, or is killed, right after it has ordered."""
    read, write = os.pipe()
    ordered = Order(str(tmp_path), 3, 1, "-a", (0, 1), 0, Keep(), plain={})
    os.write(write, ordered.line() + word)
    os.close(write)
    come = OrderLines(read)
    heard = come.next()
    assert heard is not None
    assert heard.line() == ordered.line()
    assert come.next() is None
    os.close(read)


def test_a_rank_that_ends_waits_for_no_process_that_its_data_has_forked(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "_PATIENCE_S", 20.0)
    own = beside.Beside(Order(str(tmp_path), 0, 0, "-a", (0,), 1, Keep()))
    assert own.answer(None) is not None
    forked = [os.dup(own.process.stdin.fileno()), os.dup(own.process.stdout.fileno())]
    own.close()
    assert own.process.returncode == 0
    for number in forked:
        os.close(number)


def test_a_place_where_nobody_may_write_is_told(tmp_path):
    def work(transport, report):
        with saving(SavePolicy(tmp_path), transport, Control(None)) as own:
            own.begin(state_of(0, 0))
            own.checkpoints = tmp_path / "file"
            own.save(3, state_of(0, 3), waits=False)
            own.settle()

    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RunError, match=r"cannot write checkpoint .*file"):
        run_threads(work, 1, lambda step: None)


def test_a_process_that_is_killed_ends_the_run(tmp_path):
    def work(transport, report):
        with saving(SavePolicy(tmp_path), transport, Control(None)) as own:
            own.begin(state_of(0, 0))
            own.save(3, state_of(0, 3), waits=False)
            own.settle()
            os.kill(own._writer.process.pid, signal.SIGKILL)
            own.save(4, state_of(0, 4), waits=False)
            own.settle()
        return result(0)

    with pytest.raises(RunError, match=r"the process that writes checkpoints was killed by signal"):
        run_threads(work, 1, lambda step: None)
    assert checkpoint.load(checkpoint.latest(tmp_path)).step == 3


def test_what_was_ordered_is_completed_though_the_ranks_are_killed(tmp_path):
    """Who looks for the newest waits for it."""

    def work(transport, report):
        with saving(SavePolicy(tmp_path), transport, Control(None)) as own:
            own.begin(state_of(transport.rank, 0, 2_000_000))
            own.save(3, state_of(transport.rank, 3, 2_000_000), waits=False)
            transport.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RunError, match="was killed by signal 9"):
        run_processes(work, 2, lambda step: None)
    assert checkpoint.newest_whole(tmp_path) == (tmp_path / "step-000003", 3)


# -- a crash at any byte --------------------------------------------------------------------------


def crashing(folder: Path, at: int) -> int:
    """Write step 4 as the process beside a rank does, and die at byte `at`; return the bytes."""
    counter = os.memfd_create("bytes")
    pid = os.fork()
    if pid == 0:
        write, left = os.write, [at]

        def cut(handle: int, data) -> int:
            done = write(handle, bytes(data)[: left[0]])
            left[0] -= done
            write(counter, b"." * done)
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        os.write = cut
        shot, (tensors, plain) = Snapshot(), (SMALL, {"step": 4})
        pieces = described(tensors)
        shot.grow(sum(piece.size_bytes for piece in pieces))
        shot.take(tensors, pieces)
        own = 4, 0, "-token", [0], shot.size_bytes, Keep()
        order = Order(str(folder), *own, tuple(pieces), plain)
        writer.written(order, shot._memory.base, os.getppid(), orders())
        os._exit(0)
    os.waitpid(pid, 0)
    size = os.fstat(counter).st_size
    os.close(counter)
    return size


def test_a_crash_at_any_byte_leaves_the_one_before_whole(tmp_path):
    whole = crashing(tmp_path / "whole", 10**9)
    assert checkpoint.load(tmp_path / "whole" / "step-000004").plain == {"step": 4}
    random, seen = Random(5), set[int]()
    places = [0, 1, whole - 1, whole, *(random.randrange(whole) for _ in range(12))]
    for number, at in enumerate(places):
        folder = tmp_path / str(number)
        kept(folder, 2)
        crashing(folder, max(1, at))
        found = checkpoint.newest_whole(folder)
        assert found is not None
        seen.add(found[1])
        checkpoint.discard(folder)
        assert not list(folder.glob(".*"))
    assert seen == {2}


# -- which stay, and when they are due ------------------------------------------------------------


@given(
    steps=st.lists(st.integers(1, 60), unique=True, max_size=12),
    newest=st.integers(1, 4),
    every=st.integers(0, 9),
)
def test_what_stays_is_the_newest_and_every_nth(steps, newest, every):
    """One after the other is saved, in order, and what goes is removed at once."""
    there: list[int] = []
    for step in sorted(steps):
        there.append(step)
        for old in Keep(newest, every).goes(there):
            there.remove(old)
    expected = {step for step in steps if every and step % every == 0}
    assert there == sorted(expected | set(sorted(steps)[-newest:]))


def test_a_policy_that_keeps_nothing_is_refused():
    with pytest.raises(PlanError, match="keep has 0 newest"):
        Keep(0)


def test_the_policy_holds_beside_the_steps_too(tmp_path):
    def work(transport, report):
        with saving(SavePolicy(tmp_path, keep=Keep(1, 4)), transport, Control(None)) as own:
            own.begin(state_of(0, 0))
            for step in range(1, 10):
                own.save(step, state_of(0, step), waits=step == 9)
        return result(0)

    run_threads(work, 1, lambda step: None)
    assert folders.steps_in(tmp_path) == [4, 8, 9]


def lost_s(interval: float, cost: float, mtbf: float) -> float:
    """Return the part of the time that is lost, simulated: failures at any moment alike."""
    random, done, clock, failure = Random(3), 0.0, 0.0, 0.0
    while clock < 4000 * mtbf:
        failure = clock + random.expovariate(1 / mtbf)
        while clock + interval + cost <= failure:
            clock, done = clock + interval + cost, done + interval
        clock = failure
    return 1 - done / clock


def test_the_interval_loses_least_time_of_all_when_failures_come_at_any_moment():
    """By a simulation that knows nothing of the formula."""
    cost, mtbf = 1.0, 800.0
    found = interval_s(cost, mtbf)
    assert found == 40.0
    least = lost_s(found, cost, mtbf)
    assert all(lost_s(factor * found, cost, mtbf) > least for factor in (0.4, 2.5))
    assert interval_s(cost, mtbf, written_s=55.0) == 55.0


def test_the_interval_follows_from_what_a_checkpoint_costs_in_the_run(tmp_path):
    """None is due before what one costs can be known; the first one comes at once."""

    def work(transport, report):
        control = Control(None)
        with saving(SavePolicy(tmp_path, mtbf_s=2e9), transport, control) as own:
            assert control.every_s == math.inf
            own.begin(state_of(0, 0))
            assert control.every_s == 0.0
            for step in (1, 2, 3):
                with own.timed():
                    own.save(step, state_of(0, step), waits=False)
            cost_s = sorted(own.told.blocked_s)[1]
            assert control.every_s == own.told.every_s == interval_s(cost_s, 2e9)
            own.settle()
        return result(0)

    run_threads(work, 1, lambda step: None)
