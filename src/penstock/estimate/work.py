"""Work: FLOP and bytes of one stage for one micro-batch, and of a rank once a step.

Seconds are at peak rates of the datasheet, with no overlap; kernels and messages are counted.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

from penstock.estimate.either import among, ever, most, where
from penstock.estimate.link_rates import (
    LinkSeconds,
    alike_around,
    all_reduce_s,
    exchange_s,
    gather_s,
    neighbour_s,
    slowest_of,
)
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.transformer import Matrix, Scores, Transformer
from penstock.estimate.unlike import beside_mean

Lane: TypeAlias = Literal["device", "host", "wire"]
Work: TypeAlias = "defaultdict[tuple[Lane, str], float]"

LANES: tuple[Lane, ...] = ("device", "host", "wire")
TIME_TERMS = (
    "products",  # s: FLOP of products / peak
    "attention",  # s: FLOP of attention itself / peak
    "bytes",  # s: bytes that kernels between the products read and write / bandwidth
    "inside",  # s: bytes sent between devices of a host / link
    "across",  # s: bytes sent between hosts / link
    "launches",  # kernels launched
    "hops",  # hops of collectives that the device waits for
    "step",  # 1 a step
)
# Bytes of a score that are written and read on the way forward, and back: with a fused softmax;
# and where scale, mask, softmax in 32 bits and dropout are kernels of their own.
_SCORE_BYTES = (13, 16)
_EAGER_BYTES = {"written": (29, 58), "eager": (29, 58), "eager in 32 bits": (42, 84)}
_GROUPED = 1.25  # slower, products of experts: groups of unlike size in one kernel
_FLASH_TIMES = {
    "flash 1": 2.0,  # slower than its second version, arXiv:2307.08691
    "masked": 2.0,  # all pairs, not those that may see each other
}
_BEFORE_HOPPER = 1.6  # slower on Hopper than its own kernels: 1.5 to 2 forward, arXiv:2407.08608
_LOSS_BYTES = 48, 20  # of a logit, forward and backward: op by op in 32 bits, and in one kernel
_CAST_BYTES = 4  # of a number that goes into a product of 8 bits: read, and written twice
_BLOCK_LAUNCHES = 24  # forward, fused norms, bias and dropout; twice as many backward
_EAGER_LAUNCHES = (
    10  # more, forward, where scale, mask, softmax and dropout are kernels of their own
)
_EXPERT_LAUNCHES = 60  # routing, permutation, one product per expert in a group
_HEAD_LAUNCHES = 40  # head and loss, forward and backward
_EMBEDDING_LAUNCHES = 12


class _Separate(NamedTuple):
    """What operators that are kernels of their own do, forward and backward, as torch traces them.

    Of a block: bytes of a number between blocks, of one of keys and values, of one of the
    feed-forward, of a token that is masked; kernels.  Outside: bytes of a number of the first and
    the last block; kernels.
    """

    of_hidden: int
    of_key: int
    of_inner: int
    of_token: int
    launches: int
    of_ends: int
    launches_outside: int


# Where there is a gate, llama of Hugging Face; else a block of LayerNorm and GELU.
_GATED = _Separate(283, 129, 29, 3, 112, 155, 66)
_GATED_SHARED = _Separate(371, 64, 29, 3, 117, 155, 66)  # several heads share keys
_PLAIN = _Separate(78, 0, 12, 0, 30, 35, 18)
_SEPARATE_LOSS_BYTES = 28  # of a logit
# Of a number of the table, whose gradient is written whole; and where it is the head too, to whose
# gradient that is added.
_TABLE_BYTES = 2, 8
_ENGINE_LAUNCHES = 60  # of a stage for each micro-batch: buffers, messages and their events
_WORD = 2  # bytes of a number that is sent or kept, in mixed precision
_UPDATE_BYTES = 34  # read and written of a number by Adam in mixed precision
# Op by op, weights are in 32 bits alone, and cast where they are read: bytes of the update, its
# kernels, and bytes of adding a gradient.
_SEPARATE_UPDATE_BYTES = 28
_UPDATE_LAUNCHES = 12
_ADDED_BYTES = 12


def stage_work(run: TrainingRun, at: int, *, messages: bool = True) -> Work:
    """Return the work of stage `at` for one micro-batch, forward and backward.

    messages   to the next stage and back are part of it

    Products: 2 FLOP a token and number of the matrix forward, twice that backward, forward
    again under full recompute.
    Ignores:  experts that get more tokens than others; the shapes of products.
    """
    work: Work = defaultdict(float)
    for block, count in block_kinds(run, at):
        _add(work, _block(run, at, block), count)
    if at == 0:
        _add(work, _embedding(run, at))
    if at == run.pipe - 1:
        _add(work, _head(run, at))
    if run.pipe > 1 and messages:
        _add(work, _pipe_messages(run, at))
    _add(work, _gathers(run, at))
    shares = beside_mean(run.devices, at)
    for lane, name in work:
        work[lane, name] *= shares.get(name, 1.0)
    return work


def _pipe_messages(run: TrainingRun, at: int) -> Work:
    """Return a message to a neighbour and one back, for each chunk.

    Sent beside compute they are waited for all the same under 1F1B: stage s has S - s micro-batches
    in flight, the last of which is back only after all messages on the way, so that the first
    stage waits for (S - 1) / S of both, and the last one for none.  Chunks of a rank have as many
    more in flight as hide them.
    """
    work: Work = defaultdict(float)
    sent = neighbour_s(run, at, _WORD * run.tokens * run.model.hidden)
    waited = hidden = 2.0 * run.interleave
    if run.overlap.pipe:
        behind = (run.pipe - 1) / run.pipe if at < run.pipe - 1 else 0.0
        waited = where(run.interleave > 1, 0.0, behind * waited)
    _send(work, "device", sent, waited)
    _send(work, "wire", sent, hidden if run.overlap.pipe else 0.0)
    work["host", "launches"] += _ENGINE_LAUNCHES * run.interleave
    return work


def _gathers(run: TrainingRun, at: int) -> Work:
    """Return the gathers of sharded weights, and the scatters of their gradients."""
    work: Work = defaultdict(float)
    is_gathered = among(run.sharding, ("gradients", "full"))
    if ever(is_gathered):
        gathers = where(run.sharding == "full", 2, 1)
        own = sum(stage_parameters(run, at))
        sent = where(is_gathered, own * (gathers * _WORD + run.gradient_bytes), 0.0)
        _send(work, "wire" if run.overlap.gathers else "device", gather_s(run, at, sent))
    return work


def _add(work: Work, more: Mapping[tuple[Lane, str], float], times: int = 1) -> None:
    for key, value in more.items():
        work[key] += times * value


def _send(work: Work, lane: Lane, sent: LinkSeconds, times: float = 1) -> None:
    work[lane, "inside"] += times * sent.inside_s
    work[lane, "across"] += times * sent.across_s


def block_kinds(run: TrainingRun, at: int) -> Iterator[tuple[int, int]]:
    """Yield a block of each kind that stage `at` has, with how many are like it."""
    first = sum(run.stage_blocks[:at])
    end = first + run.stage_blocks[at]
    experts = run.model.experts
    turn = end if experts is None else min(max(first, experts.dense_blocks), end)
    if turn > first:
        yield first, turn - first
    if end > turn:
        yield turn, end - turn


def is_mixed(run: TrainingRun, block: int) -> bool:
    """Return whether a block has experts."""
    return run.model.experts is not None and block >= run.model.experts.dense_blocks


def _block(run: TrainingRun, at: int, block: int) -> Work:
    work: Work = defaultdict(float)
    device = run.devices[at]
    some = where(run.recompute == "selective", run.selective, 0.0)
    again = (run.recompute == "full") | (some > 0)
    matrices = run.model.block(block)
    for at_matrix, matrix in enumerate(matrices):
        is_last = at_matrix == len(matrices) - 1 and run.stops_early
        repeated = where(run.recompute == "full", 0.0 if is_last else 1.0, some)
        passes = 3 + repeated
        seconds = _product_flop(run, matrix) / device.peak_flop_per_s
        work["device", "products"] += passes * seconds
        work["device", "bytes"] += passes * _operand_bytes(run, matrix) / device.bytes_per_s
    moved = (3 + again) * _kernel_bytes(run, block)
    work["device", "bytes"] += moved / device.bytes_per_s
    work["host", "launches"] += (3 + again) * _launches(run, block)
    _add(work, _attention(run, at))
    _add(work, _block_messages(run, at, block))
    return work


def _block_messages(run: TrainingRun, at: int, block: int) -> Work:
    """Return two sums forward and two backward, and the bytes that go to experts and back."""
    work: Work = defaultdict(float)
    sent = _WORD * run.tokens * run.model.hidden
    messages = 4 + 2 * (run.recompute == "full")
    if ever(run.tensor > 1):
        _add(work, _tensor_sum(run, at, sent, times=messages))
        work["host", "launches"] += where(run.tensor > 1, 2 * messages, 0)
    if ever(run.expert > 1) and run.model.experts is not None and is_mixed(run, block):
        chosen = sent * run.model.experts.chosen / where(run.sequence_parallel, run.tensor, 1)
        _send(work, "device", exchange_s(run, at, chosen), messages)
        work["device", "hops"] += messages * 2 * (run.expert - 1)
    return work


def _tensor_sum(run: TrainingRun, at: int, size_bytes: float, *, times: int) -> Work:
    """Return sums over the tensor ranks: bytes, and 2 * (n - 1) hops each."""
    work: Work = defaultdict(float)
    lane: Lane = "wire" if run.overlap.tensor else "device"
    _send(work, lane, all_reduce_s(run, at, size_bytes, axis="tensor"), times)
    work[lane, "hops"] += times * 2 * (run.tensor - 1)
    return work


def _product_flop(run: TrainingRun, matrix: Matrix) -> float:
    """Return the FLOP of a product on one rank, forward, those in 8 bits as half."""
    flop = 2 * run.tokens * matrix.inputs * matrix.outputs / run.product_speed
    match matrix.split:
        case "tensor":
            return flop / run.tensor
        case "copied":
            return flop / where(run.sequence_parallel, run.tensor, 1)
        case "expert":
            chosen = run.model.experts.chosen if run.model.experts else 1
            return _GROUPED * flop * chosen / run.tensor


def _operand_bytes(run: TrainingRun, matrix: Matrix) -> float:
    """Return the bytes that a product reads and writes on one rank, which its FLOP do not hide.

    Tensor ranks divide one side of what is not the weight, and the weight.  Where queries, keys and
    values, or the feed-forward and its gate, are products of their own, each reads its inputs.
    """
    hidden = run.model.hidden
    other = matrix.outputs if matrix.inputs == hidden else matrix.inputs
    times = matrix.parts if run.model.is_op_by_op else 1
    word = _WORD / run.product_speed
    match matrix.split:
        case "tensor":
            numbers = run.tokens * (times * hidden + other / run.tensor)
            return word * (numbers + matrix.inputs * matrix.outputs / run.tensor)
        case "copied":
            split = where(run.sequence_parallel, run.tensor, 1)
            numbers = run.tokens * (matrix.inputs + matrix.outputs) / split
            return word * (numbers + matrix.inputs * matrix.outputs)
        case "expert":
            chosen, count = 1, 1
            if run.model.experts:
                chosen, count = run.model.experts.chosen, run.model.experts.count
            numbers = run.tokens * chosen * (matrix.inputs + matrix.outputs) / run.tensor
            return word * (numbers + matrix.inputs * matrix.outputs * count / run.expert)


def _attention(run: TrainingRun, at: int) -> Work:
    """Return attention itself: scores, softmax, and the sum of the values.

    Fused attention computes only pairs that may see each other, and the scores again backward.
    """
    work: Work = defaultdict(float)
    model, device = run.model, run.devices[at]
    rotary = model.latent.rotary if model.latent else 0
    pairs = run.tokens * model.sequence * model.heads / run.tensor
    flop = 2 * pairs * (2 * model.per_head + rotary)
    again = run.recompute != "none"
    if model.is_flash:
        flop *= (1 + again + 2.5) / 2 * flash_times(model.scores, is_hopper=device.is_hopper)
    else:
        flop *= 1 + again + 2
        is_eager = _is_eager(run)
        forward, backward = (
            where(is_eager, eager, fused)
            for eager, fused in zip(_EAGER_BYTES[model.scores], _SCORE_BYTES, strict=True)
        )
        moved = pairs * ((1 + again) * forward + backward)
        work["device", "bytes"] += moved / device.bytes_per_s
    work["device", "attention"] += flop / device.peak_flop_per_s
    if ever(run.context > 1):
        keys = 2 * (model.key_heads or model.heads) * model.per_head * _WORD / run.tensor
        sent = run.tokens * (run.context - 1) * keys
        work["wire", "inside"] += (2 + again) * sent / device.inside_bytes_per_s
    return work


def flash_times(scores: Scores, *, is_hopper: bool) -> float:
    """Return the times that fused attention takes as long as the best kernels of a device."""
    is_older = is_hopper and scores != "flash 3"
    return _FLASH_TIMES.get(scores, 1.0) * (_BEFORE_HOPPER if is_older else 1.0)


def _kernel_bytes(run: TrainingRun, block: int) -> float:
    """Return the bytes that kernels between the products read and write, forward.

    Two norms and two sums with dropout: 22 a number; a gate or GELU: 6 or 4 a number of the
    feed-forward; rotation or bias of queries, keys and values: 4 each; into the order of the
    experts and back: 16 a number that an expert sees; casts of what products in 8 bits read.
    """
    model, experts = run.model, run.model.experts
    if model.is_op_by_op and not is_mixed(run, block):
        return _separate_bytes(run)
    between = 22 * model.hidden / where(run.sequence_parallel, run.tensor, 1)
    inside = 12 * model.heads * model.per_head
    gate = model.gate_traffic
    if experts is not None and is_mixed(run, block):
        wide = experts.chosen * experts.width + experts.shared_width
        inside += gate * wide + 16 * experts.chosen * model.hidden
    else:
        wide = model.feed_forward
        inside += gate * wide
    if run.product_speed > 1:
        inside += _CAST_BYTES * (2 * model.hidden + 2 * wide)
    return run.tokens * (between + inside / run.tensor)


def _separate_bytes(run: TrainingRun) -> float:
    """Return the bytes between the products where each operator is a kernel, forward: a third."""
    model, each = run.model, _separate(run.model)
    keys = (model.key_heads or model.heads) * model.per_head
    between = each.of_hidden * model.hidden / where(run.sequence_parallel, run.tensor, 1)
    inside = each.of_key * keys + each.of_inner * model.feed_forward
    return run.tokens * (between + inside / run.tensor + each.of_token * model.sequence) / 3


def _separate(model: Transformer) -> _Separate:
    if not model.gated:
        return _PLAIN
    return _GATED_SHARED if 0 < model.key_heads < model.heads else _GATED


def _launches(run: TrainingRun, block: int) -> float:
    """Return the kernels of a block, forward."""
    if run.model.is_op_by_op and not is_mixed(run, block):
        return _separate(run.model).launches / 3
    more = where(_is_eager(run), _EAGER_LAUNCHES, 0) if not run.model.is_flash else 0
    return _BLOCK_LAUNCHES + more + (_EXPERT_LAUNCHES if is_mixed(run, block) else 0)


def _is_eager(run: TrainingRun) -> bool:
    """Return whether scale, mask, softmax and dropout are kernels of their own.

    Megatron's fused softmax needs the heads of a rank times its samples to be a multiple of 4.
    Source:   github.com/NVIDIA/Megatron-LM, fused_softmax.py.
    """
    is_uneven = run.micro_batch * run.model.heads // run.tensor % 4 != 0
    return is_uneven | (run.model.scores != "written")


def _embedding(run: TrainingRun, at: int) -> Work:
    work: Work = defaultdict(float)
    model, sent = run.model, _WORD * run.tokens * run.model.hidden
    moved = 10 * sent
    if model.is_op_by_op:  # the gradient of the whole table is written for each micro-batch
        table = _TABLE_BYTES[model.tied] * model.head_matrix / run.tensor
        moved = run.tokens * model.hidden * _separate(model).of_ends + table
    work["device", "bytes"] += moved / run.devices[at].bytes_per_s
    launches = _separate(model).launches_outside // 2 if model.is_op_by_op else _EMBEDDING_LAUNCHES
    work["host", "launches"] += launches
    if ever(run.tensor > 1):
        _add(work, _tensor_sum(run, at, sent, times=1))
    return work


def _head(run: TrainingRun, at: int) -> Work:
    """Return the head and the loss: products, and the bytes of logits that are read and written."""
    work: Work = defaultdict(float)
    model, device = run.model, run.devices[at]
    flop = 6 * run.tokens * model.head_matrix / run.tensor
    work["device", "products"] += flop / device.peak_flop_per_s
    logits = run.tokens * model.vocabulary / run.tensor
    of_logit = _LOSS_BYTES[run.fused_loss]
    moved, launches = of_logit * logits, _HEAD_LAUNCHES
    if model.is_op_by_op:
        operands = model.hidden * (run.tokens + model.vocabulary / run.tensor) + logits
        moved = _SEPARATE_LOSS_BYTES * logits + 3 * _WORD * operands
        launches = _separate(model).launches_outside // 2
    work["device", "bytes"] += moved / device.bytes_per_s
    work["host", "launches"] += launches
    if ever(run.tensor > 1):
        _add(work, _tensor_sum(run, at, _WORD * run.tokens * model.hidden, times=1))
    return work


def stage_parameters(run: TrainingRun, at: int) -> tuple[float, float]:
    """Return the numbers of stage `at` that one rank holds: those of all, and those of experts.

    Tensor ranks divide what is cut, ranks of `expert` the experts.  A tied head on another
    stage than the embedding is a copy.
    """
    model = run.model
    own = experts = 0.0
    for block, blocks in block_kinds(run, at):
        for matrix in model.block(block):
            size = blocks * matrix.inputs * matrix.outputs
            match matrix.split:
                case "tensor":
                    own += size / run.tensor
                case "copied":
                    own += size
                case "expert":
                    count = model.experts.count if model.experts else 1
                    experts += size * count / run.expert
    if at == 0:
        own += model.head_matrix / run.tensor + model.positions * model.hidden
    if at == run.pipe - 1 and not (model.tied and at == 0):
        own += model.head_matrix / run.tensor
    return own, experts


def stage_keys(run: TrainingRun) -> list[tuple[object, ...]]:
    """Return a key of every stage's work: stages with the same key are alike.

    Of unlike devices those at a turn from one kind to another have other links.
    """
    last, mixed = run.pipe - 1, run.model.experts is not None
    keys: list[tuple[object, ...]] = []
    for at, (blocks, device) in enumerate(zip(run.stage_blocks, run.devices, strict=True)):
        kinds = [(is_mixed(run, b), count) for b, count in block_kinds(run, at)] if mixed else ()
        edges = alike_around(run, at)
        keys.append((blocks, device, at == 0, at == last, edges, *kinds))
    return keys


def distinct_stages(run: TrainingRun) -> list[tuple[int, int]]:
    """Return stages that differ, each with the number of stages like it."""
    found: dict[tuple[object, ...], tuple[int, int]] = {}
    for at, key in enumerate(stage_keys(run)):
        first, count = found.get(key, (at, 0))
        found[key] = (first, count + 1)
    return list(found.values())


def once_a_step(run: TrainingRun) -> dict[str, float]:
    """Return the work of the slowest rank once a step, beside sums of gradients: optimizer.

    Op by op, also that of adding the gradients of each micro-batch, which no other kernel does.
    """
    replicas = run.data * run.context
    copies = most(1, replicas * run.tensor // run.expert)
    update_s, separate = 0.0, run.model.is_op_by_op
    for at, _ in distinct_stages(run):
        own, experts = stage_parameters(run, at)
        held = where(run.sharding == "none", own + experts, own / replicas + experts / copies)
        share = beside_mean(run.devices, at).get("bytes", 1.0)
        moved = held * (_SEPARATE_UPDATE_BYTES if separate else _UPDATE_BYTES)
        if separate:
            moved += _ADDED_BYTES * run.num_micro_batches * (own + experts)
        update_s = most(update_s, share * moved / run.devices[at].bytes_per_s)
    return {"bytes": update_s, "step": 1.0, "launches": _UPDATE_LAUNCHES if separate else 0.0}


def sums(run: TrainingRun) -> dict[str, float]:
    """Return the work of summing gradients once a step, of the stage that takes longest.

    A distributed optimizer scatters gradients and gathers weights instead.
    """
    is_summed, ways = among(run.sharding, ("none", "optimizer")), list[LinkSeconds]()
    for at, _ in distinct_stages(run):
        own, _ = stage_parameters(run, at)
        scattered = own * (run.gradient_bytes + _WORD) / 2
        sent = where(run.sharding == "optimizer", scattered, own * run.gradient_bytes)
        ways.append(all_reduce_s(run, at, where(is_summed, sent, 0.0), axis="data"))
    found = slowest_of(ways)
    return {"inside": found.inside_s, "across": found.across_s}
