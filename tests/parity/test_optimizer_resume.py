"""A resumed run has the optimizer of the unbroken one, whatever that keeps, or is refused."""

import json
import math

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from penstock.checkpoints import checkpoint
from penstock.errors import RunError
from penstock.runtime.launch import run_processes
from tests.parity.optimizing import (
    APART,
    STEPS,
    TOGETHER,
    Custom,
    Lookahead,
    expected_state,
    job_of,
    plain_loop,
    run_of,
    windows_from,
)
from tests.parity.training import differing, train


class Remembers(Custom):
    """Keeps counts, numbers that are none, lists, and a generator of its own."""

    def __init__(self, weights) -> None:
        super().__init__(weights)
        self.t, self.best, self.pair = 0, math.inf, (0, None)
        self.seen = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(3)
        self.history = []

    def step(self, closure=None):
        super().step(closure)
        self.t += 1
        self.pair = (self.t, -math.inf)
        self.seen[0] += 1
        self.history.append(self.t)

    def change(self, p, group):
        noise = torch.randn(p.shape, generator=self.generator)
        rate = group["lr"] / (1 + self.t + self.pair[0] + float(self.seen[0]) + len(self.history))
        p.add_(p.grad + 0.1 * noise, alpha=-rate if self.best == math.inf else 0.0)


class Inside(Custom):
    """Two optimizers in a list, with a scheduler in it, and one around another."""

    def __init__(self, weights) -> None:
        super().__init__(weights)
        odd, even = list(weights)[::2], list(weights)[1::2]
        self.parts = [Lookahead(AdamW(odd, lr=1e-2)), SGD(even, lr=0.1, momentum=0.9)]
        self.schedule = ExponentialLR(self.parts[1], 0.9)

    def step(self, closure=None):
        for part in self.parts:
            part.step()
        self.schedule.step()


KEEPING = {
    **APART,
    **{n: TOGETHER[n] for n in ("one_norm", "carries", "patched", "schedules_itself")},
}
KEEPING |= {"remembers": Remembers, "inside": Inside}


def by_closure(weights):
    """Its scheduler is known to its hook only."""
    made = SGD(weights, lr=0.1)
    schedule = CosineAnnealingLR(made, 3)

    def after(*_: object) -> None:
        schedule.step()

    made.register_step_post_hook(after)
    return made


FORGETTING = {"counting": TOGETHER["counting"], "closure": by_closure}


def resumed(job, stages, folder, until=3, launcher=None):
    run = run_of(job, stages)
    options = {} if launcher is None else {"launcher": launcher}
    train(run, folder / "part", (1,) * until, **options)
    done = folder / "part" / f"step-{until:06d}"
    return train(run, folder / "rest", windows=windows_from(run, until), resume=done, **options)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.sampled(3)
def test_what_it_keeps_is_resumed(name, stages, tmp_path):
    job = job_of(KEEPING[name])
    if stages == 2 and name not in APART:
        return
    found, plain = resumed(job, stages, tmp_path).weights, plain_loop(job)
    assert differing(found, plain.weights) == []
    assert differing(found, expected_state(plain)) == []


def test_in_processes(tmp_path):
    job = job_of(APART["lookahead"])
    found = resumed(job, 2, tmp_path, launcher=run_processes).weights
    assert differing(found, plain_loop(job).weights) == []


def test_another_plan_goes_on_from_it(tmp_path):
    """Kept in parts or as a whole: it is the same by name."""
    job = job_of(APART["names"])
    runs = [run_of(job, stages) for stages in (1, 3)]
    for one, other in (runs, runs[::-1]):
        folder = tmp_path / str(one.plan.total_ranks)
        train(one, folder / "part", (1,) * 3)
        done = folder / "part" / "step-000003"
        found = train(other, folder / "rest", windows=windows_from(other, 3), resume=done).weights
        assert differing(found, plain_loop(job).weights) == []


@pytest.mark.parametrize("name", FORGETTING)
def test_what_no_checkpoint_holds_is_refused(name, tmp_path):
    job = job_of(FORGETTING[name])
    words = r"the job's optimizer cannot be resumed: first\.weight.*\n  .*\.py:\d+\nhint: "
    with pytest.raises(RunError, match=words):
        resumed(job, 1, tmp_path)


def test_what_is_changed_and_not_saved_is_named(tmp_path):
    class Odd(Custom):
        def __init__(self, weights) -> None:
            super().__init__(weights)
            self.seen = set()

        def step(self, closure=None):
            super().step(closure)
            self.seen.add(len(self.seen))

    job = job_of(Odd)
    assert train(run_of(job, 1), tmp_path / "whole").steps
    with pytest.raises(RunError, match="the optimizer's seen, a set, has changed and was not"):
        resumed(job, 1, tmp_path)


def adds(weights):
    """Takes its last parameters in after two steps."""
    late, made = list(weights)[-6:], SGD(list(weights)[:-6], lr=0.1, momentum=0.9)

    def add(*_: object) -> None:
        if float(made.state[made.param_groups[0]["params"][0]].setdefault("count", 0)) == 1:
            made.add_param_group({"params": late})
        made.state[made.param_groups[0]["params"][0]]["count"] += 1

    made.register_step_post_hook(add)
    return made


def test_groups_may_be_added_later_and_are_not_resumed(tmp_path):
    job = job_of(adds)
    found = train(run_of(job, 1), tmp_path / "whole", (1,) * STEPS).weights
    assert differing(found, plain_loop(job).weights) == []
    with pytest.raises(RunError, match="params, a group added later, has changed and was not"):
        resumed(job, 1, tmp_path)


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    """It used to fail in its first step, without what it would have made itself."""
    train(run_of(job_of(APART["hooked"]), 2), tmp_path / "part", (1,))
    other = run_of(job_of(lambda w: torch.optim.Rprop(w)), 2)
    done = tmp_path / "part" / "step-000001"
    with pytest.raises(RunError, match="optimizer is AdamW, the job's is Rprop"):
        train(other, tmp_path / "rest", windows=windows_from(other, 1), resume=done)


def test_checkpoints_without_the_new_keys_are_still_read(tmp_path):
    job = job_of(lambda w: AdamW(w, lr=1e-2))
    run = run_of(job, 2)
    train(run, tmp_path / "part", (1,) * 3)
    done = tmp_path / "part" / "step-000003"
    state = json.loads((done / "state.json").read_text())
    assert state["plain"].pop("optimizer-kind") == "AdamW"
    assert state.pop("digest")  # nor did they say what they hold
    (done / "state.json").write_text(json.dumps(state))
    found = train(run, tmp_path / "rest", windows=windows_from(run, 3), resume=done).weights
    assert differing(found, plain_loop(job).weights) == []
    assert all(key.split("/")[0] in ("weights", "buffers", "optimizer") for key in found)


def test_what_is_kept_is_json_that_any_reader_takes(tmp_path):
    train(run_of(job_of(Remembers), 1), tmp_path, (1,) * STEPS)
    newest = checkpoint.latest(tmp_path)
    text = (newest / "state.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
