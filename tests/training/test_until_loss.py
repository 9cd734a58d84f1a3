"""A run to a goal: it searches as little as it must, and is one run: data, rates, state go on."""

import itertools
import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.errors import PlanError
from penstock.pilot.goal import Goal, GoalWatch
from penstock.pilot.phases import TrainedPhase, UntilFile, until_in, words_of_phases
from penstock.profile.noise import gain
from penstock.runtime.stop import Stopped
from penstock.training import until_loss
from penstock.training.until_loss import UntilRun, first_pairs, grid_of
from tests.draws import examples

# -- what is searched ------------------------------------------------------------------------------


def test_grid_has_powers_of_two_the_most_and_what_the_job_allows():
    assert grid_of(3, 8, (4, 20)) == [(k, m) for k in (1, 2, 3) for m in (4, 8, 16, 20)]
    assert grid_of(1, 6) == [(1, m) for m in (3, 6, 12, 24)]
    assert grid_of(2, 1) == [(k, m) for k in (1, 2) for m in (1, 2, 4)]


@given(st.integers(1, 9), st.integers(1, 12))
def test_first_phases_are_unlike_in_ranks_and_in_the_batch(ranks, own):
    pairs = first_pairs(grid_of(ranks, own), own)
    assert pairs[0] == (ranks, own)
    assert len({m for _, m in pairs}) == 2
    assert len({k for k, _ in pairs}) == min(2, ranks)


def run_of(ranks, own, least, samples=4):
    session = SimpleNamespace(job=SimpleNamespace(micro_batches=own), num_steps=10**9)
    watch = GoalWatch(Goal(0.0, least), is_validated=False, own=own)
    told = UntilFile(0.0, least, "training", samples, own, 2.0, 0.5)
    made = UntilRun.__new__(UntilRun)
    made.session, made.watch, made.told, made.grid = session, watch, told, grid_of(ranks, own)
    return made


def took(pair, law, samples):
    ranks, batch = pair[0], pair[1] * samples
    return law[0] + law[1] * batch / ranks + law[2] * (ranks - 1) / ranks


@examples(60)
@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(2, 8),
    st.sampled_from(["time", "cost"]),
    st.tuples(st.floats(0.001, 1.0), st.floats(1e-4, 0.1), st.floats(0.0, 1.0)),
    st.floats(1.0, 3000.0),
)
def test_search_ends_with_the_best_of_all_and_has_measured_it(ranks, own, least, law, scale):
    """Phases whose seconds obey the law that is fitted, whose noise is known: by brute force."""
    run, samples = run_of(ranks, own, least), 4

    def worth(pair):
        own_steps = gain(own * samples, pair[1] * samples, scale)
        return took(pair, law, samples) / own_steps * (pair[0] if least == "cost" else 1)

    while (pair := run._next()) is not None:
        count = pair[1]
        small, large = 2.0 + scale * 2.0 / samples, 2.0 + scale * 2.0 / (count * samples)
        told = (small, large, 9, count, samples) if count > 1 else (0.0, 0.0, 0, 0, 0)
        names = "small", "large", "watched", "parts", "samples"
        phase = TrainedPhase(0, 0, 0.0, *pair, steps=9, step_s=took(pair, law, samples))
        run.told = run.told.begun(replace(phase, **dict(zip(names, told, strict=True))))
    chosen, done = run._best_pair(), {(p.ranks, p.micro_batches) for p in run.told.phases}
    assert worth(chosen) <= 1.001 * min(map(worth, run.grid))
    assert len(run.told.phases) <= 6
    assert chosen in done or len(run.told.phases) == 6


def test_without_noise_the_batch_stays():
    run = run_of(2, 4, "time")
    for seconds in (1.0, 0.7):
        pair = run._next()
        assert pair is not None
        phase = TrainedPhase(0, 0, 0.0, *pair, steps=9, step_s=seconds)
        run.told = run.told.begun(phase)
    assert run._next() is None
    assert run._best_pair() == (1, 4)


# -- where a run that was stopped goes on ----------------------------------------------------------


def test_run_goes_on_in_the_phase_in_which_it_was():
    one = TrainedPhase(0, 0, 0.0, 2, 4, steps=10, step_s=1.0, seconds=11.0)
    two = TrainedPhase(10, 40, 10.0, 2, 8, 1.5, steps=10, step_s=1.0, watched=3)
    last = TrainedPhase(20, 120, 25.0, 1, 8, 1.5, steps=100, is_last=True)
    told = UntilFile(1.0, "time", "training", 4, 4, 0.0, 1.0, (one, two, last))
    cut = told.cut_at(13)
    assert cut.phases == (one, replace(two, step_s=0.0, watched=0))
    assert cut.phases[-1].number_at(13) == 64
    assert cut.phases[-1].own_at(13) == 14.5
    assert told.cut_at(20).phases == (one, two, last)
    assert told.cut_at(10).phases == (one, replace(two, step_s=0.0, watched=0))
    ended = told.ended(replace(last, steps=7, step_s=1.0))
    assert [p.step_s for p in ended.cut_at(27).phases] == [1.0, 1.0, 0.0]


# -- a whole run -----------------------------------------------------------------------------------

WIDTH, SAMPLES, OWN = 8, 2, 4


def batches(start):
    for number in itertools.count(start):
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(number))
        yield {"x": x, "y": x.sum(1, keepdim=True)}


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def rate(step):
    return 1.0 / (1 + step / 10)


def loss(net, batch):
    return (net(batch["x"]) - batch["y"]).square().mean()


def optimizer(weights):
    return torch.optim.AdamW(weights, 3e-3)


JOB = ps.Job(
    model, loss, batches, optimizer, micro_batches=OWN, num_steps=40, learning_rate=rate
)  # fmt: skip


@pytest.fixture(autouse=True)
def _short_phases(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(until_loss, "_FEWEST", 3)
    monkeypatch.setattr(until_loss, "_MOST", 3)
    monkeypatch.setattr(until_loss, "_SEARCH_S", 0.2)


def plain(told, steps):
    """Return the weights of a loop whose batch and rate are as the phases say, step by step."""
    net, data = model(), batches(0)
    made = optimizer(net.parameters())
    for step in range(steps):
        phase = [p for p in told.phases if p.step <= step][-1]
        done = sum(
            min(max(step - p.step, 0), p.steps) * p.gain for p in told.phases if p is not phase
        )
        done += (step - phase.step) * phase.gain
        for group in made.param_groups:
            group["lr"] = 3e-3 * phase.factor * rate(int(done + 1e-9))
        made.zero_grad()
        for _ in range(phase.micro_batches):
            (loss(net, next(data)) / phase.micro_batches).backward()
        made.step()
    return {f"weights/{name}": value.detach() for name, value in net.named_parameters()}


def test_run_is_one_loop_over_the_data_whatever_ranks_and_batch(tmp_path):
    """Phases of one and two ranks, of three batches; and stopped in the middle, it goes on."""
    folder = tmp_path / "run"
    about = {"until_loss": 0.0, "check": False, "trial": False, "out": folder}
    stops = [5]

    def stop(row):
        if stops and row["step"] == stops[0]:
            os.kill(os.getpid(), signal.SIGINT)
            stops.clear()

    with pytest.raises(Stopped, match="until_loss=0"):
        ps.train(JOB, on_step=stop, **about)
    trained = ps.train(JOB, resume=True, **about)
    assert trained is not None
    told = until_in(folder)
    assert told is not None
    assert [(p.ranks, p.micro_batches) for p in told.phases[:3]] == [(2, 4), (1, 4), (2, 16)]
    assert told.phases[-1].is_last
    assert told.phases[0].watched == 3
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    state = checkpoint.load(newest)
    last = told.phases[-1]
    assert state.step == last.step + last.steps
    assert 40 <= last.own_at(state.step) < 40 + last.gain
    for key, value in plain(told, state.step).items():
        torch.testing.assert_close(state.tensors[key], value, rtol=1e-4, atol=1e-6)
    own = trained.summary["until"]
    assert own["reached"] is False
    assert own["chosen"]["ranks"] == last.ranks
    assert json.loads((folder / "summary.json").read_text())["steps"] == state.step
    assert any("chosen" in line for line in words_of_phases(told))


def test_run_ends_when_validations_have_come_down(tmp_path):
    """Of a fixed number of ranks and no other batch: nothing is searched for."""
    kept = list(itertools.islice(batches(10**6), 4))
    fast = {"optimizer": lambda w: torch.optim.AdamW(w, 3e-2), "learning_rate": None}
    job = replace(JOB, validation=lambda: kept, batch_range=(OWN, OWN), num_steps=60, **fast)
    first = sum(loss(model(), batch).item() for batch in kept) / 4
    about = {"ranks": 1, "check": False, "trial": False, "out": tmp_path / "run"}
    trained = ps.train(job, until_loss=0.8 * first, **about)
    assert trained is not None
    told = trained.summary["until"]
    assert told["by"] == "validation"
    assert told["reached"] is True
    assert told["reached_loss"] <= 0.8 * first
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    below = [row["val_loss"] for row in rows if row.get("val_loss", first) <= 0.8 * first]
    assert below[0] == pytest.approx(told["reached_loss"])  # ranks may be steps further by then
    assert trained.summary["steps"] < 60
    with pytest.raises(PlanError, match="validation loss is"):
        ps.train(job, until_loss=0.9 * first, resume=True, **about)
    with pytest.raises(PlanError, match="ends at a loss"):
        ps.train(job, resume=True, **about)
    lower = 0.8 * told["reached_loss"]
    again = ps.train(job, until_loss=lower, resume=True, **about)
    assert again is not None
    assert again.summary["until"]["reached_loss"] <= lower
    assert again.summary["steps"] > trained.summary["steps"]


def test_run_whose_ranks_may_be_lost_ends_at_its_loss(tmp_path):
    fast = {"optimizer": lambda w: torch.optim.AdamW(w, 3e-2), "learning_rate": None}
    job = replace(JOB, batch_range=(OWN, OWN), num_steps=400, **fast)
    about = {"ranks": 2, "check": False, "trial": False, "out": tmp_path / "run"}
    trained = ps.train(job, until_loss=1.0, elastic=True, **about)
    assert trained is not None
    told = until_in(tmp_path / "run")
    assert told is not None
    assert told.reached
    assert told.loss is not None
    assert told.loss <= 1.0
    assert trained.summary["steps"] == told.phases[-1].steps < 400
    assert trained.summary["until"]["phases"][0]["step_s"] > 0
    assert [event["what"] for event in trained.summary["generations"]] == ["begins"]


def test_least_cost_is_refused_without_a_loss(tmp_path):
    with pytest.raises(PlanError, match="objective cost"):
        ps.train(JOB, objective="cost", out=tmp_path / "run")
    with pytest.raises(PlanError, match="no loss"):
        ps.train(JOB, until_loss=float("nan"), out=tmp_path / "run")
