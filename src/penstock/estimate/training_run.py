"""Run: one configuration of a training run: model, devices, degrees, batch."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from penstock.errors import EstimateError
from penstock.estimate.datasheet import Datasheet
from penstock.estimate.transformer import Transformer

Recompute: TypeAlias = Literal["none", "selective", "full"]
Sharding: TypeAlias = Literal["none", "optimizer", "gradients", "full"]
_ONE_OR_MORE = (
    "tensor",
    "data",
    "micro_batch",
    "num_micro_batches",
    "expert",
    "context",
    "interleave",
    "product_speed",
)


class Hiding(NamedTuple):
    """What is sent while the device computes, as much as compute can hide.

    gathers    of sharded weights, and the scatters of their gradients
    gradients  sums over replicas, beside the backward of the last micro-batch
    tensor     sums between tensor ranks, beside products
    pipe       messages between stages
    """

    gathers: bool = True
    gradients: bool = False
    tensor: bool = False
    pipe: bool = False


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A configuration whose step time and memory are asked for.

    cluster            the machines, as a word: constants are fitted for each one
    stage_blocks       blocks of every stage, from the input; one stage is no pipeline
    devices            the device of every stage
    tensor .. context  ranks that share a matrix, a batch, the experts, a sequence; the ranks of
                       `expert` are among those of `data`
    micro_batch        samples of one micro-batch on one replica
    num_micro_batches  micro-batches of one replica in a step
    interleave         chunks of blocks on a rank
    sharding           what the ranks of `data` divide among them, each with what comes before
    sequence_parallel  the tensor ranks also divide what lies between the products
    gradient_bytes     of one number of a gradient, kept and sent
    product_speed      of products in the blocks, in units of the 16-bit peak: 2 in 8 bits
    overlap            what is sent while the device computes
    fused_loss         head's softmax and loss are one kernel
    stops_early        what is repeated ends with the last value that a backward reads, so without
                       the last product of a block: torch's checkpoint, not Megatron's
    selective          part of the products that selective recompute repeats, with all kernels
                       between them; 0: attention alone, as in Megatron
    on_device          memory is all that the device has in use, not what tensors are given
    optimizer_bytes    kept beside weight and gradient: 12 for Adam in 32 bits
    Raises:   EstimateError: a number is below 1, or they do not fit together.
    """

    model: Transformer
    cluster: str
    stage_blocks: tuple[int, ...]
    devices: tuple[Datasheet, ...]
    tensor: int
    data: int
    micro_batch: int
    num_micro_batches: int
    expert: int = 1
    context: int = 1
    interleave: int = 1
    recompute: Recompute = "none"
    sharding: Sharding = "none"
    sequence_parallel: bool = False
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    product_speed: float = 1.0
    overlap: Hiding = Hiding()  # noqa: RUF009 - a frozen record
    fused_loss: bool = False
    stops_early: bool = False
    on_device: bool = False
    selective: float = 0.0

    def __post_init__(self) -> None:
        for name in _ONE_OR_MORE:
            if getattr(self, name) < 1:
                what = f"{name} is {getattr(self, name)}"
                raise EstimateError(what, hint=f"{name} must be 1 or more")
        if len(self.devices) != len(self.stage_blocks) or sum(self.stage_blocks) < 1:
            what = f"{len(self.devices)} devices for stages of {self.stage_blocks} blocks"
            raise EstimateError(what, hint="give each stage one device, and some stage a block")
        if min(self.stage_blocks) < 0 or sum(self.stage_blocks) != self.model.blocks:
            what = f"stages of {self.stage_blocks} blocks for a model of {self.model.blocks}"
            raise EstimateError(what, hint="the stages must hold every block once")
        if self.data * self.context * self.tensor % self.expert:
            what = f"{self.expert} ranks share the experts, of {self.data} x {self.tensor}"
            raise EstimateError(what, hint="the expert degree must divide the ranks of a stage")

    @property
    def pipe(self) -> int:
        """Return the number of stages."""
        return len(self.stage_blocks)

    @property
    def ranks(self) -> int:
        """Return the number of devices."""
        return self.tensor * self.data * self.context * self.pipe

    @property
    def tokens(self) -> float:
        """Return the tokens of a micro-batch on one rank, before tensor ranks divide them."""
        return self.micro_batch * self.model.sequence / self.context


def even(blocks: int, stages: int) -> tuple[int, ...]:
    """Return `blocks` spread over `stages` as evenly as possible, the larger parts in the middle.

    First and last stage also hold the embedding and the head, so they get the smaller parts.
    Raises:   EstimateError: fewer than one stage, or more than blocks.
    """
    if not 1 <= stages <= blocks:
        message = f"{stages} stages for {blocks} blocks"
        raise EstimateError(message, hint="give every stage at least one block")
    least, more = divmod(blocks, stages)
    start = (stages - more) // 2
    return tuple(least + (start <= at < start + more) for at in range(stages))
