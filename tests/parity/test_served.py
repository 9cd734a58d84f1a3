"""Weights that a server updates, beside what its decisions say, written of torch alone."""

import copy
import os
import signal
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors import safe_open

from bench.convex import CountedSwaps
from penstock.checkpoints import checkpoint
from penstock.checkpoints.control import LocalBoard
from penstock.checkpoints.saver import SavePolicy
from penstock.errors import GraphError, PlanError, RunError
from penstock.graph.server_parts import server_parts
from penstock.graph.trace import capture
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.referee import ServedUpdate
from penstock.routes import server_places
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.run import Steps, outcome_of
from penstock.runtime.served import Decisions, read_decisions
from penstock.runtime.windows import repeated
from penstock.runtime.worker import Task, work
from penstock.search import search
from penstock.search.shapes import Fixed, RankExchange
from penstock.sums import sums_way
from tests.parity.optimizing import Net, data, job_of
from tests.parity.training import differing
from tests.search.chains import chain, cluster_of, profile_of
from tests.transport.transport_ranks import run_gloo, run_hosts, values

WAYS = "backup:1", "ssp:0", "ssp:2", "ssp:2:aware", "async", "async:aware"
RANKS, EACH, STEPS = 3, 2, 8


def wide():
    return Net().double()


def doubles(start):
    return (x.double() for x in data(start))


def momentum(weights):
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def served(way, stages=1, servers=1, clip=None):
    """Return plan, capture and job: two micro-batches a rank and step."""
    job = replace(job_of(momentum, wide, sums=way), data=doubles, micro_batches=RANKS * EACH)
    job = replace(job, clip_norm=clip)
    captured = capture(job)
    points = len(captured.graph.cut_points)
    cuts = [points * number // stages for number in range(1, stages)]
    sizes = {"num_micro_batches": EACH, "replicas": RANKS, "num_ranks": 1}
    plan = plan_by_hand(captured.graph, cuts, "breadth_first" if stages > 1 else "gpipe", **sizes)
    topology = f"server:{servers}" if servers > 1 else None
    return plan.changed(sums=way, clip=clip is not None, topology=topology), captured, job


def task_of(parts, folder, steps=range(STEPS), every=0, **options):
    plan, captured, job = parts
    program = lower_plan(plan, captured.graph)
    windows = repeated(program, steps)
    stages = stages_of(plan, captured.graph)
    return Task(captured, stages, job, windows, policy=SavePolicy(folder, every), **options)


def trained(parts, folder, launcher=run_threads, live=work, **options):
    told = Steps(parts[0].step_micro_batches)
    task = task_of(parts, folder, **options)
    results = launcher(partial(live, task), RANKS, told.add, groups=task.groups)
    newest = checkpoint.load(checkpoint.latest(folder))
    return outcome_of(results, told, newest.tensors)


def oracle(job, rows):
    """Return the weights after decisions: each update by gradients of the version it has read.

    Rows are (version, step, ranks, read) and nothing else; all versions are kept.
    """
    is_aware = job.sums.endswith("aware")
    torch.manual_seed(job.seed)
    model = job.model()
    past, velocity = [copy.deepcopy(model)], None
    for at, (version, step, ranks, read) in enumerate(rows):
        assert version == at == len(past) - 1
        gradients = []
        for rank in ranks:
            old = copy.deepcopy(past[read])
            batches = job.data(step * RANKS * EACH + rank * EACH)
            for _ in range(EACH):
                (job.loss(old, next(batches)) / EACH).backward()
            own = [p.grad for p in old.parameters() if p.grad is not None]
            if job.clip_norm is not None:
                norm = sum((g * g).sum() for g in own) ** 0.5
                own = [g * min(1.0, job.clip_norm / (norm + 1e-6)) for g in own]
            gradients.append(own)
        mean = [sum(row) / len(ranks) for row in zip(*gradients, strict=True)]
        velocity = (
            mean if velocity is None else [0.9 * v + g for v, g in zip(velocity, mean, strict=True)]
        )
        rate = 0.05 / max(1, at - read) if is_aware else 0.05
        new = copy.deepcopy(past[-1])
        with torch.no_grad():
            live = [
                p
                for p, q in zip(new.parameters(), old.parameters(), strict=True)
                if q.grad is not None
            ]
            for p, v in zip(live, velocity, strict=True):
                p -= rate * v
        past.append(new)
    return {f"weights/{name}": p.detach() for name, p in past[-1].named_parameters()}


def check_rows(way, rows):
    """Every gradient counts once; no rank is further ahead than its bound says."""
    way = sums_way(way)
    if way.kind == "backup":
        assert [row.step for row in rows] == [*range(STEPS)]
        assert all(len(row.ranks) == RANKS - 1 and row.read == row.version for row in rows)
        return
    done = [0] * RANKS
    assert len(rows) == RANKS * STEPS
    for row in rows:
        (rank,) = row.ranks
        assert row.step == done[rank]
        done[rank] += 1
        assert row.read <= row.version
    assert done == [STEPS] * RANKS


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(3)
def test_a_run_is_what_its_decisions_say(way, launcher, tmp_path):
    parts, record = served(way), tmp_path / "decisions.jsonl"
    done = trained(parts, tmp_path / "run", launcher, decisions=Decisions(record))
    rows = read_decisions(record)
    check_rows(way, rows)
    for name, value in oracle(parts[2], rows).items():
        torch.testing.assert_close(done.weights[name], value, rtol=1e-12, atol=1e-12)
    assert [step.step for step in sorted(done.steps, key=lambda step: step.step)] == [*range(STEPS)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(2)
def test_decisions_of_another_run_are_made_again_to_the_bit(way, tmp_path):
    parts, record = served(way, stages=2), tmp_path / "decisions.jsonl"
    first = trained(parts, tmp_path / "first", decisions=Decisions(record))
    script, again = read_decisions(record), tmp_path / "again.jsonl"
    second = trained(parts, tmp_path / "second", decisions=Decisions(again, script))
    assert read_decisions(again) == script
    assert differing(second.weights, first.weights) == []


def late(way, seed):
    """Return decisions that real time would hardly make: rank 0 is always the last."""
    if way == "backup:1":
        return tuple(
            ServedUpdate(at, at, ((1, 2), (0, 2), (0, 1))[at * seed % 3], at) for at in range(STEPS)
        )
    rows, read, done = [], [0] * RANKS, [0] * RANKS
    for version in range(RANKS * STEPS):
        ahead = [
            r
            for r in range(RANKS)
            if done[r] < STEPS and done[r] - min(done) <= (2 if "2" in way else 99)
        ]
        if way == "ssp:0":
            ahead = [r for r in ahead if done[r] == min(done)]
        rank = ahead[(seed * version) % len(ahead)]
        rows.append(ServedUpdate(version, done[rank], (rank,), read[rank]))
        done[rank] += 1
        read[rank] = version + 1
    return tuple(rows)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("way", ["backup:1", "async:aware"])
def test_decisions_of_any_kind_are_made_as_they_are_written(way, seed, tmp_path):
    parts, script = served(way), late(way, seed)
    done = trained(parts, tmp_path, decisions=Decisions(None, script))
    for name, value in oracle(parts[2], script).items():
        torch.testing.assert_close(done.weights[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", ["backup:1", "ssp:2", "async"])
def test_a_run_that_goes_on_is_what_its_decisions_say(way, tmp_path):
    parts, record = served(way), tmp_path / "decisions.jsonl"
    first = {"steps": range(5), "every": 2, "decisions": Decisions(record)}
    trained(parts, tmp_path / "run", **first)
    newest = checkpoint.latest(tmp_path / "run")
    rest = {"steps": range(5, STEPS), "resume": newest, "decisions": Decisions(record)}
    done = trained(parts, tmp_path / "run", **rest)
    rows = read_decisions(record)
    check_rows(way, rows)
    for name, value in oracle(parts[2], rows).items():
        torch.testing.assert_close(done.weights[name], value, rtol=1e-12, atol=1e-12)


def dying(rank, task, end, tell):
    """Be killed on a rank after its fourth step."""

    def told(result):
        tell(result)
        if end.rank == rank and result.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    return work(task, end, told)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("way", ["backup:1", "ssp:0", "async"])
def test_a_rank_that_is_killed_ends_the_run(way, rank, tmp_path):
    with pytest.raises(RunError, match=f"rank {rank} "):
        trained(served(way), tmp_path, run_processes, partial(dying, rank), steps=range(200))


class Fails(torch.optim.SGD):
    """An optimizer whose fifth step fails."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 5:
            raise ValueError("no fifth step")
        return super().step(closure)


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
@pytest.mark.parametrize("way", ["backup:1", "ssp:1"])
@pytest.mark.sampled(2)
def test_an_optimizer_that_fails_beside_the_server_ends_the_run(way, launcher, tmp_path):
    plan, captured, job = served(way)
    job = replace(job, optimizer=lambda weights: Fails(weights, lr=0.05))
    with pytest.raises(RunError, match="no fifth step"):
        trained((plan, captured, job), tmp_path, launcher)


@pytest.mark.parametrize("way", ["backup:1", "ssp:1", "async"])
def test_a_run_that_is_stopped_ends_with_a_checkpoint_of_all_its_decisions(way, tmp_path):
    parts, record = served(way), tmp_path / "decisions.jsonl"
    told = Steps(parts[0].step_micro_batches)

    def tell(result):
        told.add(result)
        if result.step == 2:
            board.ask_to_stop(signal.SIGINT)

    with closing(LocalBoard()) as board:
        steps, kept = range(1000), Decisions(record)
        task = task_of(parts, tmp_path / "run", steps, board=board, decisions=kept)
        run_threads(partial(work, task), RANKS, tell, groups=task.groups)
    state = checkpoint.load(checkpoint.latest(tmp_path / "run"))
    rows = read_decisions(record)
    assert len(rows) == state.step * (1 if way == "backup:1" else RANKS)
    for name, value in oracle(parts[2], rows).items():
        torch.testing.assert_close(state.tensors[name], value, rtol=1e-12, atol=1e-12)


def test_decisions_that_are_none_are_refused(tmp_path):
    (tmp_path / "decisions.jsonl").write_text("[0, 1]\n")
    for name in ("decisions.jsonl", "nothing.jsonl"):
        with pytest.raises(RunError, match=f"{name} has no decisions of a server"):
            read_decisions(tmp_path / name)


def test_words_of_servers_are_read_and_others_refused():
    assert sums_way("ssp:3:aware") == sums_way("ssp:3")._replace(aware=True)
    assert sums_way("async").served
    assert not sums_way("delayed").served
    for text in ("backup", "backup:0", "backup:1:aware", "ssp", "ssp:x", "async:2", "ssp:1:2"):
        with pytest.raises(ValueError, match=f"{text!r} is not"):
            sums_way(text)


def test_a_run_that_goes_on_from_an_older_checkpoint_forgets_what_came_after(tmp_path):
    parts, record = served("async"), tmp_path / "decisions.jsonl"
    trained(parts, tmp_path / "run", every=2, decisions=Decisions(record))
    older = checkpoint.folder_of(tmp_path / "run", 6)
    rest = {"steps": range(6, STEPS), "resume": older, "decisions": Decisions(record)}
    trained(parts, tmp_path / "again", **rest)
    check_rows("async", read_decisions(record))


def test_the_search_gives_each_rank_a_replica():
    graph = chain([10**6] * 4, [1] * 4)
    profile = profile_of(graph, [0.001] * 4)
    fixed = Fixed(exchange=RankExchange(sums="ssp:2"))
    found = search(graph, profile, cluster_of(4), fixed=fixed, micro_batches=8).plan
    assert (found.replicas, found.num_ranks, found.served) == (found.total_ranks, 1, "ssp:2")
    assert found.total_ranks > 1


@pytest.mark.parametrize("runner", [run_gloo, run_hosts])
@pytest.mark.parametrize("way", ["backup:1", "ssp:1", "async:aware"])
@pytest.mark.sampled(2)
def test_a_server_hears_ranks_of_other_hosts(way, runner, tmp_path):
    parts, record = served(way), tmp_path / "decisions.jsonl"
    task = task_of(parts, tmp_path / "run", every=3, decisions=Decisions(record))
    values(runner(RANKS, lambda end: work(task, end, lambda _: None).rank))
    state = checkpoint.load(checkpoint.latest(tmp_path / "run"))
    rows = read_decisions(record)
    check_rows(way, rows)
    for name, value in oracle(parts[2], rows).items():
        torch.testing.assert_close(state.tensors[name], value, rtol=1e-12, atol=1e-12)


# -- several servers, and clipping -----------------------------------------------------------------


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("way", ["backup:1", "ssp:1", "async:aware"])
@pytest.mark.sampled(3)
def test_several_servers_do_what_the_decisions_say(way, servers, launcher, tmp_path):
    parts, record = served(way, servers=servers, clip=0.3), tmp_path / "decisions.jsonl"
    options = {"every": 3, "decisions": Decisions(record)}
    done = trained(parts, tmp_path / "run", launcher, **options)
    rows = read_decisions(record)
    check_rows(way, rows)
    for name, value in oracle(parts[2], rows).items():
        torch.testing.assert_close(done.weights[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", ["backup:1", "ssp:1"])
def test_several_servers_make_the_decisions_of_one_to_the_bit(way, tmp_path):
    one, two = (served(way, stages=2, servers=servers, clip=0.3) for servers in (1, 2))
    record = tmp_path / "decisions.jsonl"
    first = trained(one, tmp_path / "first", decisions=Decisions(record))
    script = read_decisions(record)
    second = trained(two, tmp_path / "second", decisions=Decisions(None, script))
    assert differing(second.weights, first.weights) == []


def test_each_server_keeps_what_it_has_and_the_run_goes_on(tmp_path):
    parts, record = served("ssp:1", servers=2), tmp_path / "decisions.jsonl"
    trained(parts, tmp_path / "run", steps=range(5), decisions=Decisions(record))
    newest = checkpoint.latest(tmp_path / "run")
    rest = {"steps": range(5, STEPS), "resume": newest, "decisions": Decisions(record)}
    done = trained(parts, tmp_path / "run", run_processes, **rest)
    rows = read_decisions(record)
    check_rows("ssp:1", rows)
    for name, value in oracle(parts[2], rows).items():
        torch.testing.assert_close(done.weights[name], value, rtol=1e-12, atol=1e-12)
    written = []
    for part in checkpoint.latest(tmp_path / "run").glob("rank-*.safetensors"):
        with safe_open(part, "pt") as tensors:
            written += tensors.keys()
    kinds = "weights/", "optimizer/"
    assert len(written) == len(set(written))
    assert {each for each in done.weights if each.startswith(kinds)} <= set(written)


@pytest.mark.parametrize("way", ["backup:1", "async"])
def test_gradients_that_are_clipped_are_each_clipped_by_their_own_norm(way, tmp_path):
    """By a norm that some are above and some are not."""
    parts, record = served(way, stages=2, clip=0.2), tmp_path / "decisions.jsonl"
    done = trained(parts, tmp_path / "run", decisions=Decisions(record))
    rows = read_decisions(record)
    for name, value in oracle(parts[2], rows).items():
        torch.testing.assert_close(done.weights[name], value, rtol=1e-12, atol=1e-12)
    free = oracle(replace(parts[2], clip_norm=None), rows)
    assert any(not torch.equal(done.weights[name], value) for name, value in free.items())


def test_more_servers_than_ranks_or_parameters_are_refused():
    with pytest.raises(PlanError, match="4 servers beside 3 ranks"):
        served("async", servers=4)
    plan, captured, _ = served("async")
    row = stages_of(plan, captured.graph).stages
    with pytest.raises(GraphError, match=r"99 servers for \d+ parameters"):
        server_parts(captured.graph, row, 99)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_a_server_that_is_killed_ends_the_run(rank, tmp_path):
    parts = served("async", servers=2)
    place = server_places("server:2", RANKS)[rank]
    with pytest.raises(RunError, match=f"rank {place} "):
        trained(parts, tmp_path, run_processes, partial(dying, place), steps=range(200))


@pytest.mark.parametrize("runner", [run_gloo, run_hosts])
def test_several_servers_hear_ranks_of_other_hosts(runner, tmp_path):
    parts, record = served("ssp:1", servers=3), tmp_path / "decisions.jsonl"
    task = task_of(parts, tmp_path / "run", every=3, decisions=Decisions(record))
    values(runner(RANKS, lambda end: work(task, end, lambda _: None).rank))
    state = checkpoint.load(checkpoint.latest(tmp_path / "run"))
    for name, value in oracle(parts[2], read_decisions(record)).items():
        torch.testing.assert_close(state.tensors[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("way", ["ssp:1", "async"])
def test_what_ranks_give_each_other_is_what_the_formula_says(way, servers, tmp_path):
    parts, given = served(way, servers=servers), []

    def counted(task, end, tell):
        return work(task, CountedSwaps(end, given), tell)

    trained(parts, tmp_path, live=counted)
    trains = [p.nbytes for p in wide().parameters() if p.requires_grad]
    size = sum(-(-each // 64) * 64 for each in trains)  # each begins at a multiple of 64 bytes
    words = (RANKS - 1) * (2 * STEPS + 3) * (size + 24 * servers)
    told = (servers - 1) * (RANKS * (2 * STEPS + 1) + 1) * 8 * (5 + RANKS)
    assert sum(given) == words + told
