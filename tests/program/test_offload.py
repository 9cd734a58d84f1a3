"""Offload and Reload: in text, refused where they make no sense, simulated, run, and what is held.

An instruction is a row of the table, a function that binds it, and this file.
"""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from penstock.errors import PlanError, ProgramError, RunError
from penstock.plan import Plan
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.program.codes import NUM_COSTS
from penstock.program.instructions import TABLE, parse_instruction
from penstock.program.lower import lower
from penstock.program.passes import offload
from penstock.program.program import BeginOffload, BeginReload, Offload, Program, Reload
from penstock.runtime.launch import run_processes
from penstock.runtime.worker import Task, work
from penstock.schedule import Action, Schedule, gpipe, one_f_one_b, zb_h1
from penstock.schedule.orders import KINDS
from penstock.simulate import critical_path
from penstock.simulate.costs import Costs, Memory
from penstock.simulate.price import held_of, memory_on
from penstock.simulate.simulate import simulate
from penstock.simulate.what_if import measured_run, usual_changes, what_if
from penstock.timeline import breakdown_of, peak_bytes
from tests.pairwise import pairwise
from tests.parity.models import captured, job_of, plan_of
from tests.parity.training import Run, listed, train
from tests.program.lowering import lower_schedule
from tests.runtime.test_memory import CLOSE, profile_of

FLOAT = torch.float32


def changed(program, rank, change):
    codes = [list(code) for code in program.code]
    change(codes[rank])
    return lambda: replace(program, code=codes)


def test_copies_stand_around_what_they_are_of():
    made = offload(lower(gpipe(1, 2)), ["both"])
    expected = "F0.0 F0.0>far F0.1 F0.1>far F0.0<far B0.0 F0.1<far B0.1 U0.0<far U0.0 U0.0>far"
    assert " ".join(map(str, made.code[0])) == expected
    kept = offload(lower(one_f_one_b(2, 2)), ["activations", "activations"])
    words = [[str(one) for one in code if isinstance(one, Offload | Reload)] for code in kept.code]
    assert words[0] == ["F0.0>far", "F0.1>far", "F0.0<far", "F0.1<far"]
    assert words[1] == [], "a backward that follows at once finds it here"
    split = offload(lower(zb_h1(2, 2)), ["activations", "none"]).code[0]
    assert "F0.0<far I0.0" in " ".join(map(str, split))
    assert offload(lower(gpipe(2, 2)), ["none", "none"]) == lower(gpipe(2, 2))


def test_copies_that_are_begun_stand_one_compute_or_update_ahead():
    made = offload(lower(gpipe(1, 4)), ["both"], beside=True)
    expected = (
        "F0.0 F0.0>>far F0.1 F0.0>far F0.1>>far F0.2 F0.1>far F0.2>>far F0.0<<far F0.3 F0.2>far"
        " F0.3>>far F0.0<far F0.1<<far B0.0 F0.3>far F0.1<far F0.2<<far B0.1 F0.2<far F0.3<<far"
        " B0.2 F0.3<far U0.0<<far B0.3 U0.0<far U0.0 U0.0>far"
    )
    assert " ".join(map(str, made.code[0])) == expected
    near = offload(lower(gpipe(1, 2)), ["both"], beside=True)
    expected = "F0.0 F0.0>far F0.1 F0.1>far F0.0<far B0.0 F0.1<far U0.0<<far B0.1 U0.0<far U0.0"
    assert " ".join(map(str, near.code[0])) == f"{expected} U0.0>far", "else it never was away"
    sends = " ".join(map(str, offload(lower(gpipe(2, 4)), ["both"] * 2, beside=True).code[0]))
    assert "F0.0 F0.0>r1e0s0 F0.0>>far F0.1 F0.1>r1e0s1 F0.0>far" in sends, "no message waits"


def test_text_and_file_hold_them(tmp_path):
    made = offload(lower(gpipe(2, 4)), ["both", "state"], beside=True)
    made.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json") == made
    for text in ("F0.3>far", "F0.3<far", "U1.0>far", "U1.2<far", "F0.3>>far", "U1.2<<far"):
        assert str(parse_instruction(text, {})) == text
    with pytest.raises(ProgramError, match=r"'B0.3>far' is not an instruction"):
        parse_instruction("B0.3>far", {})


def test_each_instruction_prints_as_its_row_says():
    made = offload(lower(one_f_one_b(2, 2)), ["both", "both"])
    found = {type(one) for code in made.code for one in code}
    assert found < {row.of for row in TABLE}
    for code in made.code:
        for one in code:
            assert parse_instruction(str(one), {}) == one


BOTH = offload(lower(gpipe(2, 2)), ["both", "both"])
AHEAD = offload(lower(gpipe(1, 4)), ["both"], beside=True)
CASES = {
    "a compute of what is far": (lambda c: c.remove(Reload(Action("F", 0, 0))), "in far memory"),
    "elsewhere than it began": (
        lambda c: c.remove(Reload(Action("U", 0, 0))),
        "optimizer state of stage 0 elsewhere",
    ),
    "twice there": (
        lambda c: c.insert(c.index(Offload(Action("F", 0, 0))), Offload(Action("F", 0, 0))),
        "it is in far memory",
    ),
    "twice back": (
        lambda c: c.insert(c.index(Reload(Action("F", 0, 0))), Reload(Action("F", 0, 0))),
        "it is not in far memory",
    ),
    "before it is made": (lambda c: c.insert(0, Offload(Action("F", 0, 0))), "nothing is kept"),
    "of another step": (
        lambda c: c.insert(len(c), Reload(Action("U", 0, 0))),
        "next update of the stage is that of step 1",
    ),
    "of a stage elsewhere": (
        lambda c: c.append(Offload(Action("U", 1, 0))),
        "no gradients of that stage",
    ),
    "elsewhere at the end": (
        lambda c: c.remove(Offload(Action("U", 0, 0))),
        "optimizer state of stage 0 elsewhere",
    ),
    "out of range": (lambda c: c.append(Offload(Action("F", 0, 9))), "out of range"),
}


BEGUN = {
    "begun twice": (lambda c: c.insert(3, BeginOffload(Action("F", 0, 0))), "is under way"),
    "used meanwhile": (
        lambda c: [c.remove(kind(Action("F", 0, 0))) for kind in (Offload, BeginReload, Reload)],
        "is under way",
    ),
    "back before away": (
        lambda c: c.insert(c.index(Offload(Action("F", 0, 0))), BeginReload(Action("F", 0, 0))),
        "is under way",
    ),
    "back before it is far": (
        lambda c: c.insert(1, BeginReload(Action("F", 0, 0))),
        "it is not in far memory",
    ),
    "away while away": (
        lambda c: c.insert(6, BeginOffload(Action("F", 0, 0))),
        "it is in far memory",
    ),
    "under way at the end": (
        lambda c: c.__setitem__(-1, BeginOffload(Action("U", 0, 0))),
        "optimizer state of stage 0 elsewhere",
    ),
}


@pytest.mark.parametrize("case", BEGUN)
def test_what_cannot_be_begun_is_refused(case):
    change, words = BEGUN[case]
    with pytest.raises(ProgramError, match=words):
        changed(AHEAD, 0, change)()


@pytest.mark.parametrize("case", CASES)
def test_what_makes_no_sense_is_refused(case):
    change, words = CASES[case]
    with pytest.raises(ProgramError, match=words):
        changed(BOTH, 0, change)()


def test_state_is_not_moved_while_an_update_may_be_taken_back():
    late = lower_schedule(gpipe(1, 2), clip=True, post_validation=True)
    with pytest.raises(ProgramError, match="may still be undone"):
        offload(late, ["state"])
    plan = plan_of(captured("tied", FLOAT).graph, "gpipe", 2, 4, clip=True, post_validation=True)
    with pytest.raises(PlanError, match="needs the optimizer's state"):
        plan.changed(offload=("state", "none"))


def test_plan_that_says_something_else_is_refused():
    plan = plan_of(captured("tied", FLOAT).graph, "gpipe", 2, 4)
    with pytest.raises(PlanError, match="offload says 1 of 2 stages"):
        plan.changed(offload=("state",))
    with pytest.raises(PlanError, match="offload says 'gradients', not one of"):
        plan.changed(offload=("state", "gradients"))
    with pytest.raises(PlanError, match="there are none"):
        plan.changed(beside=True)
    with pytest.raises(PlanError, match="says what of stage 0 is in far memory"):
        plan.changed(schedule=LISTED, offload=("both", "none"))
    with pytest.raises(PlanError, match="there are none"):
        plan.changed(schedule=LISTED, beside=True)


def test_a_copy_has_the_computing_thread_and_changes_what_is_held():
    rows = np.zeros((NUM_COSTS, 1, 1))
    rows[:, 0, 0] = [1, 2, 0, 0, 4, 0.25, 8, 0, 0.5, 16, 0]  # F B I W U, F U W away, and back
    net = np.array([[100], [-100], [0], [0], [0], [-60], [-7], [0], [60], [7], [0]])
    memory = Memory(np.array([10]), np.zeros_like(net), net)
    made = offload(lower(gpipe(1, 2)), ["both"])
    timeline = simulate(made, Costs(rows), memory=memory)
    assert timeline.totals.step_s == 2 * (1 + 2 + 0.25 + 0.5) + 4 + 8 + 16
    copies = [(s.kind, s.stage, s.micro_batch) for s in timeline.spans if s.lane == "copy"]
    assert copies == [
        ("offload", 0, 0), ("offload", 0, 1), ("reload", 0, 0), ("reload", 0, 1),
        ("reload", 0, 0), ("offload", 0, 0),
    ]  # fmt: skip
    held = timeline.memory.sizes_bytes.tolist()
    assert max(held) == peak_bytes(timeline)[0] == 10 + 100 + 40
    assert held[-1] == 10


def test_copies_that_were_begun_run_beside_computes_one_each_way_at_a_time():
    rows = np.zeros((NUM_COSTS, 1, 1))
    rows[:, 0, 0] = [1, 2, 0, 0, 4, 1.5, 3, 0, 0.5, 6, 0]  # F B I W U, F U W away, and back
    net = np.array([[100], [-100], [0], [0], [0], [-60], [-7], [0], [60], [7], [0]])
    memory = Memory(np.array([10]), np.zeros_like(net), net)
    timeline = simulate(AHEAD, Costs(rows), memory=memory)
    copies = [(s.kind, s.start_s, s.end_s) for s in timeline.spans if s.lane == "copy"]
    assert copies == [
        ("offload", 1, 2.5),  # beside F1, which ends at 2: half a second to wait
        ("offload", 2.5, 4), ("offload", 4, 5.5),
        ("reload", 4, 4.5),  # beside F3, from 4 to 5
        ("offload", 5.5, 7),  # beside B0
        ("reload", 5.5, 6), ("reload", 7.5, 8), ("reload", 9.5, 10),
        ("reload", 11.5, 17.5),  # the state, beside B3, from 11.5 to 13.5
        ("offload", 21.5, 24.5),
    ]  # fmt: skip
    assert timeline.totals.step_s == 24.5
    assert timeline.totals.busy_s == (4 + 8 + 4 + 3,)  # no copy but the last one
    parts = breakdown_of(timeline)
    assert parts.of("copies")[0] == 0.5 * 3 + 4 + 3
    # the fullest moment: F3 runs; on their way out two, of which one waits, and one back
    assert peak_bytes(timeline) == (10 + 4 * 100 - 60,)
    curve = timeline.memory
    assert max(curve.sizes_bytes.tolist()) == peak_bytes(timeline)[0]
    assert curve.times_s.tolist() == sorted(curve.times_s.tolist())
    path = critical_path(AHEAD, timeline)
    assert path.step_s == 24.5
    assert path.seconds()["idle"] == 0
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(path.hops))


def test_costs_without_rows_of_copies_say_that_they_take_no_time():
    made = offload(lower(gpipe(1, 2)), ["both"])
    assert simulate(made, Costs(np.ones((len(KINDS), 1, 1)))).totals.step_s == 5.0


GRID = [
    ("gpt", "gpipe", 2, {}),
    ("gpt", "interleaved", 4, {"clip": True}),
    ("tied", "zb_h1", 2, {"replicas": 2}),
    ("batch_norm", "one_f_one_b", 2, {"recompute": (True, False)}),
    ("tied", "chimera", 2, {}),
    ("tied", "pipedream", 2, {}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "schedule", "stages", "options"), GRID)
@pytest.mark.parametrize("copies", [("state", False), ("both", False), ("both", True)])
def test_training_is_bit_equal(name, schedule, stages, options, copies, tmp_path):
    word, beside = copies
    plan = plan_of(captured(name, FLOAT).graph, schedule, stages, 4, **options)
    plan = plan.changed(offload=("none",) * stages)
    clip = {"clip_norm": 0.1} if options.get("clip") else {}
    job, made = job_of(name, FLOAT, "adamw", **clip), captured(name, FLOAT)
    away = plan.changed(offload=(word,) * stages, beside=beside)
    stay, moved = (train(Run(p, job, made), tmp_path / p.stages[0].far) for p in (plan, away))
    assert stay.weights.keys() == moved.weights.keys()
    assert any(key.startswith("optimizer/") for key in stay.weights)
    for key, value in stay.weights.items():
        assert torch.equal(value, moved.weights[key]), key
    assert [step.loss for step in stay.steps] == [step.loss for step in moved.steps]


# of rank 0 two are away at once; on rank 1 the second backward comes before the first
LISTED = Schedule.parse(
    "rank 0  F0.0 F0.1 F0.0>far F0.2 F0.1>far F0.3 F0.0<<far I0.0 F0.1<<far W0.0 I0.1 W0.1"
    " F0.3>far I0.2 F0.3<<far W0.2 I0.3 W0.3\n"
    "rank 1  F1.0 F1.1 F1.0>far F1.2 I1.1 W1.1 F1.0<<far I1.0 W1.0 I1.2 W1.2 F1.3 I1.3 W1.3"
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("copies", "where", "name"),
    pairwise(
        (("state", False), ("activations", False), ("both", False), ("both", True)),
        (("gpipe", 2, 1), ("interleaved", 4, 1), ("zb_h1", 2, 2)),
        ("tied", "batch_norm", "frozen"),
    ),
)
def test_peak_is_the_predicted_one_and_lower(copies, where, name):
    (word, beside), (schedule, stages, replicas) = copies, where
    made, job = captured(name, FLOAT), job_of(name, FLOAT, "adamw")
    alike = plan_of(made.graph, schedule, stages, 4 * replicas, replicas=replicas)
    plan = alike.changed(offload=(word,) * stages, beside=beside)
    expected = _predicted(plan, made)
    assert _measured(plan, made, job) == pytest.approx(expected, rel=CLOSE, abs=600)
    assert sum(expected) < sum(_predicted(alike, made))


@pytest.mark.parametrize(
    ("name", "options"),
    [("tied", {}), ("batch_norm", {"offload": ("state", "state"), "beside": True})],
)
def test_copies_that_a_schedule_lists_train_the_same_bits_at_the_predicted_peak(
    name, options, tmp_path
):
    made, job = captured(name, FLOAT), job_of(name, FLOAT, "adamw")
    plan = plan_of(made.graph, replace(LISTED, far=()), 2, 4)
    away = plan.changed(schedule=LISTED, **options)
    assert away.offloads
    stay, moved = (train(Run(p, job, made), tmp_path / p.schedule.name) for p in (plan, away))
    assert all(torch.equal(value, moved.weights[key]) for key, value in stay.weights.items())
    assert [step.loss for step in stay.steps] == [step.loss for step in moved.steps]
    expected = _predicted(away, made)
    assert _measured(away, made, job) == pytest.approx(expected, rel=CLOSE)
    assert sum(expected) < sum(_predicted(plan, made))


def _predicted(plan: Plan, made):
    program, stages = lower_plan(plan, made.graph), stages_of(plan, made.graph)
    name = next(n for n in ("tied", "batch_norm", "frozen") if captured(n, FLOAT) is made)
    held = held_of(made.graph, stages, profile_of(name), copies=plan.offloads)
    memory = memory_on([held], program, [0] * program.num_ranks)
    return peak_bytes(simulate(program, lambda action: 1.0, memory=memory))


def _measured(plan: Plan, made, job):
    program = lower_plan(plan, made.graph)
    windows = tuple((program, number) for number in range(3))
    task = Task(made, stages_of(plan, made.graph), job, listed(windows), memory_window=1)
    run = partial(work, task)
    results = run_processes(run, plan.total_ranks, lambda step: None, groups=task.groups)
    return [result.peak_bytes for result in results]


@pytest.mark.parametrize("beside", [False, True])
def test_a_run_with_copies_is_replayed_and_carried_to_other_schedules(beside, tmp_path):
    made, job = captured("tied", FLOAT), job_of("tied", FLOAT, "adamw")
    plan = plan_of(made.graph, "one_f_one_b", 2, 4).changed(offload=("both", "both"), beside=beside)
    timeline = train(Run(plan, job, made), tmp_path).timeline
    again = measured_run(plan, made.graph, timeline, profile_of("tied"))
    assert again.replayed_s == pytest.approx(timeline.totals.step_s, rel=1e-9)
    rests = [what_if(again, change).rests_on for _, change in usual_changes(again)]
    assert any("copies to far memory as profiled" in row for row in rests), "gpipe has more of them"


def test_a_plan_in_units_holds_the_state_of_one_unit_at_a_time():
    made, job = captured("gpt", FLOAT), job_of("gpt", FLOAT, "adamw")
    whole = plan_of(made.graph, "gpipe", 2, 4).changed(offload=("both", "none"))
    plan = whole.refined(made.graph)
    assert plan.num_stages > 2
    assert set(zip(plan.offload, plan.offload[1:], strict=False)) == {
        ("both", "both"), ("both", "none"), ("none", "none"),
    }  # fmt: skip
    peaks = [_measured(each, made, job) for each in (whole, plan)]
    assert peaks[1][0] < peaks[0][0]


def test_state_of_an_optimizer_of_its_own_kind_is_not_moved():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    made = captured("tied", FLOAT)
    plan = plan_of(made.graph, "gpipe", 2, 4).changed(offload=("state", "state"))
    job = replace(job_of("tied", FLOAT, "sgd"), optimizer=lambda p: Own(p, lr=0.1))
    with pytest.raises(RunError, match="Own of its own kind, cannot be offloaded"):
        _measured(plan, made, job)
