"""Layouts: how a row of each published set becomes a described run, and what the file omits.

What a file does not say is set as those who measured set it; each function says so.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from penstock.errors import EstimateError
from penstock.estimate.datasheet import find_device
from penstock.estimate.known import find_model
from penstock.estimate.row import Line
from penstock.estimate.sample import Sample
from penstock.estimate.table import RunTable, read_head, read_rows
from penstock.estimate.training_run import Recompute, Sharding, TrainingRun, even
from penstock.estimate.transformer import gpt
from penstock.units import GiB

_VTRAIN = """\
# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,
tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"""
_SAILOR = """\
set,model,gpus_by_stage,pp,tp,dp,mbs,gbs,layers_per_stage,real_iter_s,max_mem_bytes,N_nodes"""
_MOSAIC = """\
model,seq_len,gpus,gpu,mbs,grad_accum,gbs_tokens,tokens_s,precision,mp_mode,sharding,act_ckpt"""


Build = Callable[[Line], Sample | None]


def _check_counts(row: Line, run: TrainingRun, *, batch: int, gpus: int = 0, pipe: int = 0) -> None:
    """Refuse a row whose numbers do not go together.

    Raises:   EstimateError: devices are not the product of the degrees, stages are not as many as
              the pipeline, or replicas are more than samples.
    """
    if gpus and run.ranks != gpus:
        message = f"{row.place}: degrees of {run.ranks} ranks on {gpus} GPUs"
        raise EstimateError(message, hint="tensor x data x pipeline must be the GPUs")
    if pipe and run.pipe != pipe:
        message = f"{row.place}: a pipeline of {pipe} stages, and blocks of {run.pipe}"
        raise EstimateError(message, hint="give the blocks of every stage")
    if batch < run.data:
        message = f"{row.place}: a batch of {batch} samples for {run.data} replicas"
        raise EstimateError(message, hint="each replica needs a sample")


def _parts(batch: int, micro_batch: int, data: int) -> int:
    """Return the micro-batches of the replica that has most."""
    return -(-batch // (micro_batch * data))


def _vtrain(row: Line) -> Sample | None:
    """vTrain: GPT in Megatron-DeepSpeed on A100-80 hosts with 800 Gb/s, full recompute.

    Source:   github.com/VIA-Research/vTrain (set-up); vocabulary 51,200.
    """
    milliseconds = row.measured("iteration time (ms)")
    if milliseconds is None:
        return None
    sequence = row.integer("sequence length")
    model = gpt(
        row.integer("hidden size"), row.integer("# layers"), row.integer("attention heads"),
        sequence=sequence, vocabulary=51200,
    )  # fmt: skip
    pipe, data = row.integer("pipeline parallelism"), row.integer("data parallelism")
    micro_batch, ranks = row.integer("micro batch"), row.integer("# GPUs")
    device = replace(find_device("a100-80"), across_bytes_per_s=12.5e9)
    run = TrainingRun(
        model,
        "vtrain one host" if ranks <= device.ranks_per_host else "vtrain",
        even(model.blocks, pipe),
        (device,) * pipe,
        row.integer("tensor parallelism"),
        data,
        micro_batch,
        _parts(row.integer("global batch"), micro_batch, data),
        recompute="full",
        gradient_bytes=2,
    )
    _check_counts(row, run, batch=row.integer("global batch"), gpus=ranks)
    return Sample(run, milliseconds / 1e3, None)


def _megatron(row: Line) -> Sample | None:
    """Megatron-LM's table: A100-80 (H100 if the source says so), full recompute.

    Sequence 2,048, vocabulary 51,200.  Seconds are from TFLOP/s by its formula,
    96 B s l h^2 (1 + s / 6h + V / 16lh).  Micro-batch and interleaving are not given: taken as 1
    and none with pipelines, as the most up to 16 that leaves 4 micro-batches without.
    """
    tflops = row.measured("tflops_gpu")
    if tflops is None:
        return None
    hidden, blocks = row.integer("hidden"), row.integer("layers")
    model = gpt(hidden, blocks, row.integer("heads"), sequence=2048, vocabulary=51200)
    batch, pipe, data = row.integer("batch"), row.integer("pp"), row.integer("dp")
    size, parts = _unsaid(batch, data, pipe)
    device = find_device("h100" if "H100" in row.cells.get("source", "") else "a100-80")
    run = TrainingRun(
        model, "megatron", even(blocks, pipe), (device,) * pipe,
        row.integer("tp"), data, size, parts,
        recompute="full", gradient_bytes=2,
    )  # fmt: skip
    _check_counts(row, run, batch=batch, gpus=row.integer("gpus"))
    flop = 96 * batch * 2048 * blocks * hidden**2
    flop *= 1 + 2048 / (6 * hidden) + 51200 / (16 * blocks * hidden)
    return Sample(run, flop / (tflops * 1e12 * row.integer("gpus")), None)


def _unsaid(batch: int, data: int, pipe: int) -> tuple[int, int]:
    """Return a micro-batch that was probably taken, and how many of them."""
    for size in (16, 8, 4, 2) if pipe == 1 else ():
        if batch % (data * size) == 0 and batch // (data * size) >= 4:
            return size, batch // (data * size)
    return 1, _parts(batch, 1, data)


def _simumax(row: Line) -> Sample | None:
    """SimuMax: 8 B200, Megatron-LM 0.14, bf16, micro-batch 1, distributed optimizer.

    Slices of models, without recompute unless the case says so; what `parallel` does not say
    is 1, `dp` what is left of 8 GPUs, the sequence 4,096 unless the case says so.
    """
    milliseconds = row.measured("real_ms")
    if milliseconds is None:
        return None
    degrees, case = _degrees(row), row.text("case")
    length = re.search(r"_seq([1-9][0-9]*)", case)
    model = find_model(
        row.text("model"),
        blocks=row.integer("layer_num"),
        sequence=int(length[1]) if length else 4096,
    )
    model = replace(model, scores="flash 3")  # Transformer Engine takes cuDNN's
    recompute: Recompute = "none"
    if "recompute" in case:
        recompute = "selective" if "selective" in case else "full"
    pipe = degrees["pp"]
    run = TrainingRun(
        model,
        "simumax",
        even(model.blocks, pipe),
        (find_device("b200"),) * pipe,
        degrees["tp"],
        max(1, 8 // (degrees["tp"] * degrees["cp"] * pipe)),
        1,
        row.integer("mbc"),
        expert=degrees["ep"],
        context=degrees["cp"],
        interleave=degrees["vp"],
        recompute=recompute,
        sharding="optimizer",
        sequence_parallel=True,
        fused_loss=True,
    )
    gibibytes = row.measured("real_alloc_gib")
    return Sample(run, milliseconds / 1e3, None if gibibytes is None else gibibytes * GiB)


def _degrees(row: Line) -> dict[str, int]:
    """Return the degrees in a text like "tp2cp4pp1"; vp are chunks of a rank."""
    text, found = row.text("parallel"), dict.fromkeys(("tp", "cp", "ep", "pp", "dp", "vp"), 1)
    parts = re.findall(r"([a-z]+)([1-9][0-9]*)", text)
    if "".join(name + size for name, size in parts) != text or {n for n, _ in parts} - set(found):
        message = f"{row.place}: parallel is {text!r}, not like tp2pp1"
        raise EstimateError(message, hint=f"{', '.join(found)} can stand there, with a number")
    return found | {name: int(size) for name, size in parts}


# What is known of clusters and stands in no file: PCIe 3 and 100 Mb/s; a third of what the
# activations alone would take was measured, so they are repeated.
_NETWORKS = {"mit": {"inside_bytes_per_s": 12e9, "across_bytes_per_s": 12.5e6}}
_REPEATED: dict[str, Recompute] = {"mit": "full"}


def _sailor(row: Line) -> Sample | None:
    """Sailor: OPT-350M and GPT-Neo 2.7B in Megatron-DeepSpeed, 16 bits, no recompute, 24 bytes of
    states a parameter (2 weight, 4 gradient, 18 optimizer with its flat copies).

    `layers_per_stage` counts embedding and head as a layer each.  Where its sum is not that of
    the model named but that of the other one, the other one ran.
    """
    seconds = row.measured("real_iter_s")
    if seconds is None:
        return None
    layers = row.integers("layers_per_stage")
    layers[0] -= 1
    layers[-1] -= 1
    named = find_model(row.text("model"))
    ran = [m for m in map(find_model, ("opt-350", "gpt-neo")) if m.blocks == sum(layers)]
    model = replace(ran[0] if ran else named, blocks=sum(layers))
    data, micro_batch = row.integer("dp"), row.integer("mbs")
    tensor, pipe = row.integer("tp"), row.integer("pp")
    hosts = row.integer("N_nodes")
    per_host = max(1, tensor * data * pipe // hosts)
    network = _NETWORKS.get(row.text("set"), {})
    devices = [
        replace(d, ranks_per_host=per_host, **network)
        for d in map(find_device, row.text("gpus_by_stage").split("/"))
    ]
    run = TrainingRun(
        model, row.text("set"), tuple(layers), tuple(devices), tensor, data, micro_batch,
        _parts(row.integer("gbs"), micro_batch, data), optimizer_bytes=18,
        recompute=_REPEATED.get(row.text("set"), "none"), on_device=True,
    )  # fmt: skip
    _check_counts(row, run, batch=row.integer("gbs"), pipe=pipe)
    return Sample(run, seconds, row.measured("max_mem_bytes"))


_SHARDING: dict[str, Sharding] = {
    "FULL_SHARD": "full",
    "SHARD_GRAD_OP": "gradients",
    "NO_SHARD": "none",
}


def _sharding(row: Line) -> Sharding:
    """Return what replicas divide.

    Raises:   EstimateError: the cell is none of the words.
    """
    text = row.text("sharding")
    if text not in _SHARDING:
        hint = f"it can be {', '.join(_SHARDING)}"
        raise EstimateError(f"{row.place}: sharding is {text!r}", hint=hint)
    return _SHARDING[text]


def _mosaic(row: Line) -> Sample | None:
    """MosaicML's llm-foundry: MPT under FSDP, one replica a rank, fused attention.

    In fp8 the products of the blocks take half their time, nothing else.
    """
    rate = row.measured("tokens_s")
    if rate is None:
        return None
    model = find_model(f"mpt-{row.text('model')}", sequence=row.integer("seq_len"))
    device = find_device(row.text("gpu"))
    run = TrainingRun(
        model,
        f"mosaic {device.name}",
        (model.blocks,),
        (device,),
        1,
        row.integer("gpus"),
        row.integer("mbs"),
        row.integer("grad_accum"),
        recompute="full" if row.text("act_ckpt").lower() == "true" else "none",
        sharding=_sharding(row),
        gradient_bytes=2 if row.text("mp_mode") == "PURE" else 4,
        stops_early=True,
        product_speed=2.0 if row.text("precision").endswith("fp8") else 1.0,
    )
    return Sample(run, row.number("gbs_tokens") / rate, None)


class Layout(NamedTuple):
    """Columns that a file must have, and how a row of it becomes a sample."""

    name: str
    columns: frozenset[str]
    build: Build


def _layout(name: str, columns: str, build: Build) -> Layout:
    return Layout(name, frozenset(columns.replace("\n", "").split(",")), build)


LAYOUTS = (
    _layout("vtrain", _VTRAIN, _vtrain),
    _layout("megatron", "heads,hidden,layers,tp,pp,dp,gpus,batch,tflops_gpu", _megatron),
    _layout("simumax", "case,model,parallel,layer_num,mbc,real_ms,real_alloc_gib", _simumax),
    _layout("sailor", _SAILOR, _sailor),
    _layout("mosaic", _MOSAIC, _mosaic),
)


def read(path: Path) -> RunTable:
    """Return the rows of a published file, whose layout its columns tell.

    Raises:   EstimateError: columns of no known layout, or what `read_rows` refuses.
    """
    head = set(read_head(path))
    layout = next((layout for layout in LAYOUTS if layout.columns <= head), None)
    if layout is None:
        hint = f"known: {', '.join(layout.name for layout in LAYOUTS)}"
        raise EstimateError(f"{path} has columns of no known layout", hint=hint)
    return read_rows(path, layout.name, layout.build)
