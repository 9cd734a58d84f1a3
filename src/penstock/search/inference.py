"""Inference: the forward pipeline of most batches a second over unlike devices.

Where to cut, on which devices and in which order, so that the busiest stage or link is as little
busy as can be.  A stage's thread computes, and pays its end of both messages (`Link.end_s`); a link
has a message for size_bytes / bytes_per_s; the largest of all is the time between two batches.
Devices are taken host by host, a host whole but for the last one, so that ranks are numbered along
the pipeline.  Hosts alike in device, number of devices and region are one kind, of which only the
number counts.

Exact, by dynamic programming over (layers done, hosts of each kind used, the last one).  A stage
whose right end is not known yet has a part of its time: of states that are no worse in both, what
is busiest so far and that part, only those are kept.

Source: arXiv:2110.14895 (layers, device types, links and memory in one recursion).
Ignores:  messages that skip a stage; ops that several stages repeat; the latency of links, which
          delays a batch but not the next one; cards that other pipelines share.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.cluster.cluster import Cluster, Host, Link
from penstock.cluster.order import placed
from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.plan.of_plan import lower
from penstock.plan.plan import Decision, Plan, plan_by_hand
from penstock.profile.kinds import Profiles, as_tuple, place_of
from penstock.profile.profile import Profile
from penstock.search.loaded import fastest_loaded, loaded_decisions
from penstock.simulate.of_program import simulate
from penstock.timeline.timeline import peak_bytes, step_s
from penstock.units import format_bytes, format_seconds

_WINDOWS = 8, 24  # batches; what 16 more take is a stream's time


@dataclass(frozen=True, slots=True)
class Layers:
    """Pieces of a model between cut points, forward only.

    seconds      [kind of device][piece], before it: prefix sums
    crossing     [piece]: bytes of the message before it; 0 before the first
    weights      [piece]: nodes of the weights and buffers that it reads, with their bytes
    live_bytes   [piece]: most bytes of values alive at once
    call_s       [kind of device]: of calling a stage
    """

    seconds: tuple[tuple[float, ...], ...]
    crossing: tuple[int, ...]
    weights: tuple[tuple[tuple[int, int], ...], ...]
    live_bytes: tuple[int, ...]
    call_s: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.crossing)

    def compute_s(self, kind: int, first: int, end: int) -> float:
        """Return the seconds of pieces first .. end - 1 as one stage."""
        return self.seconds[kind][end] - self.seconds[kind][first] + self.call_s[kind]

    def held_bytes(self, first: int, end: int) -> int:
        """Return the bytes that a stage of these pieces holds at most."""
        held = dict(itertools.chain.from_iterable(self.weights[first:end]))
        return sum(held.values()) + max(self.live_bytes[first:end])


def layers_of(graph: Graph, profiles: Profiles) -> Layers:
    """Return the pieces of `graph`, with their seconds on each profiled kind of device."""
    rows, places = as_tuple(profiles), [point.at for point in graph.cut_points]
    count = len(places) + 1
    forward = [at for at, node in enumerate(graph.nodes) if node.phase == "F"]
    piece = {at: bisect.bisect_right(places, min(at, graph.loss)) for at in forward}
    took = [[0.0] * count for _ in rows]
    weights: list[dict[int, int]] = [{} for _ in range(count)]
    for at in (at for at in forward if graph.nodes[at].kind == "op"):
        for row, profile in zip(took, rows, strict=True):
            row[piece[at]] += profile.op_s[at]
        for source in graph.nodes[at].inputs:
            if graph.nodes[source].kind in ("parameter", "buffer"):
                weights[piece[at]][source] = graph.nodes[source].size_bytes
    return Layers(
        tuple((0.0, *itertools.accumulate(row)) for row in took),
        (0, *(point.forward_bytes for point in graph.cut_points)),
        tuple(tuple(each.items()) for each in weights),
        _live_bytes(graph, piece, count),
        tuple(profile.call_s for profile in rows),
    )


def _live_bytes(graph: Graph, piece: dict[int, int], count: int) -> tuple[int, ...]:
    """Return for each piece the most bytes of its values that are alive at once."""
    last: dict[int, int] = {}
    for at in piece:
        for source in {at, *graph.nodes[at].inputs}:
            last[source] = at
    dies: dict[int, list[int]] = {}
    for source, at in last.items():
        dies.setdefault(at, []).append(source)
    now, most = 0, [0] * count
    for at, where in piece.items():
        node = graph.nodes[at]
        now += node.size_bytes if node.kind in ("op", "input") and node.storage == at else 0
        most[where] = max(most[where], now)
        for source in dies.get(at, ()):
            dead = graph.nodes[source]
            now -= dead.size_bytes if dead.kind in ("op", "input") and dead.storage == source else 0
    return tuple(most)


class _HostKind(NamedTuple):
    """Hosts that are alike: their names, and the place of their device's profile."""

    hosts: tuple[Host, ...]
    profile: int
    memory_bytes: int


class _Stand(NamedTuple):
    """A pipeline up to some layer.

    busy_s   the busiest stage or link so far, the last stage left out
    last_s   what the last stage takes so far: its right end is not known
    stages   (kind of host, first piece after the stage)
    """

    busy_s: float
    last_s: float
    stages: tuple[tuple[int, int], ...]


_State = tuple[tuple[int, ...], int, int]  # hosts used of each kind, the last kind, its devices


class Pipeline(NamedTuple):
    """What was found: hosts in order, cuts, ranks, and the seconds between two batches."""

    hosts: tuple[str, ...]
    cuts: tuple[int, ...]
    period_s: float

    @property
    def num_ranks(self) -> int:
        """Return the stages, each on a rank of its own."""
        return len(self.cuts) + 1


def fastest(layers: Layers, profiles: Sequence[Profile], cluster: Cluster, most: int) -> Pipeline:
    """Return the pipeline of at most `most` ranks with the least time between two batches.

    Of equal ones, one of the fewest stages.
    Raises:   PlanError: the layers do not fit the memory of the devices, whatever is done.
    """
    finder = _Finder(layers, _kinds(profiles, cluster), cluster, most)
    found = finder.best()
    if found is None:
        whole = format_bytes(layers.held_bytes(0, len(layers)))
        message = f"no pipeline fits: the model needs about {whole} on one device"
        raise PlanError(message, hint="use more devices, or larger ones")
    names = [[host.name for host in kind.hosts] for kind in finder.kinds]
    hosts: list[str] = []
    left = 0
    for kind, _ in found.stages:
        if not left:
            hosts.append(names[kind].pop(0))
            left = finder.kinds[kind].hosts[0].num_devices
        left -= 1
    cuts = tuple(end - 1 for _, end in found.stages[:-1])
    return Pipeline(tuple(hosts), cuts, max(found.busy_s, found.last_s))


def _kinds(profiles: Sequence[Profile], cluster: Cluster) -> list[_HostKind]:
    groups: dict[tuple[str, str, int], list[Host]] = {}
    for host in cluster.hosts:
        groups.setdefault((host.device, host.region, host.num_devices), []).append(host)
    memory = {kind.name: kind.memory_bytes for kind in cluster.devices}
    return [
        _HostKind(tuple(row), place_of(profiles, device), memory[device])
        for (device, _, _), row in groups.items()
    ]


class _Finder:
    """The recursion; `best` runs it."""

    def __init__(self, layers: Layers, kinds: list[_HostKind], cluster: Cluster, most: int) -> None:
        self.layers, self.kinds, self.cluster, self.most = layers, kinds, cluster, most
        self.stands: list[dict[_State, list[_Stand]]] = [{} for _ in range(len(layers) + 1)]
        self.limit_s = float("inf")  # of a pipeline that is found already
        self.fits = {
            (kind, first): self._most_pieces(kind, first)
            for kind in range(len(kinds))
            for first in range(len(layers))
        }

    def best(self) -> _Stand | None:
        nothing = (0,) * len(self.kinds)
        for kind in range(len(self.kinds)):
            self._put(0, (_more(nothing, kind), kind, 1), _Stand(0.0, 0.0, ()))
        for first in range(len(self.layers)):
            for state, row in self.stands[first].items():
                for stand in row:
                    for after in self._after(state) if first else [(state, None)]:
                        self._extend(first, stand, *after)
        ends = itertools.chain.from_iterable(self.stands[-1].values())
        return min(ends, key=lambda s: (max(s.busy_s, s.last_s), len(s.stages)), default=None)

    def _after(self, state: _State) -> Iterator[tuple[_State, Link | None]]:
        """Yield where the next stage can be, with the link to it."""
        used, kind, devices = state
        if devices < self.kinds[kind].hosts[0].num_devices:
            yield (used, kind, devices + 1), self._inside()
            return
        for other, there in enumerate(self.kinds):
            if used[other] < len(there.hosts):
                yield (_more(used, other), other, 1), self._link(kind, other)

    def _extend(self, first: int, stand: _Stand, state: _State, link: Link | None) -> None:
        """Add every stage that begins with piece `first`, on the device that `state` says."""
        kind, layers = state[1], self.layers
        busy_s, end_s = stand.busy_s, 0.0
        if first:
            if link is None or len(stand.stages) == self.most:
                return
            size = layers.crossing[first]
            end_s = link.end_s(size)
            busy_s = max(busy_s, stand.last_s + end_s, size / link.bytes_per_s)
        profile = self.kinds[kind].profile
        for end in range(first + 1, self.fits[kind, first] + 1):
            last_s = end_s + layers.compute_s(profile, first, end)
            if max(busy_s, last_s) > self.limit_s:
                break
            self._put(end, state, _Stand(busy_s, last_s, (*stand.stages, (kind, end))))

    def _put(self, at: int, state: _State, stand: _Stand) -> None:
        row = self.stands[at].setdefault(state, [])
        if any(_no_worse(other, stand) for other in row):
            return
        row[:] = [other for other in row if not _no_worse(stand, other)] + [stand]
        if at == len(self.layers):
            self.limit_s = min(self.limit_s, max(stand.busy_s, stand.last_s))

    def _most_pieces(self, kind: int, first: int) -> int:
        """Return the end of the longest stage from `first` on that fits such a device."""
        layers, room = self.layers, self.kinds[kind].memory_bytes
        held: dict[int, int] = {}
        most = 0
        for end in range(first + 1, len(layers) + 1):
            held |= dict(layers.weights[end - 1])
            most = max(most, layers.live_bytes[end - 1])
            if sum(held.values()) + most > room:
                return end - 1
        return len(layers)

    def _inside(self) -> Link | None:
        return self.cluster.inside

    def _link(self, a: int, b: int) -> Link | None:
        first, second = self.kinds[a].hosts[0], self.kinds[b].hosts[0]
        return self.cluster.between if first.region == second.region else self.cluster.across


def _more(used: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] + 1, *used[kind + 1 :])


def _no_worse(a: _Stand, b: _Stand) -> bool:
    own, other = (a.busy_s, a.last_s, len(a.stages)), (b.busy_s, b.last_s, len(b.stages))
    return all(mine <= theirs for mine, theirs in zip(own, other, strict=True))


# -- plans ----------------------------------------------------------------------------------------


class Streamed(NamedTuple):
    """A plan of a forward pipeline, the seconds between two batches of a stream, and its bytes."""

    plan: Plan
    period_s: float
    peak_bytes: tuple[int, ...]


def best_stream(
    graph: Graph, profiles: Profiles, cluster: Cluster, *, most: int | None = None
) -> Streamed:
    """Return the plan of the fastest pipeline, simulated.

    Where it does not fit, weights wait in far memory (loaded.py).
    most:     ranks; default: as many as there are.
    Raises:   PlanError: nothing fits the memory.
    """
    rows, most = as_tuple(profiles), most or cluster.num_ranks
    layers = layers_of(graph, rows)
    try:
        found = fastest(layers, rows, cluster, most)
    except PlanError as problem:
        made = fastest_loaded(graph, rows, cluster, most)
        if made is None:
            raise
        plan = replace(made.plan, decisions=loaded_decisions(made.plan, problem.message))
        return Streamed(plan, made.step_s / plan.num_micro_batches, made.peak_bytes)
    standing = tuple(host.name for host in cluster.hosts[: len(found.hosts)])
    hosts = () if found.hosts == standing else found.hosts
    streamed = stream_of(graph, rows, cluster, (found.cuts, hosts))
    even = even_stream(graph, rows, cluster, found.num_ranks)
    why = f"{format_seconds(streamed.period_s)} between two batches"
    why += f", with an even split {format_seconds(even.period_s)}"
    stages = f"{found.num_ranks} of {cluster.num_ranks} devices"
    made = (
        Decision("ranks", stages, "search", why),
        Decision("hosts", ", ".join(found.hosts), "search", "the busiest stage or link is least"),
        Decision("cuts", ", ".join(streamed.plan.cut_names) or "uncut", "search", _busy(streamed)),
    )
    return streamed._replace(plan=replace(streamed.plan, decisions=made))


def _busy(streamed: Streamed) -> str:
    sizes = ", ".join(map(format_bytes, streamed.peak_bytes))
    return f"each rank holds {sizes}"


def even_stream(graph: Graph, profiles: Profiles, cluster: Cluster, num_ranks: int) -> Streamed:
    """Return the pipeline whose stages have equally many pieces, on the first ranks as they are."""
    pieces = len(graph.cut_points) + 1
    cuts = tuple(pieces * stage // num_ranks - 1 for stage in range(1, num_ranks))
    return stream_of(graph, profiles, cluster, (cuts, ()))


def stream_of(
    graph: Graph,
    profiles: Profiles,
    cluster: Cluster,
    where: tuple[Sequence[int], tuple[str, ...]],
) -> Streamed:
    """Return a pipeline cut at `where[0]` on the hosts `where[1]`, simulated.

    The time between two batches is what 16 more of them take.
    """
    cuts, hosts = where
    taken, made = list[float](), list[Streamed]()
    for count in _WINDOWS:
        plan = plan_by_hand(graph, cuts, "forward_only", num_micro_batches=count)
        plan = plan.changed(hosts=hosts)
        timeline = simulate(lower(plan, graph), profiles, placed(cluster, hosts), spans=False)
        taken.append(step_s(timeline))
        made.append(Streamed(plan, 0.0, peak_bytes(timeline)))
    period_s = (taken[1] - taken[0]) / (_WINDOWS[1] - _WINDOWS[0])
    return made[0]._replace(period_s=period_s)
