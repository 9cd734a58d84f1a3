"""bench.elastic_soak --hosts: what it counts; and a whole host that is lost and comes back."""

import json
import random
import time
from pathlib import Path

import pytest

from bench.network import Place, can_throttle
from bench.soak_hosts import DisturbedHosts, on_hosts, recoveries

CAN, WHY = can_throttle()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DisturbedHosts:
    """Return a run of which nothing is started, on hosts that have no process."""
    monkeypatch.setattr(DisturbedHosts, "__post_init__", lambda own: None)
    monkeypatch.setattr(DisturbedHosts, "processes", lambda own, host: [])
    monkeypatch.setattr(DisturbedHosts, "there", lambda own: {0, 1})
    places = [Place(("nsenter", "--net=/proc/self/ns/net"), f"10.79.0.{at}") for at in (1, 2)]
    return DisturbedHosts(tmp_path, random.Random(0), places)


def happened(run: DisturbedHosts, *events: tuple[str, float, int]) -> None:
    rows = ({"what": what, "time": at, "members": [*range(n)]} for what, at, n in events)
    (run.folder / "events.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_a_host_is_killed_only_once_all_ranks_are_there_again(run: DisturbedHosts) -> None:
    happened(run, ("begins", 1.0, 4))
    assert run.kill(1)
    assert not run.kill(0)  # the loss has not been noticed yet
    happened(run, ("begins", 1.0, 4), ("lost", time.time() + 1.0, 2))
    assert not run.kill(0)
    happened(run, ("begins", 1.0, 4), ("joined", time.time() + 1.0, 4))
    assert run.kill(0)
    assert [host for _, host in run.killed] == [1, 0]


def test_recovery_lasts_from_a_kill_to_the_next_step_without_the_host(run: DisturbedHosts) -> None:
    run.killed = [(10.0, 1), (20.0, 0), (30.0, 1)]
    events = ("begins", 1.0, 4), ("lost", 10.5, 2), ("joined", 15.0, 4), ("lost", 20.25, 2)
    happened(run, *events)
    assert run.recovered_s() == [0.5, 0.25]
    assert recoveries([0.5, 0.25]) == {"recovered_s": 0.375, "worst_recovered_s": 0.5}
    assert recoveries([]) == {}


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.skipif(not CAN, reason=WHY)
def test_the_same_torchrun_on_a_host_that_was_lost_joins_the_run(tmp_path: Path) -> None:
    def until(what: str, count: int) -> None:
        end = time.monotonic() + 300.0
        while not any(e["what"] == what and len(e["members"]) == count for e in run.events()):
            assert time.monotonic() < end, (what, count, run.events(), run.said())
            time.sleep(0.05)

    def steps() -> int:
        return len((tmp_path / "run/metrics.jsonl").read_text().splitlines())

    with on_hosts(tmp_path / "run", random.Random(0)) as run:
        end = time.monotonic() + 300.0
        while not run.began():
            assert time.monotonic() < end, run.said()
            time.sleep(0.05)
        assert run.kill(1)
        until("lost", 2)
        before = steps()
        run.joined += [run.torchrun(1)]
        until("joined", 4)
        assert steps() > before
        run.end()
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    found = [json.loads(row)["step"] for row in rows]
    assert found == [*range(1, len(found) + 1)]
