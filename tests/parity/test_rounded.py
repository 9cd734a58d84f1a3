"""Packed messages: what training with them means, written down here without any part of Penstock.

The uncut model in one process, eager autograd; behind each block that ends a stage whose successor
is on another rank stands an op that rounds activations there and gradients back.  In float64
nothing else differs.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.graph.cut_points import block_ends
from penstock.graph.trace import build
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.prove import rounded
from penstock.prove.prove import Planned, prove
from penstock.runtime.launch import run_processes, run_threads
from penstock.transport.packing import packing_of
from tests.parity.models import SAMPLES, captured, job_of, plan_of
from tests.parity.training import Run, difference, train

EXACT, STEPS, MICRO_BATCHES = torch.float64, 3, 4


class Round(torch.autograd.Function):
    """Rounds there to `forth` bits, and the gradient to `back`; 32: not at all."""

    @staticmethod
    def forward(ctx, x: Tensor, forth: int, back: int) -> Tensor:
        ctx.back = back
        return on_grid(x, forth)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return on_grid(gradient, ctx.back), None, None


def on_grid(x: Tensor, bits: int) -> Tensor:
    """Return each sample of (3, 6, 16) on 2^bits - 1 levels that reach from -greatest to greatest.

    A row has at least 64 numbers of the last dimensions: 6 * 16 of them here.
    """
    if bits == 32:
        return x.clone()
    found = torch.empty_like(x)
    for sample in range(SAMPLES):
        levels = 2 ** (bits - 1) - 1
        step = float(x[sample].abs().max()) / levels
        found[sample] = torch.round(x[sample] / step) * step
    return found


def rounded_loop(job, ends: dict[int, tuple[int, int]]) -> dict[str, Tensor]:
    """Return the weights after STEPS steps; `ends`: bits behind blocks, by the block's number."""
    model, _ = build(job)
    for block, bits in ends.items():
        model.blocks[block].register_forward_hook(
            lambda module, given, result, bits=bits: Round.apply(result, *bits)
        )
    optimizer, batches = job.optimizer(model.parameters()), job.data(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            (job.loss(model, next(batches)) / MICRO_BATCHES).backward()
        optimizer.step()
    return {f"weights/{name}": value.detach() for name, value in model.named_parameters()}


def run_of(schedule: str, wire: tuple[int, int], dtype=EXACT, blocks=(1, 3, 5)) -> Run:
    made = captured("gpt", dtype)
    ends = {made.graph.cut_points[at].name: at for at in block_ends(made.graph)}
    cuts = tuple(ends[f"after blocks.{block}"] for block in blocks)
    plan = plan_of(made.graph, schedule, len(blocks) + 1, MICRO_BATCHES)
    names = tuple(made.graph.cut_points[cut].name for cut in cuts)
    plan = plan.changed(cuts=cuts, cut_names=names, wire=wire)
    return Run(plan, job_of("gpt", dtype, "adamw", wire_bits=wire), made)


@pytest.mark.parametrize(
    ("schedule", "wire", "crossings", "launcher"),
    [
        ("one_f_one_b", (8, 8), (1, 3, 5), run_threads),
        ("zb_h1", (4, 16), (1, 3, 5), run_processes),
        ("gpipe", (11, 32), (1, 3, 5), run_threads),
        ("zb_v", (32, 6), (1, 5), run_threads),  # stages 1 and 2 are on one rank
        ("chimera", (8, 8), (1, 3, 5), run_threads),
    ],
)
@pytest.mark.sampled(2)
def test_training_with_packed_messages_is_that_of_a_loop_that_rounds(
    schedule, wire, crossings, launcher, tmp_path
):
    run = run_of(schedule, wire)
    found = train(run, tmp_path, lengths=(STEPS,), launcher=launcher).weights
    expected = rounded_loop(run.job, dict.fromkeys(crossings, wire))
    assert difference(found, expected) < 1e-11
    assert difference(found, rounded_loop(run.job, {})) > 1e-3


def test_messages_have_the_bytes_that_the_program_says():
    run = run_of("one_f_one_b", (5, 16), torch.float32)
    graph, plan = run.captured.graph, run.plan
    stages, program = stages_of(plan, graph), lower_plan(plan, graph)
    for edge, known, bits in zip(stages.edges, program.edges, program.graph.bits, strict=True):
        sent = packing_of(graph, edge.values, bits).sent
        assert sum(spec.size_bytes for spec in sent) == known.size_bytes < edge.size_bytes
    # 18 tokens of 16 numbers: three scales, then codes of 5 and of 16 bits
    assert {edge.size_bytes for edge in program.edges} == {12 + 180, 12 + 576}


def test_proof_compares_with_the_loop_that_rounds_and_with_the_plain_one(monkeypatch):
    run = run_of("zb_v", (8, 8), torch.float32)
    planned = Planned(run.job, run.captured, run.plan)
    proof = prove(planned)
    rows = {row.what: row for row in proof.differences}
    assert proof.problem == ""
    assert "rounds to 8 bits" in str(proof)
    assert all(rows[what].bitwise for what in ("traced gradients", "gradients", "loss", "update"))
    assert 1e-3 < rows["rounding"].value < 0.1
    monkeypatch.setattr(rounded, "rounded_to", lambda made, bits: made * (1 + 2.0**-7))
    assert "the gradient of" in prove(planned).problem


def test_window_of_an_asynchronous_plan_is_compared_with_its_rule_that_rounds():
    run = run_of("pipedream", (8, 8), torch.float32)
    assert prove(Planned(run.job, run.captured, run.plan)).problem == ""


def test_plan_with_fewer_bits_than_the_job_allows_is_refused():
    run = run_of("gpipe", (8, 8), torch.float32)
    job = replace(run.job, wire_bits=(8, 16))
    with pytest.raises(PlanError, match=r"8 and 8 bits .* the job allows 8 and 16"):
        prove(Planned(job, run.captured, run.plan))
