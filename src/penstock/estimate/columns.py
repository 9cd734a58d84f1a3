"""Columns: the names that a described run is written in, and what each is taken as."""

from typing import NamedTuple


class Column(NamedTuple):
    """A column: what is taken where it is not there ("": it must be), the most it can be."""

    name: str
    default: str
    most: int
    meaning: str


COLUMNS = (
    Column(
        "model", "-", 0,
        "a name that is known; then layers and sequence may replace its own, and the other "
        "sizes may be left out",
    ),
    Column("layers", "", 10_000, "blocks"),
    Column("hidden", "", 1_000_000, "numbers of a token between blocks"),
    Column("heads", "", 10_000, "of attention"),
    Column("kv_heads", "heads", 10_000, "heads of keys and values"),
    Column("head_size", "hidden / heads", 100_000, "numbers of a head"),
    Column("intermediate", "4 x hidden", 4_000_000, "numbers inside the feed-forward"),
    Column("gated", "no", 0, "the feed-forward has a gate (SwiGLU): yes or no"),
    Column("vocabulary", "", 10_000_000, "tokens that are known"),
    Column("tied", "no", 0, "the head is the embedding: yes or no"),
    Column("sequence", "", 16_777_216, "tokens of a sample"),
    Column("experts", "1", 100_000, "of a block; 1 is a plain feed-forward"),
    Column("experts_per_token", "2", 10_000, "of them"),
    Column("expert_intermediate", "intermediate", 4_000_000, "numbers inside an expert"),
    Column(
        "attention", "of the framework", 0,
        "flash, masked (flash, its mask a tensor: of all pairs), flash 1 (its first version), "
        "flash 3 (its third, or cuDNN's: made for Hopper and later), "
        "written (scores in memory, fused softmax), eager",
    ),
    Column(
        "kernels", "of the framework", 0,
        "between the products: fused, or op by op (each operator one, as torch runs them)",
    ),
    Column("loss", "plain", 0, "plain, or fused (softmax and loss one kernel)"),
    Column(
        "cluster", "the device", 0,
        "a name for the machines: runs of one name are fitted together",
    ),
    Column(
        "device", "", 0,
        "a name of estimate/datasheet.py, or one a stage: a100-80/t4; several in one: a100-80+t4",
    ),
    Column("gpus", "the product of the ways", 10_000_000, "devices of the run"),
    Column(
        "gpus_per_host", "of the device", 0,
        "devices of a host; this and the rates below: one, or one a device: 8/4",
    ),
    Column(
        "inside_gb_per_s", "of the device", 0,
        "GB/s in one direction to another device of the host",
    ),
    Column(
        "across_gb_per_s", "of the device", 0,
        "GB/s in one direction: a device's share of the host's network",
    ),
    Column(
        "memory_gb_per_s", "of the device", 0,
        "GB/s of a device's own memory, where it is another version",
    ),
    Column("power_w", "of the device", 0, "watts that a device may draw, where it is limited"),
    Column(
        "framework", "megatron-core", 0,
        "megatron-lm, megatron-core, fsdp, deepspeed, torchtitan, penstock: defaults of what "
        "follows",
    ),
    Column("data", "gpus / the other ways", 10_000_000, "replicas"),
    Column("tensor", "1", 100_000, "ranks that share a matrix"),
    Column(
        "sequence_parallel", "of the framework", 0,
        "they also divide what lies between products: yes or no",
    ),
    Column("context", "1", 100_000, "ranks that share a sequence"),
    Column("pipeline", "1", 100_000, "stages"),
    Column("stages", "even", 0, "blocks of each stage: 12/14"),
    Column("interleave", "1", 10_000, "chunks of blocks on a rank"),
    Column("expert", "1", 100_000, "ranks that share the experts"),
    Column(
        "sharding", "of the framework", 0,
        "none, optimizer, gradients, full: what replicas divide",
    ),
    Column("micro_batch", "1", 1_000_000, "samples at once"),
    Column("batch", "", 1_000_000_000, "samples of a step, of all replicas"),
    Column("recompute", "none", 0, "none, selective, full"),
    Column("precision", "bf16", 0, "bf16, fp16, or fp8 (products of the blocks)"),
    Column(
        "overlap", "of the framework", 0,
        "what is sent beside compute: some of gathers, gradients, tensor, pipe, parted by +; "
        "or none",
    ),
    Column("offload", "none", 0, "none: others are not estimated"),
    Column(
        "memory", "allocated", 0,
        "what peak_bytes are: allocated to tensors, or device (all in use)",
    ),
    Column("step_s", "-", 0, "measured: seconds of a step"),
    Column("tokens_per_s", "-", 0, "measured, instead of step_s: of all devices together"),
    Column("peak_bytes", "-", 0, "measured: of the device that holds most"),
    Column("note", "-", 0, "read by nobody"),
)  # fmt: skip
