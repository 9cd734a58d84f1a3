"""All ranks stop, and write checkpoints that nobody planned, after the same step."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from itertools import count
from random import Random

import pytest
import torch
import torch.distributed as dist

from penstock.checkpoints import checkpoint
from penstock.checkpoints.control import Command, Control, LocalBoard, StoreBoard
from penstock.checkpoints.saver import Saver
from penstock.runtime.launch import run_processes, run_threads
from tests.parity.models import captured, job_of, plan_of
from tests.parity.training import Run, differing, steps_saved, train, windows
from tests.runtime.test_launch import result

STEPS = 5


# -- boards ---------------------------------------------------------------------------------------


def stores():
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: StoreBoard(dist.PrefixStore("run", own.clone()))


@pytest.mark.parametrize("kind", ["local", "store"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_run_apart_obey_the_same_orders(kind, seed, monkeypatch):
    """Ranks go on at their own pace, but meet where one is told to save, as they do there."""
    monkeypatch.setattr("penstock.checkpoints.control._LOOK_S", 0.01)
    random, ranks = Random(seed), 4
    with closing(LocalBoard()) as local:
        make = stores() if kind == "store" else lambda: local
        boards = [make() for _ in range(ranks)]
        meet, did = threading.Barrier(ranks), [[] for _ in range(ranks)]
        every_s = random.choice([0.0005, 0.002, 1.0])
        asks, who = random.randrange(10, 60), random.randrange(ranks)

        def live(rank):
            control, pace = Control(boards[rank], every_s), Random(100 * seed + rank)
            for done in count(1):
                if pace.random() < 0.2:
                    time.sleep(0.001)
                if done == asks and rank == who:
                    boards[rank].ask_to_stop(signal.SIGTERM)
                do = control.after(done)
                if do != "go":
                    did[rank].append((done, do))
                    meet.wait(60)
                    control.saved()
                if do == "stop":
                    return

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(each == did[0] for each in did)
        assert did[0][-1][1] == "stop"
        assert did[0][-1][0] >= asks
        assert {board.asked() for board in boards} <= {signal.SIGTERM, 0}
        assert boards[who].asked() == signal.SIGTERM


@pytest.mark.parametrize("kind", ["local", "store"])
def test_ranks_make_the_plan_again_after_the_same_window_and_count_anew(kind, monkeypatch):
    """Each time that one of them asks; what they post, all see."""
    monkeypatch.setattr("penstock.checkpoints.control._LOOK_S", 0.01)
    ranks = 3
    with closing(LocalBoard()) as local:
        make = stores() if kind == "store" else lambda: local
        boards = [make() for _ in range(ranks)]
        assert boards[1].posts(ranks) == [""] * ranks
        meet, did = threading.Barrier(ranks), [[] for _ in range(ranks)]

        def live(rank):
            control, pace, done, plans = Control(boards[rank]), Random(rank), 0, 0
            for total in count(1):
                done += 1
                time.sleep(0.001 * pace.random())
                if rank == 0 and total in (20, 60):
                    boards[rank].ask_to_plan(plans + 1)
                if rank == 2 and total == 120:
                    boards[rank].ask_to_stop(signal.SIGTERM)
                do = control.after(done)
                if do == "plan":
                    did[rank].append(total)
                    control.planned(done)
                    done, plans = 0, plans + 1
                    boards[rank].post(rank, f"{rank} has {plans}")
                    meet.wait(60)
                    assert boards[rank].posts(ranks) == [f"{r} has {plans}" for r in range(ranks)]
                    meet.wait(60)
                if do == "stop":
                    did[rank].append(-total)
                    return

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(each == did[0] for each in did)
    first, second, end = did[0]
    assert 20 <= first < 60 <= second < -end


def test_the_first_rank_at_a_place_decides_for_all():
    with closing(LocalBoard()) as board:
        assert board.agree(Command(3, "save", 4)).do == "save"
        assert board.agree(Command(3, "stop", 4)).do == "save"
        assert board.agree(Command(2, "stop", 3)).do == "go"  # all have passed it
        assert board.agree(Command(4, "go", 5)).do == "go"
    make = stores()
    first, late = make(), make()
    assert first.agree(Command(8, "save", 12)) == (8, "save", 12)
    assert late.agree(Command(5, "stop", 6)) == (5, "go", 8)
    assert late.agree(Command(8, "stop", 9)) == (8, "save", 12)
    assert late.agree(Command(12, "stop", 13)) == (12, "stop", 13)
    assert first.agree(Command(12, "go", 40)) == (12, "stop", 13)


def test_a_checkpoint_is_due_by_the_clock_since_the_last_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("penstock.checkpoints.control.time.monotonic", lambda: now[0])
    with closing(LocalBoard()) as board:
        control = Control(board, every_s=10.0)
        told = []
        for windows in range(1, 8):
            now[0] += 4.0
            told.append(control.after(windows))
            if told[-1] == "save":
                now[0] += 1.0
                control.saved()
        assert told == ["go", "go", "save", "go", "go", "save", "go"]


# -- runs -----------------------------------------------------------------------------------------


def run_of(name, schedule, stages, replicas=1) -> Run:
    made = captured(name, torch.float32)
    plan = plan_of(made.graph, schedule, stages, 4 // replicas, replicas=replicas)
    return Run(plan, job_of(name, torch.float32, "adamw"), made)


def asking(run: Run, board, at: int) -> Run:
    """Return a run that is asked to stop when some rank reads micro-batch `at`."""

    def data(start):
        for index, batch in zip(count(start), run.job.data(start), strict=False):
            if index == at:
                board.ask_to_stop(signal.SIGTERM)
            yield batch

    return run._replace(job=replace(run.job, data=data))


@pytest.mark.parametrize(
    ("schedule", "stages", "replicas", "launcher"),
    [
        ("one_f_one_b", 2, 1, run_threads),
        ("one_f_one_b", 2, 1, run_processes),
        ("one_f_one_b", 1, 2, run_processes),
        ("interleaved", 8, 1, run_threads),
        ("zb_h1", 2, 2, run_threads),
    ],
)
@pytest.mark.sampled(2)
def test_a_run_that_is_stopped_and_resumed_gives_the_same_bits(
    schedule, stages, replicas, launcher, tmp_path
):
    run = run_of("dropout", schedule, stages, replicas)
    whole = train(run, tmp_path / "whole", (STEPS,))
    with closing(LocalBoard()) as board:
        stopped = asking(run, board, 9)
        part = train(stopped, tmp_path / "part", (STEPS,), launcher, board=board)
    done = len(part.steps)
    assert 3 <= done < STEPS
    newest = checkpoint.latest(tmp_path / "part")
    assert newest.name == f"step-{done:06d}"
    steps = tuple((program, done + step) for program, step in windows(run, (STEPS - done,)))
    rest = train(run, tmp_path / "rest", windows=steps, resume=newest)
    assert differing(rest.weights, whole.weights) == []
    assert [s.loss for s in (*part.steps, *rest.steps)] == [s.loss for s in whole.steps]


def test_an_asynchronous_run_stops_where_it_drains(tmp_path):
    run = run_of("gpt", "pipedream", 2)
    with closing(LocalBoard()) as board:
        part = train(asking(run, board, 1), tmp_path, (2, 3), board=board)
    assert len(part.steps) == 2
    assert checkpoint.latest(tmp_path).name == "step-000002"


def test_all_ranks_save_together_when_the_clock_says_so(tmp_path, monkeypatch):
    made = steps_saved(monkeypatch)
    monkeypatch.setattr(Saver, "is_put_off", lambda self: False)
    run = run_of("frozen", "one_f_one_b", 2)
    with closing(LocalBoard()) as board:
        train(run, tmp_path, (4,), board=board, every_s=0.0)
    assert made == [1, 2, 3, 4]


def test_a_signal_to_the_whole_group_leaves_ranks_to_the_parent(tmp_path):
    """And what a rank forks, as workers that read data are, lives on with the rank."""

    def work(transport, report):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        (asked, ask), (lives, live) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            while os.read(asked, 1):
                os.write(live, b"!")
            os._exit(0)
        for _ in range(2):
            os.write(ask, b"?")
            assert os.read(lives, 1) == b"!"
            os.kill(child, signal.SIGTERM)
            os.kill(child, signal.SIGINT)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return result(transport.rank)

    assert len(run_processes(work, 2, lambda step: None)) == 2


@pytest.mark.parametrize("kind", ["local", "store"])
def test_a_step_to_keep_is_asked_for_by_a_process_that_was_forked(kind, monkeypatch):
    """All ranks keep the same one, once for each time that it is asked for."""
    monkeypatch.setattr("penstock.checkpoints.control._LOOK_S", 0.0)
    with closing(LocalBoard()) as local:
        make = stores() if kind == "store" else lambda: local
        boards = [make(), make()]
        controls = [Control(board) for board in boards]
        assert [control.after(1) for control in controls] == ["go", "go"]
        asks = multiprocessing.get_context("fork").Process(target=boards[0].ask_to_audit, args=(1,))
        asks.start()
        asks.join()
        assert [control.after(2) for control in controls] == ["audit", "audit"]
        for control in controls:
            control.audited()
        assert [control.after(3) for control in controls] == ["go", "go"]
