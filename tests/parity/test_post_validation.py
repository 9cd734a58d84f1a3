"""An update before the norm is known, taken back where it is wrong, gives the bits of one after."""

from dataclasses import replace
from itertools import cycle
from itertools import pairwise as in_pairs

import pytest
import torch

from penstock.errors import ProgramError, RunError
from penstock.plan.lower_plan import lower_plan
from penstock.program.program import Compute, Update
from penstock.program.provisional import provisional_ends
from penstock.program.reductions import Reduction
from penstock.prove.prove import Planned, prove
from penstock.runtime import launch
from penstock.runtime.end_of_step import GlobalNorm
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.post_validation import Provisional
from penstock.runtime.worker import WindowRunner
from penstock.schedule import Action, Schedule, double_buffered, find, zb_h2
from penstock.transport.torch_distributed import TorchDistributedTransport
from tests.pairwise import pairwise
from tests.parity.models import TRAINING, captured, job_of, plan_of
from tests.parity.training import Run, differing, train
from tests.program.lowering import lower_schedule

STEPS = (1,) * 6
NEVER, SOMETIMES, ALWAYS = 1e6, 1.0, 0.05


def run_of(name: str, optimizer: str, clip_norm: float, schedule: str = "zb_h2", **options) -> Run:
    made = captured(name, torch.float32)
    plan = plan_of(made.graph, schedule, options.pop("stages", 2), 4, clip=True, **options)
    return Run(plan, job_of(name, torch.float32, optimizer, clip_norm=clip_norm), made)


def late(run: Run) -> Run:
    return run._replace(plan=run.plan.changed(post_validation=True))


@pytest.mark.parametrize(
    ("clip_norm", "optimizer", "launcher"),
    pairwise((NEVER, SOMETIMES, ALWAYS), ("sgd", "adamw"), (run_threads, run_processes)),
)
@pytest.mark.sampled(2)
def test_weights_and_state_are_those_of_clipping_before(optimizer, clip_norm, launcher, tmp_path):
    run = run_of("dropout", optimizer, clip_norm)
    before = train(run, tmp_path / "before", STEPS, launcher)
    after = train(late(run), tmp_path / "after", STEPS, launcher)
    assert differing(after.weights, before.weights) == []
    assert [step.loss for step in after.steps] == [step.loss for step in before.steps]


@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    [
        ("tied", "one_f_one_b", {"stages": 4}),
        ("tied", "chimera", {"stages": 4}),
        ("dropout", "one_f_one_b", {"stages": 2, "replicas": 2}),
        ("frozen_start", "zb_h1", {"stages": 4}),
    ],
)
@pytest.mark.sampled(2)
def test_tied_replicated_and_frozen_weights_too(name, schedule, options, tmp_path):
    run = run_of(name, "adamw", ALWAYS, schedule, **options)
    before = train(run, tmp_path / "before", STEPS)
    after = train(late(run), tmp_path / "after", STEPS)
    assert differing(after.weights, before.weights) == []


def test_sometimes_is_neither_never_nor_always(tmp_path):
    """Else the test above would not show that both ways are taken in one run."""
    found = [
        train(run_of("dropout", "sgd", norm), tmp_path / str(norm), STEPS).weights
        for norm in (NEVER, SOMETIMES, ALWAYS)
    ]
    assert differing(found[1], found[0])
    assert differing(found[1], found[2])


SYNCHRONOUS = [name for name in TRAINING if find(name)(1, 1).num_steps == 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "name"), list(zip(SYNCHRONOUS, cycle(("dropout", "batch_norm", "tied"))))
)
def test_every_synchronous_schedule_gives_the_bits_of_clipping_before(schedule, name, tmp_path):
    stages = next(n for n in (2, 4) if find(schedule)(n, 4).num_ranks > 1)
    run = run_of(name, "sgd", SOMETIMES, schedule, stages=stages)
    before = train(run, tmp_path / "before", STEPS)
    after = train(late(run), tmp_path / "after", STEPS)
    assert differing(after.weights, before.weights) == []
    assert [step.loss for step in after.steps] == [step.loss for step in before.steps]


def test_messages_that_are_received_early_over_gloo_come_again_too(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "available", lambda: (False, "as between hosts"))
    bind_receive, result = TorchDistributedTransport.bind_receive, WindowRunner.result
    ways = []

    def counting(transport, edge, peer, specs, *, ahead=0):
        post, wait = bind_receive(transport, edge, peer, specs, ahead=ahead)
        ways.append(own := [])

        def posts():
            own.append(True)
            post()

        def waits():
            tensors = wait()
            del own[:1]
            return tensors

        return posts, waits

    def over(runner, end_s):
        assert ways
        assert not any(ways), "more receives were posted than there were messages"
        return result(runner, end_s)

    monkeypatch.setattr(WindowRunner, "result", over)
    monkeypatch.setattr(TorchDistributedTransport, "bind_receive", counting)
    run = run_of("batch_norm", "adamw", SOMETIMES, "one_f_one_b")
    run = run._replace(plan=run.plan.changed(early=2))
    before = train(run, tmp_path / "before", STEPS, run_processes)
    after = train(late(run), tmp_path / "after", STEPS, run_processes)
    assert differing(after.weights, before.weights) == []


def test_loss_is_judged_once_the_weights_are_right(tmp_path):
    """Unclipped, the first update leads to a loss that is no number."""
    run = run_of("gpt", "sgd", 1e-30)
    huge = replace(run.job, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e28))
    run = run._replace(job=huge)
    before = train(run, tmp_path / "before", STEPS)
    after = train(late(run), tmp_path / "after", STEPS)
    assert differing(after.weights, before.weights) == []
    unclipped = run._replace(job=replace(huge, clip_norm=1e6))
    errors = []
    for each in (unclipped, late(unclipped)):
        with pytest.raises(RunError, match="loss") as caught:
            train(each, tmp_path / "unclipped", STEPS)
        errors.append(caught.value.message)
    assert errors[0] == errors[1]


def test_rank_that_reads_what_is_sent_after_a_backward_waits_before(tmp_path):
    """Rank 2 begins with a forward of what rank 0 sends after its first backward."""
    rows = ["F0.0 B0.0 F0.1 B0.1", "F1.0 B1.0", "F1.1 B1.1"]
    orders = [[Action.parse(word) for word in row.split()] for row in rows]
    schedule = Schedule(2, 2, orders, name="by turns")
    program = lower_schedule(schedule, clip=True, post_validation=True)
    ends = (provisional_ends(program) - program.code.offsets[:-1]).tolist()
    own = [code[:end] for code, end in zip(program.code, ends, strict=True)]
    assert [sum(isinstance(one, Compute) for one in code) for code in own] == [1, 1, 0]
    made = captured("dropout", torch.float32)
    plan = plan_of(made.graph, schedule, 2, 2, clip=True)
    run = Run(plan, job_of("dropout", torch.float32, clip_norm=SOMETIMES), made)
    before = train(run, tmp_path / "before", STEPS)
    after = train(late(run), tmp_path / "after", STEPS)
    assert differing(after.weights, before.weights) == []


@pytest.mark.parametrize("clip_norm", [NEVER, SOMETIMES, ALWAYS])
def test_forwards_are_done_again_only_where_an_update_was_wrong(clip_norm, tmp_path, monkeypatch):
    """After a step that was clipped the next update waits for the norm, so it is never wrong."""
    again, clipped = [], []
    do_again, clip = Provisional._do_again, GlobalNorm.clip

    def counts(provisional):
        again.append(provisional.rank.rank)
        do_again(provisional)

    def notes(norm, norms, step):
        clips = clip(norm, norms, step)
        if norm.rank.rank == 0:
            clipped.append(clips)
        return clips

    monkeypatch.setattr(Provisional, "_do_again", counts)
    monkeypatch.setattr(GlobalNorm, "clip", notes)
    train(late(run_of("dropout", "sgd", clip_norm)), tmp_path, STEPS)
    assert len(clipped) == len(STEPS)
    starts = [now and not before for before, now in in_pairs([False, *clipped])]
    wrong = sum(starts[:-1])  # after the last step no forward comes
    assert again.count(0) == again.count(1) == wrong
    assert clipped.count(True) == {NEVER: 0, ALWAYS: len(STEPS)}.get(clip_norm, clipped.count(True))
    assert wrong > 0 or clip_norm == NEVER


def test_resuming_gives_the_bits_of_one_run(tmp_path):
    run = late(run_of("dropout", "adamw", SOMETIMES))
    whole = train(run, tmp_path / "whole", STEPS)
    train(run, tmp_path / "parts", STEPS[:3])
    program = lower_plan(run.plan, run.captured.graph)
    rest = tuple((program, step) for step in range(3, 6))
    done = tmp_path / "parts" / "step-000003"
    resumed = train(run, tmp_path / "rest", windows=rest, resume=done)
    assert differing(resumed.weights, whole.weights) == []


def test_check_sees_the_clipped_gradients():
    run = late(run_of("dropout", "adamw", ALWAYS))
    differences = prove(Planned(run.job, run.captured, run.plan)).differences
    assert max(each.value for each in differences) < 1e-6


def test_norm_comes_after_the_updates_and_nothing_else_does():
    program = lower_schedule(zb_h2(3, 4), clip=True, post_validation=True)
    for code in program.code:
        assert isinstance(code[-2], Update)
        assert isinstance(code[-1], Reduction)
        assert code[-1].word == "validate"


def test_schedule_that_updates_on_the_way_is_refused():
    with pytest.raises(ProgramError, match="double_buffered updates before a step's end"):
        lower_schedule(double_buffered(2, 2), clip=True, post_validation=True)
