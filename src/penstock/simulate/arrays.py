"""Prepare: a program, its costs and a cluster as the arrays that the loops of kernel.py take."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster, Link
from penstock.errors import ClusterError
from penstock.program.codes import (
    BEGIN_OFFLOAD,
    BEGIN_RELOAD,
    COLLECT,
    COMPUTE,
    JOINS,
    OPS,
    REDUCE,
    SEND,
    UNSHARD,
    UPDATE,
    WORKS,
)
from penstock.program.instructions import CollectHow
from penstock.program.program import Program
from penstock.program.reductions import AverageWeights, Guard, Reduction, Sum
from penstock.program.wiring import wire
from penstock.schedule.orders import KINDS, Action
from penstock.schedule.weight_rule import SYNCHRONOUS
from penstock.simulate import kernel
from penstock.simulate.costs import Costs, with_copies
from penstock.simulate.recorded import Recorded

Seconds: TypeAlias = Callable[[Action], float]
Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
_Arrays = TypeVar("_Arrays", bound=tuple[Any, ...])


def among(*chosen: int) -> Bools:
    """Return a table that says for each op whether it is one of `chosen`."""
    return np.isin(np.arange(len(OPS)), chosen)


SENDS = among(SEND)


def job_of(  # long: one line for each array
    program: Program,
    seconds: Costs | Recorded | Seconds,
    cluster: Cluster | None,
    *,
    capacity: int | None,
    spans: bool,
) -> kernel.Simulation:
    """Return the arrays that the loops are given, as they are at 0 s.

    Raises:   as `simulate`.
    """
    _check(program, cluster, capacity)
    given_s, start_s = None, np.zeros(program.num_ranks)
    if isinstance(seconds, Recorded):
        _check_recorded(program, seconds, cluster)
        given_s, start_s = seconds.message_s, seconds.start_s.copy()
    codes, num_ranks = program.code, program.num_ranks
    columns = codes.op, codes.kind, codes.stage, codes.micro_batch, codes.edge, codes.peer
    code = kernel.Code(*columns, codes.offsets)
    sizes = kernel.Extents(
        edges=len(program.edges),
        micro_batches=program.num_micro_batches * program.num_steps,
        stages=program.num_stages,
        replica=program.grid.places()[0],
        capacity=-1 if capacity is None else capacity,
    )
    wiring = wire(program.num_stages, program.edges)
    routed = cluster is not None or capacity is not None or given_s is not None
    routes = _routes(program, code, cluster, routed=routed)
    durations = _durations(program, seconds, cluster)
    return kernel.Simulation(
        code,
        sizes,
        kernel.IncomingEdges(wiring.into, wiring.into_offsets),
        routes,
        durations,
        kernel.Threads(codes.offsets[:-1].copy(), start_s, *map(np.zeros, [num_ranks] * 5)),
        _agenda(num_ranks),
        _mail(program, sizes, routes, given_s, packs=durations.packing_s.size > 0),
        _queues(program, seconds, cluster),
        _copies(program, sizes),
        _record(program, routes, spans=spans),
        _meetings(program, sizes, seconds, cluster),
    )


def begun(job: kernel.Simulation) -> kernel.Simulation:
    """Return a simulation that is played without changing `job`, which has not begun."""

    def apart(arrays: _Arrays) -> _Arrays:
        return type(arrays)(*map(copy, arrays))

    return job._replace(
        threads=apart(job.threads),
        agenda=apart(job.agenda),
        mail=apart(job.mail),
        queues=apart(job.queues),
        copies=apart(job.copies),
        record=apart(job.record),
        meetings=apart(job.meetings),
    )


def _check(program: Program, cluster: Cluster | None, capacity: int | None) -> None:
    if cluster is not None and cluster.num_ranks < program.num_ranks:
        numbers = f"{program.num_ranks} ranks on a cluster of {cluster.num_ranks}"
        hint = "describe more hosts, or use fewer ranks"
        raise ClusterError(f"a program of {numbers}", hint=hint)
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity is {capacity} messages; it must be None, or 0 or more")


def _check_recorded(program: Program, recorded: Recorded, cluster: Cluster | None) -> None:
    op, message_s = program.code.op, recorded.message_s
    lengths = {
        "work_s": (recorded.work_s, int(WORKS[op].sum())),
        "sum_s": (recorded.sum_s, int(JOINS[op].sum())),
        "start_s": (recorded.start_s, program.num_ranks),
    }
    if len(recorded.collect_s):
        lengths["collect_s"] = recorded.collect_s, int((op == COLLECT).sum())
    if message_s is not None:
        lengths["message_s"] = message_s, int(SENDS[op].sum())
    for name, (array, length) in lengths.items():
        if len(array) != length:
            raise ValueError(f"{name} has {len(array)} entries; this program needs {length}")
    if message_s is not None and cluster is not None:
        raise ValueError("messages are recorded, and there is a cluster; only one can say")


def _agenda(num_ranks: int, room: int = 1024) -> kernel.Agenda:
    """Return the agenda in which all ranks can walk, with `room` on the heap."""
    return kernel.Agenda(
        what=np.zeros(num_ranks, np.int64),
        message=np.zeros(num_ranks, np.int64),
        ready=np.arange(num_ranks)[::-1].copy(),
        height=np.array([num_ranks]),
        heap_s=np.zeros(room),
        heap=np.zeros(room, np.int64),
        pending=np.zeros(1, np.int64),
    )


def offsets_of(program: Program, chosen: Bools) -> Ints:
    """Return offsets of the instructions of every rank among all whose op is `chosen`."""
    rows = np.flatnonzero(chosen[program.code.op])
    return np.searchsorted(rows, program.code.offsets)


def _routes(
    program: Program, code: kernel.Code, cluster: Cluster | None, *, routed: bool
) -> kernel.Routes:
    size_bytes = np.array([edge.size_bytes for edge in program.edges], np.float64)
    offsets = peers = np.zeros(0, np.int64)
    if routed:
        offsets, peers = kernel.find_routes(code)
    link, lanes = np.zeros((len(peers), 5)), np.zeros((len(peers), 4), np.int64)
    lanes[:, kernel.FIRST], lanes[:, kernel.SECOND] = np.arange(len(peers)), -1
    if cluster is not None:
        senders = np.repeat(np.arange(program.num_ranks), np.diff(offsets)).tolist()
        for route, (sender, peer) in enumerate(zip(senders, peers.tolist(), strict=True)):
            one = cluster.link(sender, peer)
            copied_s = 1 / one.copy_bytes_per_s
            link[route] = one.latency_s, 1 / one.bytes_per_s, one.overhead_s, copied_s, one.slowdown
            for place, card in enumerate(cluster.lanes(sender, peer)):
                lanes[route, place] = len(peers) + card
        lanes[:, 2:] = _shared(lanes[:, :2], senders)
    return kernel.Routes(size_bytes, offsets, peers, link, lanes)


def _shared(lanes: Ints, senders: list[int]) -> Bools:
    """Return for both lanes of each route whether several ranks send on it."""
    first: dict[int, int] = {}
    shared = {-1: False}
    for sender, pair in zip(senders, lanes.tolist(), strict=True):
        for lane in pair:
            if first.setdefault(lane, sender) != sender:
                shared[lane] = lane >= 0
    return np.array(
        [[shared.get(lane, False) for lane in pair] for pair in lanes.tolist()], np.bool_
    ).reshape(-1, 2)  # also without any route


def _mail(
    program: Program,
    sizes: kernel.Extents,
    routes: kernel.Routes,
    given_s: Floats | None,
    *,
    packs: bool,
) -> kernel.Letters:
    messages = program.replicas * sizes.edges * sizes.micro_batches
    costly = bool(routes.link[:, [kernel.OVERHEAD, kernel.PER_COPIED_BYTE]].any()) or packs
    by_message = np.zeros((0, 3))
    if given_s is not None:
        costly, by_message = True, np.zeros((messages, 3))
        sends = np.flatnonzero(SENDS[program.code.op])
        by_message[_messages(program, sizes, sends)] = given_s
    return kernel.Letters(
        arrival_s=np.full(messages, kernel.ABSENT),
        end_s=np.zeros(messages if costly else 0),
        posted_s=np.full(messages if sizes.capacity >= 0 else 0, kernel.ABSENT),
        given_s=by_message,
        sent=np.zeros(len(routes.peer), np.int64),
        last=np.zeros(len(routes.peer) * max(sizes.capacity, 0), np.int64),
        free_s=np.zeros(int(routes.lanes[:, :2].max(initial=-1)) + 1),
    )


def _messages(program: Program, sizes: kernel.Extents, rows: Ints) -> Ints:
    """Return the number of the message of Sends, or of Collects as their readers wait for them."""
    codes = program.code
    owners = np.searchsorted(codes.offsets, rows, side="right") - 1
    edges = sizes.replica[owners] * sizes.edges + codes.edge[rows]
    return edges * sizes.micro_batches + codes.micro_batch[rows]


def _queues(
    program: Program, seconds: Costs | Recorded | Seconds, cluster: Cluster | None
) -> kernel.Queues:
    """Return the queues; groups: the reductions, then for each rank of a pipeline its replicas."""
    codes, num_ranks, grid = program.code, program.num_ranks, program.grid
    rows = np.flatnonzero(JOINS[codes.op])
    offsets, stages = np.searchsorted(rows, codes.offsets), codes.stage[rows].astype(np.int64)
    owners = np.repeat(np.arange(num_ranks), np.diff(offsets))
    reduces = codes.op[rows] == REDUCE
    groups = [np.array(each.ranks, np.int64) for each in codes.reductions]
    groups += [np.array(grid.column_of(rank), np.int64) for rank in grid.ranks_of(0)]
    gathered = np.where(reduces, -1, stages)
    group = np.where(reduces, codes.edge[rows], len(codes.reductions) + grid.places()[1][owners])
    items = _Items(group, groups, gathered, owners)
    taken_s = _taken_s(program, items, seconds, cluster)
    sharded = bool((codes.op == UNSHARD).any())
    return kernel.Queues(
        offsets=offsets,
        group=group,
        taken_s=taken_s,
        share=_shares(program, items, taken_s, seconds, cluster),
        gathers=np.where(reduces, -1, owners * program.num_stages + stages),
        after=_after(program, rows, owners),
        issued_s=np.zeros(len(rows)),
        begun_s=np.zeros(len(rows)),
        over_s=np.zeros(len(rows)),
        issued=np.zeros(num_ranks, np.int64),
        over=np.zeros(num_ranks, np.int64),
        counted=np.zeros(num_ranks, np.int64),
        came=np.zeros(len(groups), np.int64),
        member=np.concatenate(groups),
        member_offsets=np.cumsum([0, *map(len, groups)], dtype=np.int64),
        gathered_s=np.full(num_ranks * program.num_stages if sharded else 0, kernel.ABSENT),
        stack=np.zeros(num_ranks + 1, np.int64),
    )


def _meetings(
    program: Program,
    sizes: kernel.Extents,
    seconds: Costs | Recorded | Seconds,
    cluster: Cluster | None,
) -> kernel.CollectQueues:
    """Return the Collects of every rank, each as long as its slowest link takes."""
    codes, num_ranks, grid = program.code, program.num_ranks, program.grid
    rows = np.flatnonzero(codes.op == COLLECT)
    first = np.searchsorted(rows, codes.offsets[:-1]).astype(np.int64)
    firsts = np.array([each.ranks[0] for each in codes.meetings], np.int64)
    pairs = list(zip(codes.edge[rows].tolist(), codes.slot[rows].tolist(), strict=True))
    took = {pair: collect_s(program, *pair, cluster) for pair in set(pairs)}
    taken_s = np.array([took[pair] for pair in pairs], np.float64)
    if isinstance(seconds, Recorded) and len(seconds.collect_s):
        taken_s = seconds.collect_s.copy()
    return kernel.CollectQueues(
        first=first,
        came=np.zeros(num_ranks, np.int64),
        over=np.zeros(num_ranks, np.int64),
        group=firsts[codes.slot[rows]] if len(rows) else np.zeros(0, np.int64),
        apart=grid.num_ranks,
        members=grid.tensor,
        taken_s=taken_s,
        share=_collect_shares(program, rows, taken_s, seconds, cluster),
        message=_messages(program, sizes, rows),
        issued_s=np.zeros(len(rows)),
        free_s=np.zeros(num_ranks),
        times_s=np.zeros((len(rows), 2)),
    )


def _collect_shares(
    program: Program,
    rows: Ints,
    taken_s: Floats,
    seconds: Costs | Recorded | Seconds,
    cluster: Cluster | None,
) -> Floats:
    """Return the part of its rank's core that each Collect takes while it lasts; empty: none."""
    if cluster is None or isinstance(seconds, Recorded) or not len(rows):
        return np.zeros(0)
    codes, spare = program.code, _spare(program, cluster)
    owners = np.searchsorted(codes.offsets, rows, side="right") - 1
    ranks_of: list[int] = owners.tolist()
    edges: list[int] = codes.edge[rows].tolist()
    slots: list[int] = codes.slot[rows].tolist()
    keys = list(zip(ranks_of, edges, slots, strict=True))
    lost: dict[tuple[int, int, int], float] = {}
    for rank, edge, meeting in set(keys):
        ranks, how = codes.meetings[meeting]
        size_bytes = _collected_bytes(program, edge, how)
        times = {"sum": 2.0, "gather": float(len(ranks))}.get(how, 1.0)
        sent_bytes = times * (len(ranks) - 1) / len(ranks) * size_bytes
        own_s = lost_s(cluster.slowest_link(ranks), sent_bytes, 0.0, spare[rank])
        lost[rank, edge, meeting] = own_s
    busy_s = np.array([lost[key] for key in keys])
    if not busy_s.any():
        return np.zeros(0)
    return np.minimum(1.0, busy_s / np.maximum(taken_s, 1e-12))


def _collected_bytes(program: Program, edge: int, how: CollectHow) -> int:
    collects = program.edges[edge].collects
    return next(each.size_bytes for each in collects if each.how == how)


def collect_s(program: Program, edge: int, meeting: int, cluster: Cluster | None) -> float:
    """Return the seconds of one Collect; 0 without a cluster."""
    ranks, how = program.code.meetings[meeting]
    if cluster is None:
        return 0.0
    size_bytes = _collected_bytes(program, edge, how)
    if how == "sum":
        return cluster.sum_s(size_bytes, ranks)
    if how == "exchange":
        return cluster.collective_s("all_to_all", size_bytes, ranks) + cluster.ends_s(ranks)
    if how == "scatter":
        return cluster.collective_s("reduce_scatter", size_bytes, ranks) + cluster.ends_s(ranks)
    whole = size_bytes * len(ranks)
    return cluster.collective_s("all_gather", whole, ranks) + cluster.ends_s(ranks)


def _sum_s(
    program: Program,
    reduction: Reduction,
    seconds: Costs | Recorded | Seconds,
    cluster: Cluster | None,
) -> float:
    """Return the seconds of a reduction; of a sum in shards each rank gets only its own.

    Unequal shards take as long as if all were as large as the largest.
    """
    if isinstance(reduction, Guard):
        assert program.end.guard is not None, "the plan says who guards whom"
        if not isinstance(seconds, Costs):
            return 0.0
        sizes = seconds.guard_bytes.tolist()
        return exchange_s(sizes, seconds.guard_s, cluster, program.end.guard.apart)
    kept_s, size_bytes, ranks = 0.0, reduction.size_bytes, reduction.ranks
    topology = program.end.topology_of(reduction.word)
    is_tied = isinstance(reduction, Sum) and reduction.how == "tied"
    if (
        isinstance(reduction, Sum | AverageWeights)
        and not is_tied
        and isinstance(seconds, Costs)
        and len(seconds.shards_s)
    ):
        kept_s = float(seconds.shards_s[reduction.stage])
    if isinstance(reduction, AverageWeights):  # in the mean of all steps
        taken_s = 0.0 if cluster is None else cluster.sum_s(size_bytes, ranks, topology)
        return (kept_s + taken_s) / reduction.every
    if cluster is None or len(ranks) == 1:
        return kept_s
    if reduction.word == "shards":
        largest_bytes = size_bytes * program.stretch(ranks[0])
        taken_s = kept_s + cluster.collective_s("reduce_scatter", largest_bytes, ranks)
        return taken_s + cluster.ends_s(ranks)
    return kept_s + cluster.sum_s(size_bytes, ranks, topology)


def exchange_s(sizes: Sequence[int], busy_s: float, cluster: Cluster | None, apart: int) -> float:
    """Return the seconds in which each rank gets so many bytes from the one `apart` before it.

    busy_s:  of the slowest, what it does with them.
    """
    count = len(sizes)
    if cluster is None or count < 2:
        return busy_s
    pairs = ((rank, (rank - apart) % count) for rank in range(count) if sizes[rank])
    sent_s = (cluster.message_s(ward, rank, sizes[rank]) for rank, ward in pairs)
    return busy_s + max(sent_s, default=0.0)


class _Items(NamedTuple):
    """Collectives as ranks have them in their queues.

    group:     which of `groups` takes part; the first ones are those of the program's reductions.
    gathered:  the stage of a gather; -1: a sum.
    """

    group: Ints
    groups: Sequence[Ints]
    gathered: Ints
    owners: Ints


def _taken_s(
    program: Program,
    items: _Items,
    seconds: Costs | Recorded | Seconds,
    cluster: Cluster | None,
) -> Floats:
    """Return the seconds of each collective."""
    if isinstance(seconds, Recorded):
        return seconds.sum_s.copy()
    taken_s, reduces = np.zeros(len(items.group)), items.gathered < 0
    if isinstance(seconds, Costs):
        places = (items.group - len(program.code.reductions))[~reduces].tolist()
        gathers = zip(places, items.gathered[~reduces].tolist(), strict=True)
        taken_s[~reduces] = _gathers_s(program, list(gathers), seconds, cluster)
    reduce_s = [_sum_s(program, each, seconds, cluster) for each in program.code.reductions]
    taken_s[reduces] = np.array(reduce_s)[items.group[reduces]]
    return taken_s


def _shares(
    program: Program,
    items: _Items,
    taken_s: Floats,
    seconds: Costs | Recorded | Seconds,
    cluster: Cluster | None,
) -> Floats:
    """Return the part of its rank's core that each collective takes while it lasts; empty: none.

    What sums take over the slowest link of its ring: as measured (`Link.sum_core_s`), or what the
    link takes (`Link.beside_s`) and, where the rank has no core to spare, what its second thread
    does: copies from and to messages, and of what it keeps.
    """
    if cluster is None or isinstance(seconds, Recorded):
        return np.zeros(0)
    group_of: list[int] = items.group.tolist()
    gathered: list[int] = items.gathered.tolist()
    owners: list[int] = items.owners.tolist()
    bytes_kept = {
        (group, stage): _sent_and_kept(program, group, stage, seconds, len(items.groups[group]))
        for group, stage in set(zip(group_of, gathered, strict=True))
    }
    rows: list[list[int]] = [each.tolist() for each in items.groups]
    links = [cluster.slowest_link(ranks) if len(ranks) > 1 else None for ranks in rows]
    spare = _spare(program, cluster)
    busy_s = np.zeros(len(items.group))
    columns = zip(group_of, gathered, owners, strict=True)
    for at, (group, stage, rank) in enumerate(columns):
        (sent_bytes, kept_s), link = bytes_kept[group, stage], links[group]
        if link is not None and sent_bytes:
            busy_s[at] = lost_s(link, sent_bytes, kept_s, spare[rank])
    if not busy_s.any():
        return np.zeros(0)
    return np.minimum(1.0, busy_s / np.maximum(taken_s, 1e-12))


def lost_s(link: Link, sent_bytes: float, kept_s: float, spare: float | None) -> float:
    """Return the seconds of its core that a rank loses to a collective: as measured, or estimated.

    spare:  of another core; None: what it computes on has none beside it, and another copies.
    """
    if own_s := link.sum_core_s(sent_bytes):
        return (own_s + kept_s) * (1 - (spare or 0.0))
    copies_s = kept_s + 2 * link.end_s(sent_bytes)
    return link.beside_s(sent_bytes) + copies_s * (0.0 if spare is None else 1 - spare)


def _sent_and_kept(
    program: Program, group: int, stage: int, seconds: Costs | Seconds, count: int
) -> tuple[float, float]:
    """Return the bytes that each of `count` ranks sends in a collective, and the seconds of copies
    of what it keeps.
    """
    costs = seconds if isinstance(seconds, Costs) else None
    part = (count - 1) / count
    if stage >= 0:
        if costs is None or not len(costs.unshard_bytes):
            return 0.0, 0.0
        kept_s = float(costs.unshard_s[stage]) if len(costs.unshard_s) else 0.0
        return part * float(costs.unshard_bytes[stage]), kept_s
    reduction = program.code.reductions[group]
    size_bytes = float(reduction.size_bytes)
    match reduction:
        case Guard():  # its seconds say what it does; what it sends is not counted
            return 0.0, 0.0
        case Sum("shards"):
            shards_s = costs.shards_s if costs is not None else np.zeros(0)
            kept_s = float(shards_s[reduction.stage]) if len(shards_s) else 0.0
            return part * size_bytes, kept_s
        case AverageWeights():
            return 2 * part * size_bytes / reduction.every, 0.0
        case _:
            return 2 * part * size_bytes, 0.0


def _spare(program: Program, cluster: Cluster) -> list[float | None]:
    """Return the part of a core that each rank has besides the one that it computes with.

    None where each rank has a device of its own (`Host.cores` is 0).
    """
    hosts = [cluster.host_number(rank) for rank in range(program.num_ranks)]
    counts = Counter(hosts)
    spare: dict[int, float | None] = {}
    for host, count in counts.items():
        cores = cluster.hosts[host].cores
        spare[host] = min(1.0, max(0.0, cores / count - 1)) if cores else None
    return [spare[host] for host in hosts]


def _after(program: Program, rows: Ints, owners: Ints) -> Ints:
    """Return for each collective the one before it that its thread awaits first, or -1.

    rows:     of the collectives.  owners: their ranks.
    """
    codes, after = program.code, np.full(len(rows), -1, np.int64)
    names = np.array([one.word == "shards" for one in codes.reductions], np.bool_)
    sums = np.flatnonzero(codes.op[rows] == REDUCE)
    sums = sums[names[codes.edge[rows[sums]]]] if len(names) else sums
    alike = owners[sums[1:]] == owners[sums[:-1]]
    after[sums[1:][alike]] = sums[:-1][alike]
    return after


def _copies(program: Program, sizes: kernel.Extents) -> kernel.CopyLanes:
    if not np.isin(program.code.op, (BEGIN_OFFLOAD, BEGIN_RELOAD)).any():
        return kernel.CopyLanes(np.zeros(0), np.zeros((0, 2)))
    states, kept = 2 * program.num_ranks, program.replicas * sizes.micro_batches
    count = (states + kept) * program.num_stages
    return kernel.CopyLanes(np.full(count, kernel.ABSENT), np.zeros((program.num_ranks, 2)))


def _gathers_s(
    program: Program, gathers: list[tuple[int, int]], costs: Costs, cluster: Cluster | None
) -> list[float]:
    """Return the seconds of gathers, each by a rank of the pipeline and all its replicas.

    Of unequal shards as of ones that are all as large as the largest: nobody is done before it.
    """
    taken_s: dict[tuple[int, int], float] = {}
    for rank, stage in set(gathers):
        took_s = float(costs.unshard_s[stage]) if len(costs.unshard_s) else 0.0
        if cluster is not None and len(costs.unshard_bytes):
            size_bytes, ranks = int(costs.unshard_bytes[stage]), program.grid.column_of(rank)
            size_bytes *= program.stretch(rank)
            took_s += cluster.collective_s("all_gather", size_bytes, ranks)
            took_s += cluster.ends_s(ranks)
        taken_s[rank, stage] = took_s
    return [taken_s[gather] for gather in gathers]


def _record(program: Program, routes: kernel.Routes, *, spans: bool) -> kernel.Stamps:
    works, sends = offsets_of(program, WORKS), offsets_of(program, SENDS)
    kept = len(routes.offsets) > 0 and spans
    return kernel.Stamps(
        works=works[:-1].copy(),
        work_s=np.zeros((int(works[-1]) if spans else 0, 2)),
        sends=sends[:-1].copy(),
        send_s=np.zeros((int(sends[-1]) if kept else 0, 2)),
    )


def _durations(
    program: Program, seconds: Costs | Recorded | Seconds, cluster: Cluster | None
) -> kernel.Durations:
    device, nothing = np.zeros(program.num_ranks, np.int64), np.zeros((2, 0, 0))
    if isinstance(seconds, Recorded):
        return kernel.Durations(nothing, device, seconds.work_s.copy(), nothing)
    if not isinstance(seconds, Costs):
        return kernel.Durations(nothing, device, _listed_s(program, seconds), nothing)
    num_stages = seconds.action_s.shape[1]
    if num_stages != program.num_stages:
        wanted = f"a program of {program.num_stages}"
        raise ValueError(f"costs of {num_stages} stages for {wanted}")
    if seconds.by_rank:
        if len(seconds.devices) != program.num_ranks:
            wanted = f"a program of {program.num_ranks}"
            raise ValueError(f"costs of {len(seconds.devices)} ranks for {wanted}")
        device[:] = range(program.num_ranks)
    elif seconds.devices != ("",):
        device[:] = list(_devices(program, seconds.devices, cluster))
    if seconds.packing_s.shape[1] not in (0, len(program.edges)):
        there = seconds.packing_s.shape[1]
        raise ValueError(f"packing of {there} edges for a program of {len(program.edges)}")
    packing_s = seconds.packing_s.copy()
    return kernel.Durations(with_copies(seconds.action_s), device, np.zeros(0), packing_s)


def _devices(program: Program, devices: tuple[str, ...], cluster: Cluster | None) -> Iterator[int]:
    """Yield for each rank the place of its device in `devices`."""
    if cluster is None:
        names = ", ".join(devices)
        raise ValueError(f'costs on devices {names}, but no cluster; name the only device ""')
    for rank in range(program.num_ranks):
        name = cluster.device_of(rank).name
        if name not in devices:
            names = ", ".join(devices)
            raise ValueError(f'rank {rank} is on a "{name}", and the costs are on devices {names}')
        yield devices.index(name)


def _listed_s(program: Program, seconds: Seconds) -> NDArray[np.float64]:
    """Return the seconds of all that works, in the order of the code; copies take none."""
    codes = program.code
    own = COMPUTE if program.weight_rule == SYNCHRONOUS else UPDATE
    asked = among(COMPUTE, own)
    parts: list[NDArray[np.float64]] = []
    for rank in range(program.num_ranks):
        part = codes.slice_of(rank)
        rows = part.start + np.flatnonzero(WORKS[codes.op[part]])
        wanted = asked[codes.op[rows]]
        taken_s, rows = np.zeros(len(rows)), rows[wanted]
        kinds: list[int] = codes.kind[rows].tolist()
        columns = kinds, codes.stage[rows].tolist(), codes.micro_batch[rows].tolist()
        actions = (Action(KINDS[kind], *where) for kind, *where in zip(*columns, strict=True))
        given_s = np.fromiter(map(seconds, actions), np.float64, len(rows))
        for wrong in np.flatnonzero(~((given_s >= 0) & np.isfinite(given_s)))[:1].tolist():
            action = Action(KINDS[kinds[wrong]], columns[1][wrong], columns[2][wrong])
            raise ValueError(f"{action} takes {given_s[wrong]} s; it must be 0 or more")
        taken_s[wanted] = given_s
        parts.append(taken_s)
    return np.concatenate(parts)
