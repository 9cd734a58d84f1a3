"""Frameworks: what each does where a description of a run does not say it."""

from typing import NamedTuple

from penstock.estimate.training_run import Hiding, Sharding
from penstock.estimate.transformer import Scores


class Framework(NamedTuple):
    """The defaults of a framework.

    overlap         what it sends while it computes
    sharding        what its replicas divide
    stops_early     recompute ends before the last product of a block
    parallel_too    tensor ranks also divide what lies between the products
    gradient_bytes  of one number of a gradient
    selective       part of the products that selective recompute repeats
    is_op_by_op     operators between the products are kernels of their own
    scores          how attention is computed
    source          where that is said
    """

    overlap: Hiding
    sharding: Sharding
    stops_early: bool
    parallel_too: bool
    gradient_bytes: int
    selective: float
    is_op_by_op: bool
    scores: Scores
    source: str


FRAMEWORKS = {
    "megatron-lm": Framework(
        Hiding(), "none", False, False, 4, 0.0, False, "fused",
        "arguments.py: overlap of gradients, of gathers and of tensor messages are options",
    ),
    "megatron-core": Framework(
        Hiding(gradients=True, pipe=True), "optimizer", False, True, 4, 0.0, False, "flash 3",
        "its performance guide: --overlap-grad-reduce, --overlap-param-gather, interleaved p2p; "
        "Transformer Engine takes cuDNN's attention on Hopper and later",
    ),
    "fsdp": Framework(
        Hiding(), "full", True, False, 4, 0.0, False, "fused",
        "torch.distributed.fsdp: the next gather runs beside compute",
    ),
    "deepspeed": Framework(
        Hiding(gradients=True), "optimizer", False, False, 2, 0.0, False, "fused",
        "zero config: overlap_comm is true where gradients are divided",
    ),
    "torchtitan": Framework(
        Hiding(pipe=True), "full", True, True, 4, 0.5, False, "fused",
        "docs/fsdp.md; sequence parallel is part of its tensor parallel; activation_checkpoint.py: "
        "every second product is repeated",
    ),
    "penstock": Framework(
        Hiding(gradients=True, pipe=True), "none", False, False, 4, 0.0, True, "fused",
        "docs/plan.md: sums begin as soon as gradients are ready; docs/compiled.md: units are "
        "compiled where that is asked for",
    ),
}  # fmt: skip
