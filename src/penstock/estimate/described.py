"""Described: a run as one row of a table, in columns that say it whole.

What a column does not say is taken as its default, which is said; what does not go together is
refused, with its row and the reason.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from penstock.errors import EstimateError
from penstock.estimate.columns import COLUMNS
from penstock.estimate.datasheet import Datasheet
from penstock.estimate.frameworks import FRAMEWORKS, Framework
from penstock.estimate.known import find_model
from penstock.estimate.row import FAILED, Line
from penstock.estimate.sample import Sample
from penstock.estimate.stage_devices import devices_of
from penstock.estimate.table import RunTable, read_head, read_rows
from penstock.estimate.training_run import Hiding, Recompute, Sharding, TrainingRun, even
from penstock.estimate.transformer import Experts, Scores, Transformer

Value = TypeVar("Value")


_SIZES = (
    "hidden", "heads", "kv_heads", "head_size", "intermediate", "gated", "vocabulary", "tied",
    "experts", "experts_per_token", "expert_intermediate",
)  # fmt: skip
_BY_NAME = {column.name: column for column in COLUMNS}
_YES = {"yes": True, "true": True, "no": False, "false": False}
_ATTENTION: dict[str, Scores] = {
    "flash": "fused", "masked": "masked", "flash 1": "flash 1", "flash 3": "flash 3",
    "written": "written", "eager": "eager",
}  # fmt: skip
_SHARDING: dict[str, Sharding] = {
    "none": "none", "optimizer": "optimizer", "gradients": "gradients", "full": "full",
}  # fmt: skip
_RECOMPUTE: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "full"}
_KERNELS = {"fused": False, "op by op": True}
_BINARY = 1.08  # more bytes than a data sheet says, where it counts by 1,024
_PRECISION = {"bf16": 1.0, "fp16": 1.0, "fp8": 2.0}


def read(path: Path) -> RunTable:
    """Return the runs that a table describes; a run that failed (nan, inf, OOM) is left out.

    A run without a measured time has NaN seconds.
    Raises:   EstimateError: not there, no CSV, a column that is not known or that lacks, or a row
              whose cells do not go together.
    """
    head = read_head(path)
    strange = [name for name in head if name not in _BY_NAME]
    if strange:
        hint = "see docs/estimate.md for the columns; what nobody reads can stand in note"
        message = f"{path} has columns of no known name: {_short(strange)}"
        raise EstimateError(message, hint=hint)
    twice = next((name for name in head if head.count(name) > 1), None)
    if twice:
        raise EstimateError(f"{path} has two columns {twice}", hint="leave one of them out")
    sizes = () if "model" in head else ("layers", "hidden", "heads", "vocabulary", "sequence")
    missing = [name for name in (*sizes, "device", "batch") if name not in head]
    if missing:
        hint = "see docs/estimate.md for what each column says"
        raise EstimateError(f"{path} has no column {', '.join(missing)}", hint=hint)
    table = read_rows(path, "described", sample_of)
    told = ("-", "")
    taken = tuple(
        f"{column.name}: {column.default}"
        for column in COLUMNS
        if column.name not in head and column.default not in told
    )
    return table._replace(taken=taken)


def sample_of(row: Line) -> Sample | None:
    """Return the run of a row, with what was measured of it; None where it failed.

    Raises:   EstimateError: a cell is not what it must be, or cells do not go together.
    """
    if any(row.has(n) and row.text(n).lower() in FAILED for n in ("step_s", "tokens_per_s")):
        return None
    framework = _word(row, "framework", FRAMEWORKS)
    model = replace(_model(row, framework), is_op_by_op=_kernels(row, framework))
    batch = _count(row, "batch")
    degrees = _degrees(row, batch)
    stages, devices = _stages(row, model, degrees)
    micro_batch = _count(row, "micro_batch")
    parts, left = divmod(batch, degrees.data * micro_batch)
    if left:
        message = f"{row.place}: a batch of {batch} on {degrees.data} replicas in micro-batches"
        message += f" of {micro_batch}"
        raise EstimateError(message, hint="batch must be a multiple of data x micro_batch")
    run = TrainingRun(
        model,
        row.text("cluster") if row.has("cluster") else _kinds(devices),
        stages,
        devices,
        degrees.tensor,
        degrees.data,
        micro_batch,
        parts,
        expert=_count(row, "expert"),
        context=degrees.context,
        interleave=_interleave(row, model, degrees.pipe),
        recompute=_word(row, "recompute", _RECOMPUTE),
        sharding=_word(row, "sharding", _SHARDING) if row.has("sharding") else framework.sharding,
        sequence_parallel=_parallel_too(row, framework, degrees.tensor),
        gradient_bytes=framework.gradient_bytes,
        product_speed=_word(row, "precision", _PRECISION),
        overlap=_overlap(row, framework),
        fused_loss=_word(row, "loss", {"plain": False, "fused": True}),
        stops_early=framework.stops_early,
        selective=framework.selective,
        on_device=_word(row, "memory", {"allocated": False, "device": True}),
    )
    _word(row, "offload", {"none": None})
    _check_precision(row, run)
    return Sample(run, _seconds(row, run, batch), _peak_bytes(row, run))


# -- parts of a row --------------------------------------------------------------------------------


class _Degrees(NamedTuple):
    tensor: int
    data: int
    context: int
    pipe: int


def _refused(row: Line, what: str, hint: str) -> EstimateError:
    return EstimateError(f"{row.place}: {what}", hint=hint)


def _count(row: Line, name: str, default: int = 0) -> int:
    """Return a cell as a whole number, or what is taken instead."""
    column = _BY_NAME[name]
    if row.has(name):
        return row.integer(name, column.most)
    if default or column.default.isdecimal():
        return default or int(column.default)
    raise _refused(row, f"{name} is empty", f"{name}: {column.meaning}")


def _word(row: Line, name: str, choices: dict[str, Value]) -> Value:
    """Return the value of a cell's word, or of the default's."""
    text = row.text(name).lower() if row.has(name) else _BY_NAME[name].default
    if text not in choices:
        raise _refused(row, f"{name} is {text!r}", f"it can be {', '.join(choices)}")
    return choices[text]


def _model(row: Line, framework: Framework) -> Transformer:
    if row.has("model"):
        return _named(row, framework)
    hidden, heads = _count(row, "hidden"), _count(row, "heads")
    keys = _count(row, "kv_heads", heads)
    if heads % keys:
        what = f"{heads} heads share {keys} heads of keys and values"
        raise _refused(row, what, "kv_heads must divide heads")
    inner, count = _count(row, "intermediate", 4 * hidden), _count(row, "experts")
    experts = None
    alone = [n for n in ("experts_per_token", "expert_intermediate", "expert") if row.has(n)]
    if count == 1 and any(name != "expert" or _count(row, name) > 1 for name in alone):
        what = f"{alone[0]} is {row.text(alone[0])}, and the model has no experts"
        raise _refused(row, what, "say how many in experts, or leave it out")
    if count > 1:
        chosen = _count(row, "experts_per_token")
        if chosen > count:
            what = f"{chosen} experts a token of {count}"
            raise _refused(row, what, "experts_per_token is at most experts")
        experts = Experts(count, chosen, _count(row, "expert_intermediate", inner), 0, 0)
    return Transformer(
        hidden,
        _count(row, "layers"),
        heads,
        _count(row, "vocabulary"),
        _count(row, "sequence"),
        inner,
        key_heads=keys,
        head_size=_count(row, "head_size") if row.has("head_size") else 0,
        gated=_word(row, "gated", _YES),
        tied=_word(row, "tied", _YES),
        scores=_scores(row, framework),
        experts=experts,
    )


def _kernels(row: Line, framework: Framework) -> bool:
    return _word(row, "kernels", _KERNELS) if row.has("kernels") else framework.is_op_by_op


def _scores(row: Line, framework: Framework) -> Scores:
    return _word(row, "attention", _ATTENTION) if row.has("attention") else framework.scores


def _named(row: Line, framework: Framework) -> Transformer:
    """Return a model that is known, as deep and as long as the row says."""
    others = [name for name in _SIZES if row.has(name)]
    if others:
        what = f"model is {row.text('model')}, and {others[0]} is given, too"
        raise _refused(row, what, "leave one of them out; layers and sequence may stay")
    blocks, sequence = (
        _count(row, name) if row.has(name) else 0 for name in ("layers", "sequence")
    )
    model = find_model(row.text("model"), blocks=blocks, sequence=sequence)
    if not row.has("attention") and model.scores != "fused":
        return model
    return replace(model, scores=_scores(row, framework))


def _degrees(row: Line, batch: int) -> _Degrees:
    """Return the ways, whose product is the number of devices."""
    tensor, context, pipe = (_count(row, name) for name in ("tensor", "context", "pipeline"))
    others = tensor * context * pipe
    if row.has("gpus"):
        gpus = _count(row, "gpus")
        data = _count(row, "data", max(1, gpus // others))
        if data * others != gpus:
            what = f"tensor {tensor} x data {data} x context {context} x pipeline {pipe} on {gpus}"
            raise _refused(row, f"{what} GPUs", "their product must be gpus")
    else:
        data = _count(row, "data", 1)
    if batch < data:
        what = f"a batch of {batch} samples for {data} replicas"
        raise _refused(row, what, "each replica needs a sample")
    return _Degrees(tensor, data, context, pipe)


def _stages(
    row: Line, model: Transformer, degrees: _Degrees
) -> tuple[tuple[int, ...], tuple[Datasheet, ...]]:
    """Return the blocks and the device of every stage."""
    pipe = degrees.pipe
    stages = tuple(row.integers("stages")) if row.has("stages") else even(model.blocks, pipe)
    if len(stages) != pipe:
        what = f"stages are {row.text('stages')} and pipeline is {pipe}"
        raise _refused(row, what, "give as many stages as pipeline says")
    _check_divided(row, model, degrees)
    return stages, devices_of(row, pipe)


def _check_divided(row: Line, model: Transformer, degrees: _Degrees) -> None:
    """Refuse a model that the ways do not divide."""
    divided = [
        (model.heads, "heads", degrees.tensor, "tensor"),
        (model.sequence, "sequence", degrees.context, "context"),
        (model.feed_forward, "intermediate", degrees.tensor, "tensor"),
    ]
    if model.experts is not None:
        wide = model.experts.width
        divided.append((model.experts.count, "experts", _count(row, "expert"), "expert"))
        divided.append((wide, "expert_intermediate", degrees.tensor, "tensor"))
    for size, what, ways, way in divided:
        if size % ways:
            are = "are" if what.endswith("s") else "is"
            message = f"{what} {are} {size} and {way} {ways}"
            raise _refused(row, message, f"{way} must divide {what}")
    keys = model.key_heads or model.heads
    if keys % degrees.tensor and degrees.tensor % keys:
        what = f"kv_heads are {keys} and tensor {degrees.tensor}"
        raise _refused(row, what, "one of them must divide the other")


def _interleave(row: Line, model: Transformer, pipe: int) -> int:
    chunks = _count(row, "interleave")
    if chunks > 1 and (pipe == 1 or chunks * pipe > model.blocks):
        what = f"{chunks} chunks on each of {pipe} stages of {model.blocks} layers"
        raise _refused(row, what, "interleave needs a pipeline, and a layer for every chunk")
    return chunks


def _parallel_too(row: Line, framework: Framework, tensor: int) -> bool:
    if row.has("sequence_parallel"):
        return _word(row, "sequence_parallel", _YES)
    return framework.parallel_too and tensor > 1


def _overlap(row: Line, framework: Framework) -> Hiding:
    """Return the overlap of a row, or that of its framework."""
    if not row.has("overlap"):
        return framework.overlap
    words = {word.strip() for word in row.text("overlap").lower().split("+")} - {"none"}
    strange = words - set(Hiding._fields)
    if strange:
        hint = f"it can be none, or some of {', '.join(Hiding._fields)} parted by +"
        raise _refused(row, f"overlap is {row.text('overlap')!r}", hint)
    return Hiding(*(name in words for name in Hiding._fields))


def _seconds(row: Line, run: TrainingRun, batch: int) -> float:
    """Return the measured seconds; NaN where none were, and no less than the FLOP need."""
    both = [name for name in ("step_s", "tokens_per_s") if row.has(name)]
    if len(both) > 1:
        raise _refused(row, "step_s and tokens_per_s are both given", "give one of them")
    if not both:
        return math.nan
    value = cast("float", row.measured(both[0]))
    seconds = value if both[0] == "step_s" else batch * run.model.sequence / value
    least = run.model.flop_per_token * batch * run.model.sequence
    least /= sum(d.peak_flop_per_s for d in run.devices) * run.product_speed
    least /= run.ranks / run.pipe
    if seconds < least:
        what = f"{both[0]} is {row.text(both[0])}, and at peak its FLOP take {least:.3g} s"
        raise _refused(row, what, "is it in seconds, and of a whole step?")
    return seconds


def _kinds(devices: tuple[Datasheet, ...]) -> str:
    return "/".join(dict.fromkeys(device.name for device in devices))


def _check_precision(row: Line, run: TrainingRun) -> None:
    """Refuse products of 8 bits on a device that has none."""
    for device in run.devices if run.product_speed > 1 else ():
        if not device.has_eight_bits:
            what = f"precision is {row.text('precision')}, and {device.name} has no such products"
            raise _refused(row, what, "say bf16 or fp16")


def _peak_bytes(row: Line, run: TrainingRun) -> float | None:
    """Return the measured bytes: at most what a device has, at least its part of the weights."""
    peak = row.measured("peak_bytes") if row.has("peak_bytes") else None
    if peak is None:
        return None
    most = max(device.memory_bytes for device in run.devices) * _BINARY
    if peak > most:
        what = f"peak_bytes is {row.text('peak_bytes')}, and a device has {most:.3g}"
        raise _refused(row, what, "is it that of one device?")
    least = 2 * run.model.parameters / run.ranks
    if peak < least:
        what = f"peak_bytes is {row.text('peak_bytes')}, and its part of the weights {least:.3g}"
        raise _refused(row, what, "is it in bytes?")
    return peak


def _short(names: list[str]) -> str:
    text = ", ".join(names)
    return text if len(text) <= 80 else text[:77] + "..."
