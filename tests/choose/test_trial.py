"""The fastest of the finalists is run, whatever was predicted of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.choose import trial
from penstock.choose.choose import Choice, Machines, best
from penstock.choose.trial import decision, finalists, is_worth_it, seconds_of, tried
from penstock.cluster import Cluster
from penstock.errors import RunError
from penstock.plan import Decision, Prediction
from penstock.schedule.recipe import name_of
from penstock.search import Candidate, Fixed
from tests.parity.models import captured, job_of, plan_of

FLOAT = torch.float32


def choice_of(predicted_s: float, stages: int = 2, replicas: int = 1) -> Choice:
    made = captured("tied", FLOAT)
    plan = plan_of(made.graph, "gpipe", stages, 4 // replicas, replicas=replicas)
    plan = replace(plan, predicted=Prediction(predicted_s, (1,) * plan.total_ranks))
    return Choice(job_of("tied", FLOAT), made, plan)


class Clock:
    """Takes for each plan what a test says, and counts its turns."""

    def __init__(self, **taken: float) -> None:
        self.taken, self.turns = taken, []

    def __call__(self, choice: Choice, num_steps: int) -> list[float]:
        name = f"s{choice.plan.num_stages}x{choice.plan.replicas}"
        self.turns.append(name)
        if name not in self.taken:
            raise RunError(f"{name} ran out of memory")
        return [self.taken[name]] * (num_steps - 1)


def test_a_plan_that_is_slower_than_predicted_loses_to_plain_replicas():
    clock = Clock(s4x1=0.742, s1x2=0.5)
    order = tried([choice_of(0.460, 4), choice_of(0.461, 1, 2), choice_of(0.9, 1)], clock)
    assert [one.choice.plan.num_stages for one in order] == [1, 4, 1]
    assert (order[0].choice.plan.replicas, order[0].step_s) == (2, 0.5)
    assert clock.turns == ["s4x1", "s1x2", "s1x2"]  # one is too slow for a second turn
    why = decision(order)
    assert why.value == "500 ms a step"
    assert "4 stages by gpipe: 742 ms measured, 460 ms predicted" in why.why
    assert "1 x 1 stages by gpipe: not tried, 900 ms predicted" in why.why


def test_of_two_that_are_even_the_simpler_is_run():
    order = tried([choice_of(0.46, 4), choice_of(0.47, 1, 2)], Clock(s4x1=0.460, s1x2=0.470))
    assert order[0].choice.plan.num_stages == 1
    order = tried([choice_of(0.46, 4), choice_of(0.47, 1, 2)], Clock(s4x1=0.460, s1x2=0.480))
    assert order[0].choice.plan.num_stages == 4


def test_what_fails_is_left_out_unless_all_fail():
    order = tried([choice_of(0.4, 4), choice_of(0.4, 1, 2)], Clock(s1x2=0.6))
    assert order[0].choice.plan.replicas == 2
    assert "failed (s4x1 ran out of memory)" in decision(order).why
    with pytest.raises(RunError, match="out of memory"):
        tried([choice_of(0.4, 4), choice_of(0.4, 1, 2)], Clock())


seconds = st.floats(1e-4, 10.0)


@given(st.tuples(seconds, seconds, seconds), st.tuples(seconds, seconds, seconds))
def test_no_plan_that_was_tried_is_faster_than_the_one_that_is_run(predicted, taken):
    sizes = ((4, 1), (1, 2), (1, 1))
    choices = [choice_of(p, *size) for p, size in zip(predicted, sizes, strict=True)]
    clock = Clock(**{f"s{s}x{r}": t for (s, r), t in zip(sizes, taken, strict=True)})
    order = tried(choices, clock)
    measured = [one.step_s for one in order if one.seconds]
    assert order[0].seconds
    assert order[0].step_s <= 1.03 * min(measured)
    for one in order:
        assert one.seconds or one.predicted_s > 1.15 * min(measured)


def test_finalists_are_the_best_and_the_plain_ones_and_run():
    made, job = captured("tied", FLOAT), job_of("tied", FLOAT, micro_batches=4)
    there = Machines(Cluster.here(2))
    found = best(job, Fixed(), made, there)
    choices = finalists(found, Fixed(), there)
    assert choices[0] == found.choice
    sizes = {
        (c.plan.num_stages, c.plan.replicas, c.plan.total_ranks, c.plan.terms.joined)
        for c in choices
    }
    assert len(sizes) >= len(choices) - 1  # one may have another schedule only
    sizes = {size[:3] for size in sizes}
    assert (1, 1, 1) in sizes
    assert all(c.plan.predicted and c.plan.decisions for c in choices)
    fixed = finalists(found, Fixed(ranks=2, stages=2), there)
    assert [c.plan for c in fixed] == [found.choice.plan]
    for choice in choices:
        taken = seconds_of({}, choice, 3)
        assert len(taken) == 2
        assert min(taken) > 0


def test_finalists_are_of_other_numbers_of_stages_their_units_not_counted(monkeypatch):
    choice = choice_of(0.3, 1)
    other = choice_of(0.3, 2).plan.refined(choice.captured.graph, 2)
    assert other.num_stages > 2
    candidates = [Candidate(plan, 0.3, (1,), 0.0) for plan in (choice.plan, other)]
    way, found = SimpleNamespace(joined=1), SimpleNamespace(candidates=candidates)
    option = SimpleNamespace(way=way, found=found)
    asked = []

    def note(found, fixed, there):
        asked.append(fixed.stages)
        return choice

    monkeypatch.setattr(trial, "best_like", note)
    finalists(SimpleNamespace(choice=choice, options=[option]), Fixed(), Machines())
    assert asked == [2, 1, 1]


def test_what_is_open_besides_stages_is_tried_too_where_it_is_near(monkeypatch):
    """Micro-batches joined otherwise, and another schedule, the best of each; nobody asked."""
    own, other = choice_of(0.30, 2), choice_of(0.31, 2)
    greedy = own.plan.changed(schedule="zb_h1")
    rows = [(own.plan, 0.30), (own.plan.changed(schedule="zb_h2"), 0.40), (greedy, 0.32)]
    candidates = [Candidate(plan, seconds, (1,), 0.0) for plan, seconds in rows]
    joined = [(0.36, 4), (0.31, 2), (0.33, 8)]
    options = [
        SimpleNamespace(
            way=SimpleNamespace(joined=count),
            found=SimpleNamespace(candidates=[]),
            best=SimpleNamespace(step_s=seconds),
            choice=other._replace(plan=other.plan.changed(joined=count)),
        )
        for seconds, count in joined
    ]
    options.append(
        SimpleNamespace(
            way=SimpleNamespace(joined=1), found=SimpleNamespace(candidates=candidates), best=None
        )
    )
    asked = []

    def note(found, fixed, there):
        asked.append(fixed)
        made = Decision("schedule", "zb_h1", "user", "asked for")
        return own._replace(plan=replace(greedy, decisions=(made,)))

    monkeypatch.setattr(trial, "best_like", note)
    wish = Fixed(stages=2, rules=("kept",))
    choices = finalists(SimpleNamespace(choice=own, options=options), wish, Machines())
    assert [(c.plan.terms.joined, name_of(c.plan.schedule)) for c in choices] == [
        (1, "gpipe"), (2, "gpipe"), (1, "zb_h1"),
    ]  # fmt: skip
    assert choices[2].plan.decisions[0].by == "search"
    (variant,) = asked
    assert (name_of(variant.schedule), variant.stages, variant.rules) == ("zb_h1", 2, ("kept",))


def test_a_short_run_is_over_before_a_trial_would_pay():
    assert is_worth_it(choice_of(0.3).plan, 100)
    assert not is_worth_it(choice_of(0.3).plan, 99)
    assert not is_worth_it(replace(choice_of(0.3).plan, predicted=None), 100)
