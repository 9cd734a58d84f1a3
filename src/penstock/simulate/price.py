"""Price: what the stages of a plan cost, in seconds and bytes, by a profile of their ops."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ProfileError
from penstock.graph.graph import Graph
from penstock.graph.joint import joint_memory, joint_of
from penstock.graph.parts import key_in
from penstock.graph.segment_memory import (
    MemoryOwner,
    moved,
    moved_bytes,
    peak_with_workspace,
    segment_memory,
    waiting_bytes,
)
from penstock.graph.stages import Segment, SegmentKind, Stage, Stages
from penstock.graph.wire import is_packed
from penstock.profile.kinds import Profiles, as_tuple
from penstock.profile.profile import FusedCost, Profile
from penstock.program.codes import COPIED, COST_ROW, NUM_COSTS, OFFLOAD, RELOAD
from penstock.program.program import Program
from penstock.program.reductions import Validate
from penstock.schedule.figures import made_in_passing
from penstock.schedule.orders import KINDS, F, Kind
from penstock.schedule.schedule import Schedule
from penstock.simulate.costs import Costs, Memory
from penstock.sums import AS_THEY_ARE, SumsWay

_PART_ROWS = tuple(COST_ROW[op, KINDS.index(of)] for op in (OFFLOAD, RELOAD) for of in "UW")
_Priced: TypeAlias = tuple[Graph, Stages]  # that costs are of
T = TypeVar("T")
_SEGMENTS: tuple[SegmentKind, ...] = ("F", "B", "I", "W")


class Ways(NamedTuple):
    """How actions and messages are done.

    passing:   kind and stage of actions that make the weights they read, one by one.
    together:  micro-batches of a B, or W.
    message:   micro-batches of a message of gradients.
    bits:      of a number in the messages of each edge; empty: none is packed.
    compiled:  whether runs of ops are compiled as one.
    sharded:   of each stage, among how many ranks it is divided, 1 where it is not; empty: none is.
    far:       stages whose weights, or whose part of them, are in far memory.
    held_back: how gradients are sent, where ranks keep what they do not send of them.
    """

    passing: frozenset[tuple[Kind, int]] = frozenset()
    together: int = 1
    message: int = 1
    bits: tuple[int, ...] = ()
    compiled: bool = False
    sharded: tuple[int, ...] = ()
    far: frozenset[int] = frozenset()
    held_back: SumsWay = AS_THEY_ARE

    def parts(self, stage: int) -> int:
        """Return among how many ranks a stage is divided."""
        return self.sharded[stage] if self.sharded else 1

    def comes_and_goes(self, stage: int) -> bool:
        """Return whether a stage is whole only while it is used."""
        return stage in self.far or self.parts(stage) > 1


ONE_BY_ONE = Ways()


def ways_of(schedule: Schedule) -> Ways:
    """Return the ways in which a schedule's actions are carried out."""
    whole = bool((schedule.orders.kinds == KINDS.index("B")).any())
    together = schedule.together
    return Ways(made_in_passing(schedule), together, together if whole else 1)


def costs_of(
    graph: Graph,
    stages: Stages,
    profiles: Profiles,
    versions: Sequence[int] = (),
    *,
    copies: bool = False,
    ways: Ways = ONE_BY_ONE,
) -> Costs:
    """Return the seconds of F, B, I, W and U of every stage on each profiled kind of device.

    The sum of the segment's ops, call_s, and for B and W adding up the gradients.  U: the
    optimizer, and a copy of the weights where more than one of the `versions` is held.
    A single profile applies to every device.
    copies:   whether to include what it takes to move activations and state, there and back.
    ways:     what is done at once is called and added up once, and its operands are copied.
    Ignores:  reading the data; that one large product may be faster than several small ones; that
              compiled ops are faster, in segments of which the profile does not know it.
    """
    row = as_tuple(profiles)
    seconds = np.zeros((NUM_COSTS if copies else len(KINDS), len(stages.stages), len(row)))
    for at, profile in enumerate(row):
        check_profile(graph, profile)
        for stage in stages.stages:
            make = partial(_stage_s, graph, stage, profile, versions, ways)
            key = "seconds", id(profile), *_what(stage, versions, ways)
            seconds[: len(KINDS), stage.index, at] = _once(stages, stage, key, make)
        if copies:
            sizes = _copied_bytes(graph, stages, profile, ways)
            each_s = _copied_tensors(graph, stages, profile) * (sizes > 0) * profile.copying.far_s
            copied_s = each_s + sizes * profile.copying.far_s_per_byte
            seconds[len(KINDS) : NUM_COSTS, :, at] = np.concatenate(copied_s)
    bits = ways.bits
    packing_s = [[_packing_s(graph, stages, profile, ways)] for profile in row] if bits else []
    loaded_s, left_s = _loaded_s(graph, stages, row, ways)
    return Costs(
        seconds,
        tuple(p.kind for p in row) if len(row) > 1 else ("",),
        unshard_s=loaded_s,
        unshard_bytes=np.array(_sharded_bytes(graph, stages, ways), np.int64),
        shards_s=left_s,
        packing_s=np.concatenate(packing_s).transpose(2, 1, 0) if bits else np.empty((2, 0, 0)),
    )


def by_rank(
    costs: Costs, profiles: Profiles, program: Program, places: Sequence[int], stages: _Priced
) -> Costs:
    """Return costs with a column for each rank, where ranks keep unequal parts of stages.

    costs:    as `costs_of` returns them.  places: for each rank, the place of its profile.
    """
    if not program.parts:
        return costs
    graph, rows = stages
    columns = list(places)
    seconds = costs.action_s[:, :, columns].copy()
    for rank, place in enumerate(places):
        profile, part = as_tuple(profiles)[place], float(program.part_of(rank))
        for index in set(program.stages_of(rank)) & program.sharded:
            stage = rows.stages[index]
            updated = part * trained_bytes(graph, stage, reached=True)
            update_s = profile.update.update_s + updated * profile.update.update_s_per_byte
            seconds[KINDS.index("U"), index, rank] = update_s
            for row in _PART_ROWS if len(seconds) == NUM_COSTS else ():
                seconds[row, index, rank] *= part * program.replicas
    packing_s = costs.packing_s[:, :, columns] if costs.packing_s.size else costs.packing_s
    devices = tuple(costs.devices[place] for place in places)
    most = max(program.stretch(rank) for rank in program.grid.ranks_of(0))
    loaded = {"unshard_s": most * costs.unshard_s, "shards_s": most * costs.shards_s}
    own = {"action_s": seconds, "devices": devices, "packing_s": packing_s, **loaded}
    return replace(costs, **own, by_rank=True)


def _packing_s(
    graph: Graph, stages: Stages, profile: Profile, ways: Ways
) -> list[tuple[float, float]]:
    """Return for each edge the seconds of packing a message and of unpacking it."""
    rows: list[tuple[float, float]] = []
    for edge, each in zip(stages.edges, ways.bits, strict=True):
        count = ways.message if edge.kind == "B" else 1
        packed = [v for v in edge.values if is_packed(graph, v, each)] * count
        rows.append(profile.packing_s(each, [graph.nodes[v].size_bytes for v in packed]))
    return rows


def _sharded_bytes(graph: Graph, stages: Stages, ways: Ways) -> list[int]:
    """Return the bytes that ranks gather of each stage; nothing where none is divided."""
    rows = stages.stages if ways.sharded else ()
    return [_version_bytes(graph, s) if ways.parts(s.index) > 1 else 0 for s in rows]


def _loaded_s(
    graph: Graph, stages: Stages, row: Sequence[Profile], ways: Ways
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds, besides what links take, to make the weights of each stage whole and to
    leave its gradients where they are kept; nothing where none comes and goes.

    The own part is copied, or loaded from far memory; a sum is added up and copied, or left there.
    Of those that stay, what it takes to send their gradients in few numbers.
    On the slowest device.
    """
    if not (ways.sharded or ways.far or ways.held_back.passes):
        return np.empty(0), np.empty(0)
    far_s = max(profile.copying.far_s_per_byte for profile in row)
    copy_s = max(profile.copying.copy_s_per_byte for profile in row)
    add_s = max(profile.accumulate_s_per_byte for profile in row)
    loaded, left = np.zeros((2, len(stages.stages)))
    for at, stage in enumerate(stages.stages):
        if not ways.comes_and_goes(at):
            left[at] = ways.held_back.passes * copy_s * trained_bytes(graph, stage)
            continue
        own = _own_bytes(graph, stage, ways)
        others = ways.parts(at) - 1
        loaded[at] = own * (far_s if at in ways.far else copy_s)
        left[at] = own * (others * add_s + (far_s if at in ways.far else copy_s))
    return loaded, left


def _own_bytes(graph: Graph, stage: Stage, ways: Ways) -> int:
    """Return the bytes of the part of the trainable parameters of a stage that one rank keeps."""
    return trained_bytes(graph, stage) // ways.parts(stage.index)


def _stage_s(
    graph: Graph, stage: Stage, profile: Profile, versions: Sequence[int], ways: Ways
) -> NDArray[np.float64]:
    seconds = np.zeros(len(KINDS))
    updated = trained_bytes(graph, stage, reached=True) / ways.parts(stage.index)
    for kind in _SEGMENTS:
        segment = stage.segment(kind)
        known = _fused(segment, profile, ways, stage.index)
        ratio = 1.0 if known is None else known.ratio
        seconds[KINDS.index(kind)] = _segment_s(graph, segment, profile, ratio)
    update_s = profile.update.update_s + updated * profile.update.update_s_per_byte
    if len(versions) > stage.index and versions[stage.index] > 1:
        update_s += _version_bytes(graph, stage) * profile.copying.copy_s_per_byte
    seconds[KINDS.index("U")] = update_s
    if ways.together > 1:
        _put_joint_s(seconds, graph, stage, profile, ways.together)
    return seconds


def _once(stages: Stages, stage: Stage, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    """Return the result of `make` for a stage; of one that stands in several plans it is made once.

    key:  all that it follows from besides graph and stage.
    """
    if stages.known is None:
        return make()
    return stages.known.once((*key, stages.known.token(stage)), make)


def _what(stage: Stage, versions: Sequence[int], ways: Ways) -> tuple[Hashable, ...]:
    """Return all that seconds and bytes follow from besides graph, profile and stage."""
    at = stage.index
    passing = tuple((kind, at) in ways.passing for kind in _SEGMENTS)
    alive = versions[at] if len(versions) > at else 1
    is_far = at in ways.far
    return passing, ways.together, ways.compiled, ways.parts(at), is_far, alive, ways.held_back


def _put_joint_s(
    seconds: NDArray[np.float64], graph: Graph, stage: Stage, profile: Profile, together: int
) -> None:
    """Replace the seconds of B and W by those for `together` micro-batches at once."""
    joint = joint_of(graph, stage.weight_gradient, together)
    each_s, once_s = (_segment_s(graph, segment, profile) for segment in (joint.each, joint.once))
    copied = sum(together * graph.nodes[value].size_bytes for value, _ in joint.along)
    weights_s = together * each_s + once_s + copied * profile.copying.copy_s_per_byte
    seconds[KINDS.index("W")] = weights_s
    seconds[KINDS.index("B")] = weights_s + together * seconds[KINDS.index("I")]


def _fused(segment: Segment, profile: Profile, ways: Ways, stage: int) -> FusedCost | None:
    """Return the cost of a compiled segment; None: it is not compiled, or the cost is unknown."""
    if not ways.compiled or (segment.kind, stage) in ways.passing:
        return None
    digest = segment.digest
    return next((row for row in profile.fused if row.segment == digest), None)


def _segment_s(graph: Graph, segment: Segment, profile: Profile, ratio: float = 1.0) -> float:
    if not segment.ops:
        return 0.0
    added = sum(graph.kept_bytes(p) for p, _ in segment.gradients)
    computed = ratio * segment.times * sum(map(profile.op_s.__getitem__, segment.ops))
    return computed + profile.call_s + added * profile.accumulate_s_per_byte


def _copied_bytes(graph: Graph, stages: Stages, profile: Profile, ways: Ways) -> NDArray[np.int64]:
    """Return the bytes of copies, as `DeviceMemory.copied`."""
    state = [
        int(state_bytes(graph, stage, profile) / ways.parts(stage.index)) for stage in stages.stages
    ]
    kept = [moved_bytes(graph, stages, stage.index) for stage in stages.stages]
    own = [_own_bytes(graph, stage, ways) for stage in stages.stages]
    both = [2 * size_bytes for size_bytes in own]
    return np.array([[kept, state, own], [kept, state, both]], np.int64)


def _copied_tensors(graph: Graph, stages: Stages, profile: Profile) -> NDArray[np.int64]:
    """Return the number of tensors that a copy moves, [COPIED, stage]: of F, of state, of weights.

    Of the state, as many for a parameter as are as large as it.
    """
    each = math.ceil(profile.update.state_bytes_per_byte)
    rows = [
        (
            len(moved(graph, stages, stage.index)),
            each * sum(1 for _ in _trained(graph, stage)),
            1,
        )
        for stage in stages.stages
    ]
    return np.array(rows, np.int64).reshape(-1, len(COPIED)).T


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory:
    """Bytes of the stages on one kind of device, whatever ranks they live on.

    transient, net  [kind, stage], as in Memory; undo: also held where updates are validated
    start           [stage]: weights, buffers; with a backward also gradients, optimizer state and
                    older versions; of a stage in shards, one of equal ones
    divided         [stage]: of one in shards, what all of them hold together; else nothing
    waiting         [edge]: of a message between two stages of one rank, until it is used
    copied          [2, COPIED, stage]: that a copy to far memory frees, and one back takes: what F
                    keeps of a micro-batch and can be moved, the state, and weights, which come back
                    with gradients; None where nothing is
    whole           [4, stage]: of one that is divided, or in far memory, the weights while it is
                    gathered, the gradients while they are summed, what the backward that made the
                    first of them holds at its end, and the gradients of a part that stay until the
                    update; empty: none is
    """

    transient: NDArray[np.int64]
    net: NDArray[np.int64]
    undo: tuple[int, ...]
    start: tuple[int, ...]
    divided: tuple[int, ...]
    waiting: tuple[int, ...]
    copied: NDArray[np.int64] | None = None
    whole: tuple[tuple[int, ...], ...] = ((), (), (), ())


def memory_on(
    held: Sequence[DeviceMemory], program: Program, places: Sequence[int], *, posted: bool = False
) -> Memory:
    """Return the memory of the ranks of `program`; rank r is on the device of held[places[r]].

    Where a stage lives on unlike devices, its actions are assumed to need what the worst needs.
    posted:  whether a message is held from its Receive, as where a plan posts them early.
    """
    used = [held[place] for place in sorted(set(places))]
    transient, net = used[0].transient, used[0].net
    for other in used[1:]:
        transient = np.maximum(transient, other.transient)
    copied = [each.copied for each in used if each.copied is not None]
    if copied:
        left, back = np.max(copied, axis=0)
        transient = np.concatenate([transient, 0 * left, back])
        net = np.concatenate([net, -left, back])
    undoes = any(isinstance(one, Validate) for one in program.code.reductions)
    starts = [
        tuple(map(sum, zip(d.start, d.undo, strict=True))) if undoes else d.start for d in held
    ]
    times = _times_equal(program)
    start: list[int] = []
    for rank, place in enumerate(places):
        own, divided = program.stages_of(rank), held[place].divided
        more = sum(divided[stage] * (times[rank, stage] - 1) for stage in own) / program.replicas
        away = sum(
            int(_copied(held[place])[0, what, s]) * times[rank, s]
            for what, s in _away(program, rank)
        )
        start.append(sum(starts[place][stage] for stage in own) + int(more - away))
    sizes = [edge.size_bytes for edge in program.edges] if posted else []
    read, *summed = np.array(used[0].whole, np.int64).reshape(4, -1)
    message = np.array(sizes, np.int64)
    more = {"unsharded_bytes": read, "summed_bytes": np.array(summed), "message_bytes": message}
    more["waiting_bytes"] = np.array(used[0].waiting, np.int64)
    parts = times if program.parts else np.empty((0, 0))
    return Memory(np.array(start, np.int64), transient, net, **more, parts=parts)


def _times_equal(program: Program) -> NDArray[np.float64]:
    """Return [rank, stage]: what a rank keeps of a stage, times an equal part of it."""
    times = np.ones((program.num_ranks, program.num_stages))
    for rank in range(program.num_ranks) if program.parts else ():
        times[rank, sorted(program.sharded)] = program.part_of(rank) * program.replicas
    return times


def _copied(held: DeviceMemory) -> NDArray[np.int64]:
    assert held.copied is not None, "they are asked for where something is moved"
    return held.copied


def _away(program: Program, rank: int) -> Iterator[tuple[int, int]]:
    """Yield what is far when a window begins, as it is reloaded first: rows of COPIED, stages."""
    code, part = program.code, program.code.slice_of(rank)
    copies = (code.op[part] == OFFLOAD) | (code.op[part] == RELOAD)
    for what, kind in enumerate(COPIED):
        rows = part.start + np.flatnonzero(copies & (code.kind[part] == kind) & (kind != F))
        stages, firsts = np.unique(code.stage[rows], return_index=True)
        pairs = zip(stages.tolist(), rows[firsts], strict=True)
        yield from ((what, stage) for stage, at in pairs if code.op[at] == RELOAD)


def held_of(
    graph: Graph,
    stages: Stages,
    profile: Profile,
    versions: Sequence[int] = (),
    *,
    copies: bool = False,
    ways: Ways = ONE_BY_ONE,
) -> DeviceMemory:
    """Return the bytes of the stages on the device of `profile`; with `copies`, what can be moved.

    An action: `segment_memory` with the workspace, and the batch where a stage reads it.
    Ignores:  copies of messages that are sent; fragmentation.
    """
    check_profile(graph, profile)
    rows: list[_HeldByStage] = []
    for stage in stages.stages:
        make = partial(_stage_bytes, graph, stages, stage, (profile, versions, ways))
        key = "bytes", id(profile), stages.has_gradients, *_what(stage, versions, ways)
        rows.append(_once(stages, stage, key, make))
    copied = _copied_bytes(graph, stages, profile, ways) if copies else None
    transient, net, undo, start, divided, whole = zip(*rows, strict=True)
    some = tuple(zip(*whole, strict=True)) if ways.sharded or ways.far else ((), (), (), ())
    waiting = tuple(
        _once(
            stages,
            stages.stages[edge.source],
            ("waiting", edge.kind, edge.values),
            partial(waiting_bytes, graph, stages, edge),
        )
        for edge in stages.edges
    )
    both = np.array(transient).T, np.array(net).T
    return DeviceMemory(*both, undo, start, divided, waiting, copied, some)


class _HeldByStage(NamedTuple):
    """The bytes of one stage: what `DeviceMemory` has of it."""

    transient: NDArray[np.int64]
    net: NDArray[np.int64]
    undo: int
    start: int
    divided: int
    whole: tuple[int, int, int, int]


def _stage_bytes(
    graph: Graph, stages: Stages, stage: Stage, by: tuple[Profile, Sequence[int], Ways]
) -> _HeldByStage:
    profile, versions, ways = by
    transient, net = np.zeros((2, len(KINDS)), np.int64)
    for kind in _SEGMENTS:
        at = KINDS.index(kind)
        made = frozenset(_trained(graph, stage) if (kind, stage.index) in ways.passing else ())
        transient[at] = stage.segment(kind).peak_bytes
        if made or profile.has_workspace:
            transient[at] = peak_with_workspace(
                graph, stages, stage.index, kind, profile.workspace_bytes, made=made
            )
        if (known := _fused(stage.segment(kind), profile, ways, stage.index)) is not None:
            transient[at] = known.peak_bytes
        net[at] = stage.segment(kind).change_bytes
    _add_batch(graph, stage, transient, net)
    if ways.together > 1:
        _put_joint_bytes(graph, stages, stage, (profile, ways.together), (transient, net))
    parts = ways.parts(stage.index)
    transient[KINDS.index("U")] = _update_bytes(graph, stage, profile, parts)
    start = _read_bytes(graph, stage)
    if stages.has_gradients:
        start = _held_bytes(graph, stage, profile, versions, ways)
    elif stage.index in ways.far:
        start -= sum(graph.kept_bytes(p) + graph.copy_bytes(p) for p in _trained(graph, stage))
    undo, divided = _undo_bytes(graph, stage, profile), 0
    if parts > 1:
        divided = int(trained_bytes(graph, stage) + state_bytes(graph, stage, profile))
    return _HeldByStage(transient, net, undo, start, divided, _whole(graph, stages, stage, ways))


def _whole(graph: Graph, stages: Stages, stage: Stage, ways: Ways) -> tuple[int, int, int, int]:
    """Return the column of `DeviceMemory.whole` of a stage."""
    read = _version_bytes(graph, stage) if ways.comes_and_goes(stage.index) else 0
    if not read:
        return 0, 0, 0, 0
    summed = trained_bytes(graph, stage)
    return read, summed, _end_bytes(graph, stages, stage), summed // ways.parts(stage.index)


def _end_bytes(graph: Graph, stages: Stages, stage: Stage) -> int:
    """Return the bytes that B or W of a stage has added when its last op ends."""
    received = {v for e in stages.edges if e.target == stage.index for v in e.values}
    own = MemoryOwner(graph, received)
    ends = (segment_memory(own, each).end for each in (stage.backward, stage.weight_gradient))
    return max(ends)


def _put_joint_bytes(
    graph: Graph,
    stages: Stages,
    stage: Stage,
    by: tuple[Profile, int],
    held: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> None:
    """Replace the bytes of B and W by those for several micro-batches at once."""
    (transient, net), (profile, together) = held, by
    workspace = profile.workspace_bytes
    pairs: tuple[tuple[SegmentKind, bool], ...] = (("B", True), ("W", False))
    for kind, whole in pairs:
        at = KINDS.index(kind)
        net[at] *= together
        transient[at] = joint_memory(graph, stages, stage, workspace, count=together, whole=whole)
        transient[at] += _batch_bytes(graph, stage.segment(kind))


def _add_batch(
    graph: Graph, stage: Stage, transient: NDArray[np.int64], net: NDArray[np.int64]
) -> None:
    """Add the batch: all of it is held up to its last use, which drops what it does not read."""
    size = sum(node.size_bytes for node in graph.nodes if node.kind == "input")
    forward, backward = (_batch_bytes(graph, stage.segment(kind)) for kind in ("F", "B"))
    if not (forward and backward):
        transient[KINDS.index("F")] += forward
        transient[KINDS.index("B")] += backward
        return
    last: SegmentKind = "W" if _batch_bytes(graph, stage.weight_gradient) else "I"
    transient[KINDS.index("F")] += size
    net[KINDS.index("F")] += size
    for kind in ("B", last):
        net[KINDS.index(kind)] -= size
        transient[KINDS.index(kind)] -= size - _batch_bytes(graph, stage.segment(kind))


def _batch_bytes(graph: Graph, segment: Segment) -> int:
    """Return the bytes of the leaves of the batch that a segment reads."""
    readers = graph.batch_readers
    read = frozenset[int]().union(*(readers[op] for op in readers.keys() & set(segment.ops)))
    return sum(graph.nodes[k].size_bytes for k in read)


def _trained(graph: Graph, stage: Stage) -> Iterator[int]:
    """Yield the parameters of a stage that are trained, as nodes."""
    return (p for p in stage.parameters if graph.nodes[p].name in graph.gradients)


def trained_bytes(graph: Graph, stage: Stage, *, reached: bool = False) -> int:
    """Return the bytes of the trainable parameters, or only of those the loss depends on."""
    names = {graph.nodes[p].name: graph.kept_bytes(p) for p in stage.parameters}
    return sum(
        size_bytes
        for name, size_bytes in names.items()
        if name in graph.gradients and not (reached and graph.gradients[name] is None)
    )


def _update_bytes(graph: Graph, stage: Stage, profile: Profile, parts: int) -> int:
    """Return the bytes that an update of a stage, or of one of its equal parts, holds meanwhile.

    Of a part, the second largest counts wherever it is: it is not known what lies in it.
    """
    updated = trained_bytes(graph, stage, reached=True) / parts
    sizes = _in_order(graph, stage, profile)
    pairs = list(itertools.pairwise([0, *sizes]))
    if parts > 1 or not profile.update.update_order:
        largest, second, *_ = *sorted(sizes, reverse=True), 0, 0
        pairs = [(min(updated - min(updated, largest), second), min(updated, largest))]
    first, then = (
        profile.update.update_workspace_of_largest,
        profile.update.update_workspace_of_second,
    )
    held = max((own * first + before * then for before, own in pairs), default=0.0)
    return int(updated * profile.update.update_workspace_per_byte + held)


def _in_order(graph: Graph, stage: Stage, profile: Profile) -> list[int]:
    """Return the bytes of the parameters that are updated, in the order of the optimizer."""
    place = {name: at for at, name in enumerate(profile.update.update_order)}
    reached = [
        p for p in _trained(graph, stage) if graph.gradients[graph.nodes[p].name] is not None
    ]
    reached.sort(key=lambda p: place.get(key_in(graph.nodes[p].name), len(place)))
    return [graph.kept_bytes(p) for p in reached]


def _version_bytes(graph: Graph, stage: Stage) -> int:
    """Return the bytes of one version of the trainable parameters, as a step reads it."""
    return sum(graph.nodes[p].size_bytes for p in _trained(graph, stage))


def _read_bytes(graph: Graph, stage: Stage) -> int:
    """Return the bytes of parameters, what is read in place of them included, and of buffers."""
    held = sum(graph.kept_bytes(p) + graph.copy_bytes(p) for p in stage.parameters)
    return held + sum(graph.nodes[b].size_bytes for b in stage.buffers)


def _held_bytes(
    graph: Graph, stage: Stage, profile: Profile, versions: Sequence[int], ways: Ways
) -> int:
    parts = ways.parts(stage.index)
    alive = versions[stage.index] if len(versions) > stage.index else 1
    trained, older = trained_bytes(graph, stage), (alive - 1) * _version_bytes(graph, stage)
    state, read = state_bytes(graph, stage, profile), _read_bytes(graph, stage)
    numbers = _number_bytes(graph, stage, profile)
    if not ways.comes_and_goes(stage.index):
        trained *= 1 + ways.held_back.copies
        return int(trained + state + numbers + older) + read
    copies = sum(graph.copy_bytes(p) for p in _trained(graph, stage))
    away = trained - trained // parts + copies  # its gradients are there from sum to update
    return int(state / parts + numbers + older) + read - away


def state_bytes(graph: Graph, stage: Stage, profile: Profile) -> float:
    """Return the bytes of the state of a stage's optimizer, but for its numbers."""
    return profile.update.state_bytes_per_byte * trained_bytes(graph, stage, reached=True)


def _number_bytes(graph: Graph, stage: Stage, profile: Profile) -> float:
    """Return the bytes of single numbers in that state: near at all times, on all that divide it.

    Ignores:  that a rank with a part of the stage has them of fewer parameters.
    """
    names = {graph.nodes[p].name for p in stage.parameters}
    return profile.update.state_bytes_per_tensor * sum(
        graph.gradients.get(name) is not None for name in names
    )


def _undo_bytes(graph: Graph, stage: Stage, profile: Profile) -> int:
    """Return the bytes of weights and optimizer state that are kept so as to undo an update."""
    state = state_bytes(graph, stage, profile) + _number_bytes(graph, stage, profile)
    return int(trained_bytes(graph, stage) + state)


def check_profile(graph: Graph, profile: Profile) -> None:
    """Raise unless `profile` is of `graph`.

    Raises:   ProfileError: it is stale.
    """
    if profile.graph != graph.digest or len(profile.op_s) != len(graph.nodes):
        message = f"the profile is of graph {profile.graph}, not of {graph.digest}"
        raise ProfileError(message, hint="measure this graph")
