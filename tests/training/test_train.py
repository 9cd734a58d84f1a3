"""`penstock.train` from Python: the same run as the command's, its figures told as they come."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import penstock as ps
from penstock.choose.choose import Choice, found_in_units, in_units
from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.plan import Decision, plan_by_hand
from penstock.search import Fixed
from penstock.search.judge import Judge
from tests.cli.training import small
from tests.search.chains import chain, cluster_of, profile_of


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plain_weights(job, num_steps):
    """Return the weights of the ten-line loop."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, data = job.optimizer(model.parameters()), job.data(0)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(job.micro_batches):
            (job.loss(model, next(data)) / job.micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
    return {f"weights/{name}": p.detach() for name, p in model.named_parameters()}


class Ear(ps.Listener):
    def __init__(self):
        self.said = []

    def say(self, words):
        self.said.append(words)

    def finished(self, trained):
        self.said.append(trained)


def test_a_run_from_python_equals_the_plain_loop_and_goes_on(tmp_path):
    out, rows, ear, threads = tmp_path / "run", [], Ear(), torch.get_num_threads()
    asked = {"ranks": 2, "stages": 2, "schedule": "one_f_one_b", "out": out}
    written = []
    job = replace(small(), writers=[written.append])
    first = ps.train(job, num_steps=3, on_step=rows.append, listener=ear, **asked)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert written == rows
    kept = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == rows
    summary = json.loads((out / "summary.json").read_text())
    assert summary["train_loss"] == first.summary["train_loss"]
    assert first.plan == ps.Plan.load(out / "plan.json")
    assert any("pipeline of 2 stages on 2 processes" in str(words) for words in ear.said[:-1])
    assert ear.said[-1] is first
    assert len(repr(first)) < 1000
    assert "<svg" in first._repr_html_()
    assert json.loads((out / "job.json").read_text())["job"] == ""  # nothing names a record
    last = ps.train(small(), num_steps=5, resume=True, out=out, on_step=rows.append)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    expected = plain_weights(small(), 5)
    assert expected.keys() <= last.outcome.weights.keys()
    for name, value in expected.items():
        torch.testing.assert_close(last.outcome.weights[name], value, rtol=1e-5, atol=1e-6)
    assert torch.get_num_threads() == threads


def test_the_plan_of_an_earlier_run_in_the_same_folder_is_followed(tmp_path):
    out = tmp_path / "run"
    first = ps.train(small(), num_steps=1, stages=2, schedule="gpipe", out=out, check=False)
    again = ps.train(small(), num_steps=1, plan=out / "plan.json", out=out, check=False)
    assert replace(again.plan, predicted=None) == replace(first.plan, predicted=None)
    assert (tmp_path / "run.1" / "plan.json").exists()


def test_a_short_run_that_goes_on_for_long_is_searched_for_anew(tmp_path, monkeypatch):
    about = {"out": tmp_path / "run", "ranks": 2, "check": False, "trial": False}

    def told(**more) -> list[str]:
        plan = ps.train(small(), **about, **more).plan
        return [each.value for each in plan.decisions if each.what == "search"]

    assert told(num_steps=1) == told(num_steps=2, resume=True) == ["brief"]
    monkeypatch.setattr("penstock.choose.choose._WAY_S", 0.0)  # as if steps took long
    assert told(num_steps=3, resume=True) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"eager": True, "stages": 2}, "trains without a plan"),
        ({"schedule": "gpip"}, "there is no schedule 'gpip'"),
        ({"checkpoint_every": 0}, "neither a number of steps nor a time"),
        ({"plan": "no.json"}, "no.json"),
        ({"units": 0}, "neither block, woven, nor a number"),
        ({"units": "block", "eager": True}, "trains without a plan"),
        ({"out": __file__}, "is a file, not a folder"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(asked, message, tmp_path):
    with pytest.raises(ps.PenstockError, match=message):
        ps.train(small(), **{"out": tmp_path / "run", **asked})
    assert not (tmp_path / "run").exists()


class ByClass(torch.nn.Module):
    """Running means of each class, which move where the class is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.register_buffer("means", torch.zeros(2, 4))

    def forward(self, batch):
        x, labels = batch
        chosen = torch.nn.functional.one_hot(labels, 2).float()
        counts = chosen.sum(0)[:, None]
        with torch.no_grad():
            new = 0.9 * self.means + 0.1 * (chosen.t() @ x) / counts.clamp(min=1)
            self.means.copy_(torch.where(counts > 0, new, self.means))
        return torch.nn.functional.cross_entropy(self.layer(x), labels)


def with_both(start):
    while True:  # both classes are in every batch that is looked at
        source = torch.Generator().manual_seed(start)
        yield torch.randn(4, 4, generator=source), torch.tensor([0, 1, 0, 1])
        start += 1


def test_replicas_are_refused_for_buffers_that_the_data_may_move_otherwise(tmp_path):
    job = ps.Job(ByClass, lambda m, b: m(b), with_both, lambda w: torch.optim.SGD(w, 0.1))
    job = replace(job, micro_batches=4)
    with pytest.raises(PlanError, match="one copy of each stage"):
        ps.train(job, num_steps=1, ranks=2, stages=1, out=tmp_path / "run")


def test_optimizer_that_stays_whole_is_refused_units():
    graph = chain([1] * 4, [1] * 4)
    whole = Decision("optimizer", "whole on each replica", "only choice", "it looks at all")
    plan = replace(plan_by_hand(graph, [], "gpipe", num_micro_batches=1), decisions=(whole,))
    choice = Choice(small(), SimpleNamespace(graph=graph), plan)
    assert in_units(choice, None, (), None) is choice
    with pytest.raises(PlanError, match="cannot be divided into units: it looks at all"):
        in_units(choice, "block", (), None)


def test_replicas_are_cut_into_units_where_that_hides_their_sums():
    """Backwards of 20 ms, four of them, and sums of 10 ms: three beside the backward."""
    graph = chain([1_000_000] * 4, [1] * 4)
    profile = profile_of(graph, (0.01,) * 4)
    for ranks, rate, is_cut in ((2, 1e8, True), (2, 1e15, False), (1, 1e8, False)):
        cluster = cluster_of(2, link=Link(0.0, rate))
        plan = plan_by_hand(graph, [], "gpipe", num_micro_batches=1, replicas=ranks)
        candidate = Judge(graph, profile, cluster).candidate(plan)
        plan, own_s = candidate.plan, candidate.step_s
        choice = Choice(small(), SimpleNamespace(graph=graph), plan)
        about = {"profiles": (profile,), "cluster": cluster}
        found = found_in_units(choice, None, Fixed(), **about)
        for fixed in (Fixed(stages=1), Fixed(schedule="gpipe")):
            assert found_in_units(choice, None, fixed, **about) is choice
        assert (found is not choice) == is_cut
        if is_cut:
            assert found.plan.num_stages == 4
            assert found.plan.predicted.step_s == pytest.approx(own_s - 0.03)
            assert found.plan.decisions[-1].what == "units"


def test_schedule_for_seconds_is_built_for_those_of_the_units():
    """The first stage hands no gradient on: all of its B is W, but its last units do."""
    graph, cluster = chain([1] * 4, [1] * 4), cluster_of(2)
    profile = profile_of(graph, (0.01,) * 4)
    plan = plan_by_hand(graph, [1], "zb_greedy", num_micro_batches=4)
    plan = Judge(graph, profile, cluster).candidate(plan).plan
    choice = Choice(small(), SimpleNamespace(graph=graph), plan)
    own, cut = plan.schedule, in_units(choice, "block", (profile,), cluster).plan.schedule
    assert own.seconds.input_s[0] == 0.0
    assert cut.units == (2, 2)
    assert cut.seconds.input_s[0] == pytest.approx(0.01)
    assert cut.seconds.weights_s[0] == pytest.approx(own.seconds.weights_s[0] - 0.01)


@pytest.mark.parametrize("options", [{"ranks": 2, "stages": 2}, {"eager": True}])
@pytest.mark.sampled(2)
def test_module_in_hand_is_the_trained_one(tmp_path, options):
    hand = small().model()
    job = replace(small(), model=lambda: hand, validation=None)
    before = {name: p.detach().clone() for name, p in hand.named_parameters()}
    trained = ps.train(job, num_steps=2, check=False, trial=False, out=tmp_path / "run", **options)
    for name, value in hand.named_parameters():
        assert torch.equal(value, trained.outcome.weights[f"weights/{name}"])
        assert not torch.equal(value, before[name])
    assert trained.model is hand


def test_trained_module_is_built_once_where_the_job_builds_one(tmp_path):
    job = replace(small(), validation=None)
    trained = ps.train(job, num_steps=2, check=False, trial=False, ranks=1, out=tmp_path / "run")
    assert trained.model is trained.model
    for name, value in trained.model.named_parameters():
        assert torch.equal(value, trained.outcome.weights[f"weights/{name}"])
