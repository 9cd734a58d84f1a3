"""Started: ranks that a command starts itself, here commands that load nothing."""

import json
import os
import signal
import sys
import textwrap
from types import SimpleNamespace

import pytest

from penstock.device import Device
from penstock.errors import GraphError
from penstock.runtime import launch
from penstock.training import local_ranks, rendezvous, torchrun
from penstock.training.local_ranks import UNPLANNED, UnplannedError, ranks_to_start, start_ranks
from penstock.training.run_asked import JobLearned, RunAsked

GPUS = tuple(Device("cuda", index) for index in range(4))


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "here", lambda: GPUS[0])
    monkeypatch.setattr(local_ranks, "all_here", lambda: GPUS)


def command(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the command of this process be a script: `rank` is its number."""
    begins = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
    script = begins + textwrap.dedent(text)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-S", "-c", script])


def test_machine_without_accelerators_starts_no_ranks() -> None:
    assert ranks_to_start(2, None, None, alone=False) == 1


@pytest.mark.usefixtures("on_gpus")
def test_each_accelerator_gets_a_rank_unless_fewer_are_asked_for(monkeypatch) -> None:
    assert ranks_to_start(None, None, None, alone=False) == 4
    assert ranks_to_start(2, None, None, alone=False) == 2
    assert ranks_to_start(None, None, None, alone=True) == 1
    assert ranks_to_start(8, None, None, alone=False) == 1  # who trains says that there are four
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    assert ranks_to_start(None, None, None, alone=False) == 1


def test_each_rank_is_told_its_number_and_how_many_there_are(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PLACE", str(tmp_path))
    command(
        monkeypatch,
        """
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
        with open(os.path.join(os.environ["PLACE"], str(rank)), "w") as file:
            file.write(" ".join(os.environ[name] for name in names))
        """,
    )
    assert start_ranks(2)[:2] == (0, "")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [
        "0 0 2 2 127.0.0.1",
        "1 1 2 2 127.0.0.1",
    ]


def test_error_that_the_first_rank_does_not_tell_is_told(monkeypatch, capfd) -> None:
    command(monkeypatch, "if rank: sys.exit('error: of rank 1')")
    assert start_ranks(2)[:2] == (1, "")
    assert "error: of rank 1" in capfd.readouterr().err


def test_only_the_first_rank_tells_what_it_has_failed_with(monkeypatch, capfd) -> None:
    command(monkeypatch, "sys.exit(f'error: of rank {rank}')")
    assert start_ranks(2)[:2] == (1, "")
    assert capfd.readouterr().err.count("error: of rank") == 1


def test_rank_that_is_left_after_a_failure_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(local_ranks, "_GRACE_S", 0.1)
    command(monkeypatch, "if rank: time.sleep(600)\nsys.exit(3)")
    assert start_ranks(2)[:2] == (3, "")


def test_signal_to_the_command_goes_to_each_rank(monkeypatch) -> None:
    monkeypatch.setenv("PARENT", str(os.getpid()))
    command(
        monkeypatch,
        f"""
        import signal
        signal.signal(signal.SIGTERM, lambda *_: sys.exit({128 + signal.SIGTERM}))
        if rank: os.kill(int(os.environ["PARENT"]), signal.SIGTERM)
        time.sleep(100)
        """,
    )
    assert start_ranks(2)[0] in (128 + signal.SIGTERM, 256 + signal.SIGTERM - 128)


def test_rank_tells_who_started_it_why_no_plan_can_be_made(monkeypatch) -> None:
    reason = f"""
    place = open(os.environ['PENSTOCK_UNPLANNED'], 'w')
    place.write('["why", 2]'); place.close(); sys.exit({UNPLANNED})
    """
    command(monkeypatch, f"if rank: sys.exit(0)\n{textwrap.dedent(reason)}")
    assert start_ranks(2) == (UNPLANNED, "why", 2)


def test_replicas_know_that_they_are_some(monkeypatch) -> None:
    command(monkeypatch, "sys.exit(3 if 'PENSTOCK_EAGERLY' in os.environ else 4)")
    assert start_ranks(2, eagerly=True).code == 3
    assert start_ranks(2).code == 4


def test_ranks_of_an_elastic_run_end_as_those_that_were_not_killed(monkeypatch, capfd) -> None:
    monkeypatch.setattr(local_ranks, "_GRACE_S", 0.0)
    command(monkeypatch, "if not rank: os.kill(os.getpid(), 9)\ntime.sleep(0.2)")
    assert start_ranks(2, elastically=True).code == 0
    assert "rank 0" in capfd.readouterr().err


@pytest.mark.parametrize("elastic", [True, False])
def test_an_elastic_run_is_never_trained_as_replicas_without_a_plan(
    elastic: bool, monkeypatch, tmp_path
) -> None:
    """They could not come and go, though that was asked for: the reason is told instead."""
    problem = GraphError("control flow on values")

    def fails(*about: object) -> None:
        raise problem

    end = SimpleNamespace(rank=1, num_ranks=2, begin=lambda listener: None, leave=lambda: None)
    end.fail = lambda problem: None
    session = SimpleNamespace(elastic=elastic, is_strict=lambda: False, listener=None)
    session.asked, session.learned = RunAsked(), JobLearned()
    monkeypatch.setattr(launch, "torchrun_store", lambda: None)
    monkeypatch.setattr(rendezvous, "Rendezvous", lambda store: end)
    monkeypatch.setattr(torchrun, "_trained", fails)
    monkeypatch.setenv("PENSTOCK_UNPLANNED", str(tmp_path / "reason"))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(GraphError if elastic else UnplannedError):
        torchrun.train_under_torchrun(lambda: session)
    assert (tmp_path / "reason").exists() is not elastic


def test_rank_that_torchrun_started_is_refused_in_its_own_words(monkeypatch, tmp_path) -> None:
    problem = GraphError("the model cannot be traced")
    assert local_ranks.unplanned(problem) is None
    monkeypatch.setenv("PENSTOCK_UNPLANNED", str(tmp_path / "reason"))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert not (tmp_path / "reason").exists()  # the first rank alone says it
        assert isinstance(local_ranks.unplanned(problem, 3), UnplannedError)
    assert json.loads((tmp_path / "reason").read_text()) == ["the model cannot be traced", 3]
