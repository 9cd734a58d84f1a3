"""penstock train under torchrun: on one host, and on hosts of which each has its own.

One test starts torchrun itself; the ranks of the others are forked and find what it sets.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from penstock.choose.choose import on_hosts_of
from penstock.choose.prepare import joined_step, started_on
from penstock.choose.same_start import agree, program_digest
from penstock.cli import main
from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import ClusterError, PlanError, RunError
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.listener import SILENT
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan
from penstock.profile import Profile
from penstock.profile.kinds import load_profiles
from penstock.runtime import launch
from penstock.runtime.worker import RankResult
from penstock.timeline import breakdown_from_json
from penstock.training.begin import Begin
from penstock.training.rendezvous import Rendezvous
from penstock.training.torchrun import (
    _ASK,
    _ENOUGH,
    _TOLD,
    TorchrunLaunch,
    _Outset,
    _plan_rank,
    _profiled,
    _serve,
)
from tests.cli import training
from tests.cli.conftest import Call
from tests.runtime.as_torchrun import as_torchrun
from tests.search.chains import chain

JOB = f"{Path(__file__).parent / 'training.py'}:dropout"
WISH = ["--ranks", "2", "--set", "stages=2", "--schedule", "one_f_one_b"]
BIG, SMALL = (
    DeviceKind(name, 10**9, (("float32", 1e10),), 1e10, usd_per_hour=0.0)
    for name in ("big", "small")
)
UNLIKE = Cluster(
    (BIG, SMALL), (Host("a", "big", 1), Host("b", "small", 1)), between=Link(1e-4, 1e9)
)


def losses(folder: Path) -> list[float]:
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def torchrun(*options: str) -> tuple[int, str]:
    """Run `penstock train` by a torchrun of two ranks; return its code and stderr."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with TemporaryFile("w+") as told:
        started = subprocess.Popen(
            [*command, "-m", "penstock", "train", JOB, *options],
            stdout=subprocess.DEVNULL,
            stderr=told,
            env=environment,
            start_new_session=True,
        )
        try:
            code = started.wait(timeout=350)
        finally:
            with suppress(ProcessLookupError):  # all of it has ended
                os.killpg(started.pid, signal.SIGKILL)
        told.seek(0)
        return code, told.read()


def forked(
    folder: Path, *options: str, places: Sequence[Path] = (), job: str = JOB
) -> list[tuple[int, str]]:
    """Return code and stderr of two ranks of that command, on a node each."""
    command = ["train", job, *options]
    found = as_torchrun(partial(main, command), folder, nodes=2, places=places)
    return [(code, err) for code, _, err in found]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, profiles: Path) -> Path:
    """Return the folder of the run of a plan on this host."""
    folder = tmp_path_factory.mktemp("runs") / "here"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(profiles))
        assert main(["train", JOB, "--out", str(folder), *WISH]) == 0
    return folder


def test_same_plan_under_torchrun_gives_the_same_losses(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    plan = str(here / "plan.json")
    code, told = torchrun("--out", str(folder), "--plan", plan)
    assert code == 0, told
    assert losses(folder) == losses(here)
    assert (folder / "report.html").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert breakdown_from_json(summary["breakdown"]).num_ranks == 2


def test_links_of_several_hosts_are_measured_before_the_search(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    done = forked(tmp_path, "--out", str(folder), *WISH)
    assert [code for code, _ in done] == [0, 0], done
    # two nodes of one machine: one host of two ranks, which nobody told it
    found = Cluster.load(folder / "cluster.toml")
    assert [host.num_devices for host in found.hosts] == [2]
    assert found.link(0, 1) != Cluster.here(2).link(0, 1)
    assert losses(folder)[0] == pytest.approx(losses(here)[0], rel=1e-6)


def test_plan_for_hosts_in_another_order_runs_where_it_says(
    here: Path, tmp_path: Path, call: Call
) -> None:
    """And the step is measured on each kind of device, by the first rank that has one."""
    folder, machines, turned = (tmp_path / name for name in ("there", "machines.toml", "p.json"))
    UNLIKE.save(machines)
    plan = Plan.load(here / "plan.json").changed(hosts=("b", "a"))
    plan.save(turned)
    where = ["--set", f"cluster={machines}", "--plan", str(turned)]
    done = forked(tmp_path, "--out", str(folder), *where)
    assert [code for code, _ in done] == [0, 0], done
    assert losses(folder) == losses(here)
    kept = Plan.load(folder / "plan.json")
    assert kept.place.hosts == ("b", "a")
    assert [_plan_rank(UNLIKE, kept, rank) for rank in (0, 1)] == [1, 0]
    assert [host.name for host in Cluster.load(folder / "cluster.toml").hosts] == ["b", "a"]
    kinds = [(each.kind, each.basis.how) for each in load_profiles(folder / "profile.json")]
    assert kinds == [("big", "measured"), ("small", "measured")]
    peaks = json.loads((folder / "summary.json").read_text())
    for name in ("peak_bytes_predicted", "peak_bytes_measured"):
        assert len(peaks[name]) == 2
    expected = peaks["peak_bytes_predicted"]
    assert peaks["peak_bytes_measured"] == pytest.approx(expected, rel=0.03)
    for command in ("replay", "report", "simulate"):
        what = folder / "plan.json" if command == "simulate" else folder
        told = call(command, str(what))
        assert told.code == 0, told.err


def test_ranks_of_hosts_with_several_devices_keep_their_order() -> None:
    hosts = tuple(Host(name, "big", count) for name, count in (("a", 2), ("b", 1), ("c", 3)))
    cluster = Cluster((BIG,), hosts, between=Link(1e-4, 1e9))
    turned = plan_by_hand(chain([4, 4], [4, 4]), [0], "gpipe", num_micro_batches=2)
    turned = turned.changed(hosts=("c", "a"))
    assert [_plan_rank(cluster, turned, rank) for rank in range(6)] == [3, 4, 5, 0, 1, 2]
    assert [_plan_rank(None, turned, rank) for rank in range(3)] == [0, 1, 2]


def rendezvous(**told: str) -> Rendezvous:
    """Return those of rank 1 of 2 in a store of this process, with what is told there already."""
    made = Rendezvous(dist.HashStore())
    for key, text in told.items():
        made.put(key, text)
    return made


def start_of(
    asked: Rendezvous, job: Job, captured: Capture, cluster: Cluster | None, numbers: Any = None
) -> _Outset:
    session: Any = SimpleNamespace(job=job, listener=SILENT)
    return _Outset(session, asked, captured, Begin(), cluster, numbers or count())


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"RANK": 1, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": 2}
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("rank_1")
def test_leaders_of_a_kind_of_device_measure_the_step_that_rank_0_asks_for() -> None:
    job = training.small()
    captured = capture(job)
    joined, pairs = joined_step(job, captured, 2, (), SILENT)
    asks = {_ASK.format(0): "[2, []]", _ASK.format(1): "[1, []]", _ASK.format(2): _ENOUGH}
    asked = rendezvous(**asks)
    _serve(start_of(asked, job, captured, UNLIKE))
    for number, (step, own) in enumerate(((pairs, joined), (captured, job))):
        told = asked.take(_TOLD.format(number, "small"))
        profile = Profile.from_json(json.loads(told), "small")
        assert (profile.graph, profile.kind) == (step.graph.digest, "small")
        answers = rendezvous(**{_TOLD.format(number, "small"): told})
        start = start_of(answers, job, captured, UNLIKE, count(number))
        big, small = _profiled(start, step, own, UNLIKE, SILENT)
        assert small == profile
        assert (big.graph, big.kind) == (step.graph.digest, "big")
        assert answers.take(_ASK.format(number)) == f"[{2 - number}, []]"


@pytest.mark.usefixtures("rank_1")
def test_rank_that_leads_no_kind_of_device_measures_nothing() -> None:
    job = training.small()
    alike = Cluster((BIG,), (Host("a", "big", 2),), inside=Link(1e-4, 1e9))
    for nobody_to_lead in (alike, None):
        asked = rendezvous(**{_ASK.format(0): "[1, []]", _ASK.format(1): _ENOUGH})
        _serve(start_of(asked, job, capture(job), nobody_to_lead))
        assert not asked.store.check([_TOLD.format(0, "big")])


@pytest.mark.usefixtures("rank_1")
def test_rank_that_waits_ends_when_another_one_fails() -> None:
    waits = rendezvous()
    Rendezvous(waits.store).fail(PlanError("nothing fits"))
    Rendezvous(waits.store).fail(KeyboardInterrupt())  # later, so it does not count
    for wait in (partial(waits.take, "anything"), partial(waits.meet, "anywhere")):
        with pytest.raises(RunError, match="rank 1 failed: nothing fits"):
            wait()
    interrupted = rendezvous()
    interrupted.fail(KeyboardInterrupt())
    with pytest.raises(RunError, match="rank 1 failed: KeyboardInterrupt"):
        interrupted.take("anything")


@pytest.mark.usefixtures("rank_1")
def test_rank_that_waits_ends_when_the_store_is_gone() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    with pytest.raises(RunError, match="rank 0 has ended, or its host cannot be reached"):
        Rendezvous(Gone()).take("anything")
    Rendezvous(Gone()).fail(ValueError("told to nobody"))


@pytest.mark.usefixtures("rank_1")
def test_ranks_meet_when_all_have_come() -> None:
    store, came = dist.HashStore(), []

    def comes(number: int) -> None:
        Rendezvous(store).meet("here")
        came.append(number)

    first = threading.Thread(target=comes, args=(0,))
    first.start()
    first.join(0.3)
    assert not came
    comes(1)
    first.join(300)
    assert sorted(came) == [0, 1]


@pytest.mark.parametrize("what", ["steps", "model"])
@pytest.mark.sampled(2)
def test_ranks_that_are_to_run_different_programs_all_end_with_an_error(
    what: str, here: Path, tmp_path: Path
) -> None:
    """They would wait for each other for ever: one of them has more steps, or a larger model."""
    job = f"{Path(__file__).parent / 'training.py'}:{what}_of_rank"
    done = forked(tmp_path, "--out", str(tmp_path / "there"), *WISH, job=job)
    assert [code for code, _ in done] == [1, 2], done
    told = {"steps": "steps 6; rank 0 has 5", "model": "graph "}[what]
    assert f"error: rank 1 has {told}" in done[1][1]
    assert "hint: start the same command on all hosts" in done[1][1]
    assert "rank 1 failed: rank 1 has" in done[0][1]


def test_ranks_that_divide_the_data_themselves_are_refused_though_it_was_proved_without_them(
    here: Path, tmp_path: Path
) -> None:
    job = f"{Path(__file__).parent / 'training.py'}:data_of_rank"
    (_, first), (code, told) = forked(tmp_path, "--out", str(tmp_path / "there"), *WISH, job=job)
    assert code == 2, told
    assert "error: micro-batch 0 as rank 1 reads it differs from that of rank 0" in told
    assert "reads RANK, which differs from rank to rank" in told
    assert "hint: let `data` yield what all ranks share" in told
    assert "equal to the plain loop" not in first


@pytest.mark.usefixtures("rank_1")
def test_ranks_agree_on_a_program_to_the_letter() -> None:
    chained = chain([4, 4], [4, 4])
    plan = plan_by_hand(chained, [0], "gpipe", num_micro_batches=4)
    other = plan.changed(schedule="one_f_one_b")  # the same instructions in another order
    programs = [lower_plan(plan, chained), lower_plan(other, chained)]
    programs += [lower_plan(plan.changed(clip=True), chained)]
    digests = [program_digest(program) for program in programs]
    assert len(set(digests)) == len(digests)
    assert program_digest(lower_plan(plan, chained)) == digests[0]
    own = {"program": digests[0]}
    store = rendezvous(**{"penstock/agree on it": json.dumps(own), "penstock/all it": ""})
    agree(store, "it", own)
    with pytest.raises(PlanError, match=f"program {digests[1]}; rank 0 has {digests[0]}"):
        agree(store, "it", {"program": digests[1]})


def test_what_fails_on_one_host_ends_all_of_them(here: Path, tmp_path: Path) -> None:
    """Each host has a working directory of its own; only the first one has the files."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    shutil.copytree(here, folders[0] / "only-on-one")
    machines = tmp_path / "machines.toml"
    UNLIKE.save(machines)
    more = ["--set", f"cluster={machines}", "--steps", "9", "--resume", "--out", "only-on-one"]
    (first, second), (code, told) = forked(tmp_path, *more, places=folders)
    assert (bool(first), bool(code)) == (True, True)
    error = "rank 0 continues after step 5; only-on-one as seen here, after 0"
    assert f"error: {error}" in told
    assert f"error: rank 1 failed: {error}" in second


def test_a_rank_that_is_killed_before_all_are_connected_ends_the_others(
    here: Path, tmp_path: Path
) -> None:
    job = f"{Path(__file__).parent / 'training.py'}:dies_on_rank_1"
    done = forked(tmp_path, "--out", str(tmp_path / "there"), *WISH, job=job)
    assert [code for code, _ in done] == [1, -signal.SIGKILL], done
    assert "error: rank 1 died before all were connected" in done[0][1]


def test_plan_for_hosts_that_are_not_there_is_for_those_that_are() -> None:
    plan = plan_by_hand(chain([4, 4], [4, 4]), [0], "gpipe", num_micro_batches=2)
    turned = plan.changed(hosts=("b", "a"))
    early = plan.changed(early=4)
    assert on_hosts_of(turned, UNLIKE) == early.changed(hosts=("b", "a"))
    others = replace(UNLIKE, hosts=(Host("a", "big", 1), Host("c", "small", 1)))
    assert on_hosts_of(turned, others) == early
    assert on_hosts_of(turned, None) == on_hosts_of(early, Cluster.here(2)) == plan


def test_cluster_of_this_host_is_what_the_plan_is_for(call: Call, tmp_path: Path) -> None:
    machines, folder = tmp_path / "machines.toml", tmp_path / "run"
    hosts, link = (Host("here", "small", 2),), Link(1e-3, 1e7)
    Cluster((SMALL,), hosts, inside=link).save(machines)
    done = call("train", JOB, "--set", f"cluster={machines}", "--out", str(folder), *WISH)
    assert done.code == 0, done.err
    assert Cluster.load(folder / "cluster.toml").inside == link
    assert [each.kind for each in load_profiles(folder / "profile.json")] == ["small"]


def test_cluster_is_not_ignored_where_a_model_cannot_be_traced(call: Call, tmp_path: Path) -> None:
    machines = tmp_path / "machines.toml"
    Cluster((SMALL,), (Host("here", "small", 2),), inside=Link(1e-3, 1e7)).save(machines)
    job = JOB.replace(":dropout", ":untraceable")
    call("train", job, "--out", tmp_path / "run", "--set", f"cluster={machines}").refusal(2)


@pytest.mark.usefixtures("rank_1")
def test_each_process_runs_its_rank_of_the_plan(monkeypatch) -> None:
    found: list[int | None] = []

    def run(work, store, report, *, groups, rank, way):
        found.append(rank)
        return RankResult(rank, (), (), 0, (0.1,), 0.1, {})

    monkeypatch.setattr(launch, "run_torchrun", run)
    told = rendezvous()
    ends = TorchrunLaunch(told, 0, 1, (0, 0))
    assert ends(lambda end, report: None, 2, print) == []
    told.rank = 0
    results = replace(ends, rank=1)(lambda end, report: None, 2, print)
    assert [result.rank for result in results] == [0, 1]
    assert found == [0, 1]


def test_machines_that_are_not_there_are_refused(call: Call, tmp_path: Path, monkeypatch) -> None:
    machines = tmp_path / "machines.toml"
    UNLIKE.save(machines)
    command = ["train", JOB, "--out", tmp_path / "run", "--set", f"cluster={machines}"]
    said, hint = call(*command).refusal(2)
    assert said == f"{machines} has 2 hosts; here is one"
    assert "torchrun" in hint
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    started = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": 3}
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ClusterError, match="has 2 devices; torchrun started 3 ranks"):
        started_on(machines)
    hosts = Host("a", "big", 2), Host("b", "small", 1)
    Cluster((BIG, SMALL), hosts, between=Link(1e-4, 1e9)).save(machines)
    with pytest.raises(ClusterError, match="the ranks 0 to 1 on a; here are 0 to 0") as raised:
        started_on(machines)
    assert "host by host" in raised.value.hint
    monkeypatch.setenv("RANK", "2")
    assert started_on(machines).hosts == hosts
