"""Measure: run the traced step op by op, and note how long each op takes.

Ops run in place, on real data, each after the one before it, so caches are as warm as they
will be.  On CPU the clock is the thread's own time: what other processes take from the core
does not count.  On a device that queues the clock are marks on its stream (marks.py); what a whole
F or B takes beyond its ops is then what it costs to begin one, alike for all.  What *other ranks*
cost (shared caches, memory, hyper-threads) does: as many
companions as there will be other ranks run the same step beside the measured one.
"""

import multiprocessing
import platform
import signal
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from penstock import _compat
from penstock.batches.reads import started
from penstock.cluster.machine import free_bytes
from penstock.device import CPU, here
from penstock.far import FarMemory, as_bytes
from penstock.graph.code import callable_of, function_of, reseed
from penstock.graph.codec import TensorForm, packer, unpacker
from penstock.graph.cut import cut
from penstock.graph.hollow import stand_ins
from penstock.graph.parts import key_in
from penstock.graph.stages import Stages
from penstock.graph.trace import Capture, on_device
from penstock.graph.waiting import COPIES, bytes_of, waits
from penstock.graph.whole_optimizer import Loan, WholeOptimizer, whole_optimizer
from penstock.graph.wire import wire_choices
from penstock.heap import give_back, keep_freed_memory
from penstock.job import Job
from penstock.profile.by_kind import costs_by_kind
from penstock.profile.expert_load import ExpertLoad
from penstock.profile.marks import OPS_AHEAD, Sweep, clock_of
from penstock.profile.profile import CopyCost, PackCost, Profile, ProfileBasis, UpdateCost
from penstock.profile.routing import as_busiest, expert_loads

T = TypeVar("T")
_WARM_UPS = 2
_MIN_RUNS = 5
_FAR_BYTES, _FAR_BLOCKS = 1 << 26, 16  # more than caches hold, as what a step moves
_FAR_SMALL = 256, 256  # tensors that are moved to know what each costs, and bytes of one
_COPIED_BYTES = 1 << 28  # on a device, of weights that are copied
_PACKED_ROWS = (1, 1024)  # of 256 numbers
_LEAST_PART = 256  # of the memory of an accelerator
_BUDGET_S = 2.0  # for the op-by-op runs
Apart = Callable[[Callable[[], Any]], Any]


def _here(call: Callable[[], Any]) -> Any:
    return call()


def measure(capture: Capture, job: Job, *, beside: int = 0, apart: Apart = _here) -> Profile:
    """Return the profile of one micro-batch on this machine, one thread.

    beside:   other ranks that will compute at the same time on this host.
    apart:    returns what a call does, in a process whose state nobody sees later: updates of an
              optimizer that is not torch's own, as it is, are measured there.
    Ignores:  what messages cost (that is the Cluster's) and reading the data.
    """
    keep_freed_memory()  # as ranks do
    stages, is_whole = cut(capture.graph), not waits(capture.model)
    inputs, workspace_bytes = inputs_of(capture, job) if is_whole else {}, tuple[int, ...]()
    loads = expert_loads(capture, job) if is_whole else ()
    try:
        with _companions(capture, stages, inputs, beside), torch.no_grad():
            if is_whole:
                op_s, call_s = _in_place(capture, stages, inputs, loads)
            else:
                (op_s, workspace_bytes), call_s = costs_by_kind(capture, clock_of(here())), 0.0
            optimizer = optimizer_costs(capture, job, apart)
            size = most_far_bytes(capture, job, optimizer["state_bytes_per_byte"])
            far = far_costs(size, evicts=size > free_bytes() // (1 + beside))
            packing = packing_costs(job)
        if is_whole:
            workspace_bytes = workspaces(capture, inputs)
    finally:
        give_back()
    name = platform.processor() or platform.machine()
    added_s, copied_s = (optimizer.pop(f"{what}_s_per_byte") for what in ("accumulate", "copy"))
    return Profile(
        graph=capture.graph.digest,
        basis=ProfileBasis(name, f"torch {torch.__version__}", "measured", beside),
        op_s=op_s,
        workspace_bytes=workspace_bytes,
        call_s=call_s,
        accumulate_s_per_byte=added_s,
        update=UpdateCost(**optimizer, update_order=update_order(capture, job)),
        copying=CopyCost(copied_s, **far),
        packing=packing,
        loads=loads,
    )


def _settled(
    capture: Capture, op_s: Sequence[float], whole_s: Mapping[str, float], *, is_queued: bool
) -> tuple[float, ...]:
    """Return the seconds of ops so that those of a phase are its seconds in a row.

    is_queued: what is lacking is then what it costs to begin an op, alike for all of them.
    """
    nodes = capture.graph.nodes
    sums = {
        phase: sum(s for n, s in zip(nodes, op_s, strict=True) if n.phase == phase)
        for phase in "FB"
    }
    factor = {phase: whole_s[phase] / max(sums[phase], 1e-12) for phase in "FB"}
    if not is_queued:
        return tuple(s * factor[n.phase] for n, s in zip(nodes, op_s, strict=True))
    counts = {phase: sum(n.kind == "op" and n.phase == phase for n in nodes) for phase in "FB"}
    begin_s = {p: max(0.0, whole_s[p] - sums[p]) / max(1, counts[p]) for p in "FB"}
    return tuple(
        s * min(1.0, factor[n.phase]) + begin_s[n.phase] * (n.kind == "op")
        for n, s in zip(nodes, op_s, strict=True)
    )


def _in_place(
    capture: Capture,
    stages: Stages,
    inputs: Mapping[int, Any],
    loads: Sequence[ExpertLoad] = (),
) -> tuple[tuple[float, ...], float]:
    """Return the seconds of each node in the whole step, and what a call adds.

    loads:    of experts: where ranks divide them, the seconds are those of the busiest.
    """
    whole_f, whole_b, call_s = _whole(capture, stages, inputs)
    op_s, whole_s = _op_by_op(capture, inputs), {"F": whole_f, "B": whole_b}
    settled = _settled(capture, op_s, whole_s, is_queued=here().is_queued)
    return as_busiest(capture, settled, loads, inputs), call_s


def inputs_of(capture: Capture, job: Job) -> dict[int, Any]:
    """Return a value for each node that is no op: weights, a batch, constants."""
    nodes = capture.graph.nodes
    state = {**capture.parameters, **dict(capture.model.named_buffers())}
    leaves = capture.leaves(on_device(next(started(job.data, 0))))
    values: dict[int, Any] = dict(capture.constants)
    for i, node in enumerate(nodes):
        match node.kind:
            case "parameter":
                kept = state[node.name].detach().to(getattr(torch, node.dtype))
                values[i] = kept.clone(memory_format=torch.contiguous_format)
            case "buffer":
                values[i] = state[node.name].detach().clone()
            case "input":
                values[i] = leaves[capture.inputs[i]]
            case "scale":
                dtype = getattr(torch, nodes[capture.graph.loss].dtype)  # as in a run
                values[i] = torch.tensor(1.0, dtype=dtype, device=here().place)
            case "constant" | "op":
                pass
    return values


@contextmanager
def _companions(
    capture: Capture, stages: Stages, inputs: Mapping[int, Any], count: int
) -> Generator[None]:
    """Keep `count` other processes busy with the same step."""
    context = multiprocessing.get_context("fork")
    others = [
        context.Process(target=_keep_busy, args=(capture, stages, inputs), daemon=True)
        for _ in range(count)
    ]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C: we end them
    try:
        for other in others:
            other.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


def _keep_busy(capture: Capture, stages: Stages, inputs: Mapping[int, Any]) -> None:
    torch.set_num_threads(1)
    step = _step(capture, stages, inputs)
    with torch.no_grad():
        while multiprocessing.parent_process().is_alive():  # type: ignore[union-attr]
            step()


def _step(
    capture: Capture, stages: Stages, inputs: Mapping[int, Any]
) -> Callable[[], tuple[float, float, float]]:
    """Return a call that runs one micro-batch uncut: (F, B, both with the calls around them)."""
    (stage,) = stages.stages
    forward = function_of(stage.forward, capture)
    backward = function_of(stage.backward, capture)
    static_f = [inputs[i] for i in (*forward.statics, *forward.leaves)]
    static_b = [inputs[i] for i in (*backward.statics, *backward.leaves)]
    clock = clock_here()

    def step() -> tuple[float, float, float]:
        start = clock()
        with _compat.below_autograd():
            before = clock()
            frame = dict(zip(forward.outputs, forward.run(list(static_f), 1), strict=True))
            middle = clock()
            values = [frame.pop(i) for i in backward.values]
            again = clock()
            backward.run(static_b + values, 1)
            after = clock()
        return middle - before, after - again, clock() - start

    return step


def _whole(
    capture: Capture, stages: Stages, inputs: Mapping[int, Any]
) -> tuple[float, float, float]:
    """Return the median seconds of F and of B, and the seconds that a call adds to each."""
    step = _step(capture, stages, inputs)
    for _ in range(_WARM_UPS):
        step()
    runs = _repeat(step)
    forward = statistics.median(run[0] for run in runs)
    backward = statistics.median(run[1] for run in runs)
    around = statistics.median(run[2] - run[0] - run[1] for run in runs)
    return forward, backward, max(0.0, around / 2)


def _repeat(call: Callable[[], T]) -> list[T]:
    until = time.perf_counter() + _BUDGET_S
    runs: list[T] = []
    while len(runs) < _MIN_RUNS or time.perf_counter() < until:
        runs.append(call())
        if len(runs) >= 40 * _MIN_RUNS:
            break
    return runs


def _op_by_op(capture: Capture, inputs: Mapping[int, Any]) -> list[float]:
    """Return the median seconds of each node over several whole steps."""
    ops = _Ops(capture)
    for _ in range(_WARM_UPS):
        start = time.perf_counter()
        ops.run(inputs)
        ops.queue_s = (time.perf_counter() - start) / max(1, len(capture.fx_nodes))
    ops.sweep = Sweep(here()) if here().is_queued else None
    runs = _repeat(lambda: ops.run(inputs))
    return [statistics.median(times) for times in zip(*runs, strict=True)]


class _Ops:
    """The traced step as an interpreter with a clock around each op.

    sweep:    what a device does while ops are queued, each of which takes `queue_s`; None: nothing.
    """

    sweep: Sweep | None = None
    queue_s = 0.0

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.index = {node: i for i, node in enumerate(capture.fx_nodes)}
        rows = enumerate(capture.graph.nodes)
        self.random = {i: k for k, i in enumerate(i for i, n in rows if n.effect == "random")}
        last: dict[int, int] = {}
        for i, node in enumerate(capture.graph.nodes):
            for source in (i, *node.inputs):
                last[source] = i
        self.dies: dict[int, list[int]] = {}
        for source, i in last.items():
            self.dies.setdefault(i, []).append(source)

    def run(
        self, inputs: Mapping[int, Any], each: Callable[[int], None] | None = None
    ) -> list[float]:
        values = dict(inputs)
        times: list[Any] = [0.0] * len(self.capture.fx_nodes)
        clock = clock_of(here())
        with _compat.below_autograd():
            for i, node in enumerate(self.capture.fx_nodes):
                if self.sweep is not None and i % OPS_AHEAD == 0:
                    self.sweep.ahead(OPS_AHEAD * self.queue_s)
                if node.op == "call_function":
                    target = callable_of(node.target)
                    args, kwargs = fx.map_arg(
                        (node.args, node.kwargs), lambda n: values[self.index[n]]
                    )
                    if i in self.random:
                        reseed(1, self.random[i])
                    start = clock()
                    values[i] = target(*args, **kwargs)
                    times[i] = clock() - start
                    del args, kwargs
                for dead in self.dies.get(i, ()):
                    values.pop(dead, None)
                if each is not None:
                    each(i)
        return [float(taken_s) for taken_s in times]


def workspaces(capture: Capture, inputs: Mapping[int, Any]) -> tuple[int, ...]:
    """Return for each node the bytes that it holds only while it runs.

    Of a CPU the profiler notes every allocation; marks between the ops say which op made it.
    """
    nodes, ops = capture.graph.nodes, _Ops(capture)
    found, device = [0] * len(nodes), here()

    def note(at: int, peak: int) -> None:
        owns = nodes[at].storage == at
        found[at] = max(0, peak - (nodes[at].size_bytes if owns else 0))

    if not device.is_cpu:
        before = [device.reset_peak()]

        def look(at: int) -> None:
            note(at, device.peak_bytes - before[0])
            before[0] = device.reset_peak()

        ops.run(inputs, each=look)
        return tuple(found)
    with _compat.memory_profile() as memory:
        ops.run(inputs, each=_compat.memory_mark)
    now = peak = at = 0
    for event in memory():
        now += event.size_bytes
        peak = max(peak, now)
        if event.is_mark:
            note(at, peak)
            at, now, peak = at + 1, 0, 0
    return tuple(found)


def optimizer_costs(capture: Capture, job: Job, apart: Apart = _here) -> dict[str, float]:
    """Return the costs of adding gradients, of updates, optimizer state and copies of weights.

    Keys are names of fields of a profile.  An update includes clipping where the job clips.
    apart:    where to measure one of its own kind: its hooks may count, or move averages.
    """
    is_plain = whole_optimizer(job, capture.model).is_plain
    return _costs(capture, job) if is_plain else apart(partial(_costs, capture, job))


def _costs(capture: Capture, job: Job) -> dict[str, float]:
    def costs(part: int) -> dict[str, float]:
        return _costs_of(capture, job, _some_trained(capture, part))

    return with_room(costs, COPIES)


def with_room(measured: Callable[[int], T], part: int) -> T:
    """Return the result of measuring as much as lies in a part of an accelerator's memory.

    measured:  given that it is the `part`-th part; of half as much where there was no room for all.
    """
    while True:
        try:
            return measured(part)
        except torch.OutOfMemoryError:
            if part >= _LEAST_PART:
                raise
        part *= 2


def _costs_of(
    capture: Capture, job: Job, known: Mapping[str, torch.nn.Parameter]
) -> dict[str, float]:
    place = here().place  # they may wait in the host's memory
    weights = {name: p.detach().to(place, copy=True) for name, p in known.items()}
    gradients = {name: torch.full_like(p, 1e-4) for name, p in weights.items()}
    size = bytes_of(known.values())
    accumulate_s, copy_s = _sum_costs(capture, weights)
    whole = whole_optimizer(job, capture.model)
    seconds, call_s, workspaces = _updated(whole, weights, gradients)
    if job.clip_norm is not None:
        seconds += _timed(partial(_clip, list(gradients.values())))
    held = _state(whole.optimizer)
    state, numbers = (_held_bytes(v for v in held if bool(v.dim()) == is_row) for is_row in (1, 0))
    device = here()
    copied = min(size, _COPIED_BYTES) if device.is_queued else size
    flat, other = torch.zeros(2, max(1, copied // 4), device=device.place)
    return {
        "accumulate_s_per_byte": accumulate_s / size,
        "update_s_per_byte": max(0.0, seconds + copy_s - call_s) / size,
        "update_s": call_s,
        "state_bytes_per_byte": state / size,
        "state_bytes_per_tensor": numbers / len(known),
        **workspaces,
        "copy_s_per_byte": _timed(lambda: other.copy_(flat)) / copied,
    }


def _sum_costs(capture: Capture, weights: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the seconds of adding gradients to their sums, and of making what a step reads."""
    made = [torch.full_like(p, 1e-4, dtype=_read_in(capture, n)) for n, p in weights.items()]
    sums: Any = [torch.zeros_like(p) for p in weights.values()]
    accumulate_s = _timed(lambda: _compat.add_in_place(sums, made))
    if not capture.graph.masters:
        return accumulate_s, 0.0
    return accumulate_s, _timed(lambda: [copy.copy_(p) for copy, p in zip(made, sums, strict=True)])


def _some_trained(capture: Capture, part: int) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained; where all have no room, the smallest, and others.

    part:     which part of an accelerator's memory they may take.
    """
    known = {n: p for n, p in capture.model.named_parameters() if p.requires_grad}
    device = here()
    room = bytes_of(known.values()) if device.is_cpu else device.usable_bytes // part
    taken, found = 0, set[str]()
    for name, parameter in sorted(known.items(), key=lambda row: row[1].numel()):
        taken += bytes_of([parameter])
        if taken <= room or not found:
            found.add(name)
    return {name: p for name, p in known.items() if name in found}


def update_order(capture: Capture, job: Job) -> tuple[str, ...]:
    """Return the names of parameters as the job's optimizer takes them; none of one that is not
    torch's, which may take them otherwise.
    """
    whole = whole_optimizer(job, capture.model)
    names = {id(p): name for name, p in whole.parameters.items()}
    groups = whole.optimizer.param_groups if whole.is_plain else []
    return tuple(names[id(p)] for group in groups for p in group["params"] if id(p) in names)


def _read_in(capture: Capture, name: str) -> torch.dtype:
    """Return the dtype in which a step reads a parameter, and makes its gradient."""
    nodes = (node for node in capture.graph.nodes if node.kind == "parameter")
    return getattr(torch, next(node.dtype for node in nodes if key_in(node.name) == name))


def packing_costs(job: Job) -> tuple[PackCost, ...]:
    """Return the cost of packing a message, for each number of bits that the job allows."""
    return tuple(_packing_cost(bits) for bits in wire_choices(job.fewest_bits))


def _packing_cost(bits: int) -> PackCost:
    """Return the cost of packing `bits`, from a tensor of one row and one of a usual message."""
    found: list[tuple[float, float, int]] = []
    for rows in _PACKED_ROWS:
        kind = TensorForm((rows, 256), torch.float32)
        pack, unpack = packer(kind, bits), unpacker(kind, bits)
        tensor = torch.linspace(-1.0, 1.0, rows * 256, device=here().place).view(rows, 256)
        packed = pack(tensor)
        seconds = _timed(partial(pack, tensor)), _timed(partial(unpack, packed))
        found.append((*seconds, 4 * rows * 256))
    (pack_s, unpack_s, small), (more_s, other_s, large) = found
    per_byte = [
        max(0.0, (b - a) / (large - small)) for a, b in ((pack_s, more_s), (unpack_s, other_s))
    ]
    return PackCost(bits, pack_s, per_byte[0], unpack_s, per_byte[1])


def most_far_bytes(capture: Capture, job: Job, state_bytes_per_byte: float) -> int:
    """Return the most bytes that a plan puts into far memory.

    They are those of a rank with the whole model: weights, gradients, state, and what F keeps of
    all micro-batches of a step.
    """
    (stage,) = cut(capture.graph).stages
    weights = capture.graph.parameter_bytes * (2 + state_bytes_per_byte)
    return int(weights) + job.micro_batches * max(0, stage.forward.change_bytes)


def far_costs(size_bytes: int, *, evicts: bool = False) -> dict[str, float]:
    """Return the seconds of moving a byte to far memory or back, and of moving any tensor.

    By the names of the fields of CopyCost.
    evicts:  whether the system's memory has no room for it, so that all is read from the disk.
    Waiting for the system counts, as for a disk that is slow; waiting for a core does not.
    """
    size = max(1, min(size_bytes, _FAR_BYTES, _room_bytes()) // _FAR_BLOCKS)
    small_s, whole_s = _moved_s(*_FAR_SMALL), _moved_s(_FAR_BLOCKS, size, evicts=evicts)
    each_s = small_s / _FAR_SMALL[0]
    per_byte_s = max(0.0, whole_s - _FAR_BLOCKS * each_s) / (size * _FAR_BLOCKS)
    return {"far_s_per_byte": per_byte_s, "far_s": each_s}


def _room_bytes() -> int:
    """Return the bytes of its memory that an accelerator has for what is only measured."""
    device = here()
    return _FAR_BYTES if device.is_cpu else device.usable_bytes // COPIES


def _moved_s(count: int, size: int, *, evicts: bool = False) -> float:
    """Return the seconds of moving `count` tensors of `size` bytes one way, half of there and back.

    As of activations, memory is taken anew for those that come back.
    """
    device = here().place
    memory = FarMemory(device)
    room = memory.room([size] * count)
    nears = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(count)]

    def there_and_back() -> None:
        room.put(dict(enumerate(map(as_bytes, nears))))
        if evicts:
            memory.evict()
        nears[:] = [torch.empty(size, dtype=torch.uint8, device=device) for _ in nears]
        room.take(dict(enumerate(nears)))

    return _timed(there_and_back, clock=awake_s if device.type == CPU else None) / 2


def _updated(
    whole: WholeOptimizer, weights: dict[str, Tensor], gradients: dict[str, Tensor]
) -> tuple[float, float, dict[str, float]]:
    """Return the seconds of an update of `weights`, the share of the call in them, and its bytes.

    The call is what an update of the smallest takes beyond the mean of the others: nothing where
    these are so large that it does not show.  Before each, caches are swept, as by a step.
    Bytes as fields of Profile.  One of torch's optimizers is also asked to update the largest
    alone, and that and the second: those on a CPU take one parameter after the other, and hold
    something of the one before meanwhile.
    """
    step, loan = whole.optimizer.step, Loan(whole, weights)
    sweep = Sweep(here())

    def seconds_of(some: dict[str, Tensor]) -> float:
        def after_sweep(timed: Callable[[], object]) -> None:
            loan.run(some, lambda: (sweep(), timed()))

        return _timed(step, inside=after_sweep)

    seconds = seconds_of(gradients)
    sizes = {name: p.numel() * p.element_size() for name, p in gradients.items()}
    order = sorted(sizes, key=lambda name: -sizes[name])
    call_s = 0.0
    if len(order) > 1 and whole.is_plain:
        smallest_s = seconds_of({order[-1]: gradients[order[-1]]})
        call_s = max(0.0, smallest_s - max(0.0, seconds - smallest_s) / (len(order) - 1))
    counts = sorted({1, min(2, len(order)), len(order)} if whole.is_plain else {len(order)})
    each = held = 0.0  # per byte of those that came last, and in all
    per_byte: list[float] = []
    for count in counts:
        found = list[int]()
        some = {name: gradients[name] for name in order[:count]}
        loan.run(some, lambda found=found: found.append(_peak_bytes(step)))
        more = sum(sizes[name] for name in order[len(per_byte) : count])
        each, held = max(0.0, found[0] - held) / more, found[0]
        per_byte.append(each)
    named = "update_workspace_of_largest", "update_workspace_of_second"
    beyond = {name: max(0.0, own - each) for name, own in zip(named, per_byte, strict=False)}
    return seconds, call_s, {"update_workspace_per_byte": each, **beyond}


def _state(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that an optimizer keeps for its parameters."""
    return [v for held in optimizer.state.values() for v in held.values() if isinstance(v, Tensor)]


def _held_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _clip(gradients: list[Tensor]) -> None:
    """Clip as a run does where the norm is beyond the limit."""
    norms = torch.stack([norm.double() for norm in _compat.gradient_norms(gradients)])
    factor = 1.0 / (1.0 + norms.square().sum())
    for gradient in gradients:
        gradient.mul_(factor)


def optimizer_state(capture: Capture, job: Job, apart: Apart = _here) -> float:
    """Return the bytes of optimizer state per byte of parameter, by one step on small stand-ins.

    apart:    where to make it, as in `measure`.
    A stand-in has at most 64 in each dimension; states of one number are not counted.
    Ignores:  states that grow differently from the weights, such as Adafactor's rows and columns.
    """
    is_plain = whole_optimizer(job, capture.model).is_plain
    return _state_size(capture, job) if is_plain else apart(partial(_state_size, capture, job))


def _state_size(capture: Capture, job: Job) -> float:
    trained = [n for n, p in capture.model.named_parameters() if p.requires_grad]
    with stand_ins(capture.model, 64) as values:
        whole = whole_optimizer(job, capture.model)
        gradients = {name: torch.zeros_like(values[name]) for name in trained}
        Loan(whole, values).run(gradients, whole.optimizer.step)
    held = _held_bytes(v for v in _state(whole.optimizer) if v.dim())
    return held / max(1, _held_bytes(gradients.values()))


def _peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes that `call` holds above those held before, on the device here."""
    device = here()
    if not device.is_cpu:
        before = device.reset_peak()
        call()
        return device.peak_bytes - before
    with _compat.memory_profile() as memory:
        call()
    now = peak = 0
    for event in memory():
        now += event.size_bytes
        peak = max(peak, now)
    return peak


def _timed(
    call: Callable[[], Any],
    *,
    inside: Callable[[Callable[[], object]], object] = lambda timed: timed(),
    clock: Callable[[], float] | None = None,
) -> float:
    """Return the median seconds of `call`; `inside` does the work needed around each call."""
    clock, times = clock or clock_of(here()), list[Any]()

    def timed() -> None:
        start = clock()
        call()
        times.append(clock() - start)

    for _ in range(7):
        inside(timed)
    return statistics.median(map(float, times[2:]))


def awake_s() -> float:
    """Return the time in seconds, less the time that this thread has waited for a core.

    On other systems than Linux that is not known, and counts.
    """
    try:
        waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        waited_ns = 0
    return time.perf_counter() - 1e-9 * waited_ns


def clock_here() -> Callable[[], float]:
    device = here()
    if not device.is_queued:
        return time.thread_time

    def synchronized() -> float:
        device.synchronize()
        return time.perf_counter()

    return synchronized
