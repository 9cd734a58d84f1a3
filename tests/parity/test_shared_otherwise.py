"""A run whose micro-batches are shared otherwise after each step is still the plain loop."""

from contextlib import closing

import pytest
import torch

from penstock.checkpoints.control import LocalBoard
from penstock.plan.lower_plan import lower_plan
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.windows import repeated
from penstock.schedule.dapple import turns_of
from tests.parity.models import captured, job_of, plain_loop, plan_of
from tests.parity.training import Run, difference, train

EXACT, STEPS = torch.float64, 6


class Turns:
    """A guide that takes the next plan after each step."""

    def __init__(self, plans, graph, board):
        self.plans, self.graph, self.board = plans, graph, board
        self.edges: list[int] = []
        board.ask_to_share(1)

    def begun(self, rank, seconds):
        pass

    def look(self, rank, step, sampler):
        pass

    def shared(self, task, step, transport):
        self.edges.append(task.first_edge)
        program = lower_plan(self.plans[step % len(self.plans)], self.graph)
        return task.at(repeated(program, range(step, STEPS)))

    def ready(self, rank):
        if rank == 0:
            self.board.ask_to_share(len(self.plans) + STEPS)  # each time once more


CASES = [
    ("dropout", "one_f_one_b", 2, ((2, 2), (3, 1), (1, 3)), {}),
    ("batch_norm", "gpipe", 1, ((2, 2, 2), (4, 1, 1), (1, 2, 3)), {}),
    ("tied", "zb_h1", 2, ((2, 2), (1, 3)), {"clip": True}),
    ("dropout", "one_f_one_b", 2, ((2, 2), (3, 1)), {"shard": ("shard", "shard")}),
]


@pytest.mark.parametrize(("name", "schedule", "stages", "ways", "options"), CASES)
@pytest.mark.sampled(2)
def test_replicas_with_other_shares_each_step(name, schedule, stages, ways, options, tmp_path):
    graph = captured(name, EXACT).graph
    plans = [
        plan_of(graph, schedule, stages, max(w), replicas=len(w), shares=w, **options) for w in ways
    ]
    clip = 0.05 if options.get("clip") else None
    run = Run(plans[0], job_of(name, EXACT, "adamw", clip_norm=clip), captured(name, EXACT))
    with closing(LocalBoard()) as board:
        guide = Turns(plans, graph, board)
        outcome = train(run, tmp_path, (STEPS,), guide=guide, board=board)
    trained = plain_loop(run.job, STEPS, sum(ways[0]))
    assert difference(outcome.weights, trained.weights) < 1e-11
    assert [step.loss for step in outcome.steps] == pytest.approx(trained.losses, rel=1e-13)
    assert len(guide.edges) == (STEPS - 1) * plans[0].total_ranks


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
@pytest.mark.sampled(2)
def test_ranks_of_a_stage_in_other_turns_make_room_for_more_messages(launcher, tmp_path):
    graph = captured("dropout", EXACT).graph
    plans = [
        plan_of(
            graph, f"dapple(ranks={words})", 2, 6, num_ranks=sum(map(len, turns_of(words)))
        )
        for words in ("2-1", "3+1-1", "1+2-1")
    ]  # fmt: skip
    run = Run(plans[0], job_of("dropout", EXACT, "adamw"), captured("dropout", EXACT))
    with closing(LocalBoard()) as board:
        guide = Turns(plans, graph, board)
        outcome = train(run, tmp_path, (STEPS,), launcher, guide=guide, board=board)
    trained = plain_loop(run.job, STEPS, 6)
    assert difference(outcome.weights, trained.weights) < 1e-11
    if launcher is run_threads:
        assert max(guide.edges) > 0
