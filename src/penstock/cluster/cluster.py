"""Cluster: device kinds, hosts, and links by level: inside a host, between hosts, across regions.

Ranks are numbered host by host, one per device.  All times on links are answered here.
"""

import math
from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from penstock.cluster import toml
from penstock.cluster.collectives import USUAL, Algorithm, Collective, best
from penstock.cluster.machine import Machine, detect
from penstock.cluster.routed import routed_s
from penstock.errors import ClusterError
from penstock.files import read_bytes, write_text
from penstock.typed import Endless
from penstock.units import GB, TFLOP, format_bytes, format_seconds

LEVELS = ("inside", "between", "across")
_LEAST, _MOST = 1e-9, 1e21  # rates, seconds, bytes: quotients and sums of them stay numbers
_MOST_RANKS = 10**6


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device that runs one rank.

    `notice_s`: seconds that the cloud warns before it takes a preemptible device.
    `mtbf_s`: mean seconds until a host of it is taken or fails; 0: not known.
    `copy_engine`: whether copies to the host's memory go on beside its computing by themselves.
    Raises:   ClusterError: an impossible number, or a name that is empty or not printable.
    """

    name: str
    memory_bytes: int
    flop_per_s: tuple[tuple[str, float], ...]  # by dtype name: ("float32", 19.5e12)
    memory_bytes_per_s: float
    usd_per_hour: float = 0.0
    preemptible: bool = False
    notice_s: float = 0.0
    mtbf_s: float = 0.0
    copy_engine: bool = False

    def __post_init__(self) -> None:
        where = f'device "{self.name}"'
        _check_names(where, (self.name, *(dtype for dtype, _ in self.flop_per_s)))
        rates = ((f"flop_per_s of {dtype}", rate) for dtype, rate in self.flop_per_s)
        for name, number in (
            ("memory_bytes", self.memory_bytes),
            ("memory_bytes_per_s", self.memory_bytes_per_s),
            *rates,
        ):
            _check(where, name, number, positive=True)
        _check(where, "usd_per_hour", self.usd_per_hour)
        _check(where, "notice_s", self.notice_s)
        _check(where, "mtbf_s", self.mtbf_s)

    def peak_flop_per_s(self, dtype: str) -> float:
        """Return the most FLOP/s for `dtype`, a name like "bfloat16".

        Raises:   ClusterError: the rate for this dtype is not known.
        """
        for name, rate in self.flop_per_s:
            if name == dtype:
                return rate
        known = ", ".join(name for name, _ in self.flop_per_s) or "none"
        hint = f"add {dtype} to flop_per_s of the device"
        raise ClusterError(
            f'device "{self.name}" has no FLOP/s for {dtype}; known: {known}', hint=hint
        )


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with some devices of one kind, named by `device`.

    `cores`: how many CPU cores its ranks share, where these are the devices; 0: each has its own.
    `kinds`: of each of its devices, where they are not alike; `device` is then that of one of them.
    `memory_bytes`: the most that each of its devices may hold; empty: what one of its kind has.
    """

    name: str
    device: str
    num_devices: int
    region: str = "here"
    cores: int = 0
    kinds: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_names(f'host "{self.name}"', (self.name, self.device, self.region, *self.kinds))
        if self.num_devices < 1:
            raise ClusterError(
                f'host "{self.name}" has {self.num_devices} devices', hint="a host has at least one"
            )
        if self.kinds and len(self.kinds) != self.num_devices:
            raise ClusterError(
                f'host "{self.name}" has {self.num_devices} devices of {len(self.kinds)} kinds',
                hint="name the kind of each device, or leave `kinds` out",
            )
        if self.cores < 0:
            hint = "give their number, or 0 where each device has its own"
            raise ClusterError(f'host "{self.name}" has {self.cores} cores', hint=hint)
        sizes = self.memory_bytes
        if sizes and (len(sizes) != self.num_devices or min(sizes) < 1):
            message = f'host "{self.name}" has memory_bytes {list(sizes)} of {self.num_devices}'
            raise ClusterError(f"{message} devices", hint="give 1 or more for each, or none")

    @property
    def named(self) -> set[str]:
        """Return the kinds of device that it names."""
        return {self.device, *self.kinds}


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs between two ranks; both directions can be busy at once.

    overhead_s        seconds of computing that each end loses per message
    copy_bytes_per_s  at which each end's computing thread copies the message; inf: it does not
    slowdown          fraction by which a compute takes longer beside a message of its rank
    assumed           whether it is a round guess: nobody has measured it, or said what it is
    core_s            seconds of computing that a sum costs a rank which has one core, and
    core_bytes_per_s  at which it costs more for what the rank sends; 0 and inf: not measured
    """

    latency_s: float
    bytes_per_s: Endless
    overhead_s: float = 0.0
    copy_bytes_per_s: Endless = math.inf
    slowdown: float = 0.0
    assumed: bool = False
    core_s: float = 0.0
    core_bytes_per_s: Endless = math.inf

    def __post_init__(self) -> None:
        for name in ("latency_s", "overhead_s", "slowdown", "core_s"):
            _check("link", name, getattr(self, name))
        for name in ("bytes_per_s", "copy_bytes_per_s", "core_bytes_per_s"):
            _check("link", name, getattr(self, name), positive=True, finite=False)

    def end_s(self, size_bytes: float) -> float:
        """Return the seconds of computing that each end loses for one message.

        overhead_s + size_bytes / copy_bytes_per_s
        """
        return self.overhead_s + size_bytes / self.copy_bytes_per_s

    def beside_s(self, size_bytes: float) -> float:
        """Return the seconds of an end's core that the link takes while `size_bytes` cross it.

        slowdown / (1 + slowdown) * size_bytes / bytes_per_s
        """
        return self.slowdown / (1 + self.slowdown) * size_bytes / self.bytes_per_s

    def sum_core_s(self, sent_bytes: float) -> float:
        """Return the seconds that computes lose to a sum or a gather beside them, as measured.

        core_s + sent_bytes / core_bytes_per_s; 0: not measured.
        sent_bytes:  by each rank.
        """
        return self.core_s + sent_bytes / self.core_bytes_per_s

    def __str__(self) -> str:
        """Return one line: "5.00 us + 300 GB/s, each end 2.00 us"."""
        copy = (
            f" + {self.copy_bytes_per_s / GB:.3g} GB/s"
            if math.isfinite(self.copy_bytes_per_s)
            else ""
        )
        end = (
            f", each end {format_seconds(self.overhead_s)}{copy}" if self.overhead_s or copy else ""
        )
        slow = f", slows computes by {100 * self.slowdown:.3g} %" if self.slowdown else ""
        rate = f"{format_seconds(self.latency_s)} + {self.bytes_per_s / GB:.3g} GB/s"
        core = f" + {self.core_bytes_per_s / GB:.3g} GB/s" * math.isfinite(self.core_bytes_per_s)
        sums = f", a sum takes {format_seconds(self.core_s)}{core} of a core" if self.core_s else ""
        return f"{rate}{end}{slow}{sums}{', assumed' if self.assumed else ''}"


@dataclass(frozen=True, slots=True)
class HostPair:
    """The link from one host to another, named `source` and `target`, where it is not the level's.

    It is that of the way back too, unless there is a pair for that.
    """

    source: str
    target: str
    latency_s: float
    bytes_per_s: Endless
    overhead_s: float = 0.0
    copy_bytes_per_s: Endless = math.inf
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        self.link()

    def link(self) -> Link:
        """Return the link.

        Raises:   ClusterError: an impossible number.
        """
        own = self.latency_s, self.bytes_per_s, self.overhead_s, self.copy_bytes_per_s
        return Link(*own, self.slowdown)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts with their devices, and a link for each level; None for a level that nobody needs.

    pairs:    hosts with a link of their own, in place of that between them or across regions.
    order:    by rank its device, where ranks are not numbered host by host; no file has it.
    Raises:   ClusterError: no host, two of the same name, an unknown device kind; a pair twice, or
              of a host that is not there.
    """

    devices: tuple[DeviceKind, ...]
    hosts: tuple[Host, ...]
    inside: Link | None = None
    between: Link | None = None
    across: Link | None = None
    pairs: tuple[HostPair, ...] = ()
    order: tuple[int, ...] = ()
    _ends: tuple[int, ...] = field(
        init=False, repr=False, compare=False
    )  # rank after the last one of each host
    _own: dict[tuple[str, str], Link] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ClusterError("a cluster without hosts", hint="add a [[host]]")
        for what, names in (
            ("device", [kind.name for kind in self.devices]),
            ("host", [host.name for host in self.hosts]),
        ):
            for name in names:
                if names.count(name) > 1:
                    raise ClusterError(
                        f'{names.count(name)} {what}s are named "{name}"',
                        hint="give each its own name",
                    )
        kinds = {kind.name for kind in self.devices}
        for host in self.hosts:
            for name in host.named - kinds:
                there = ", ".join(sorted(kinds)) or "none"
                hint = f"add a [[device]] of that name, or use one of: {there}"
                raise ClusterError(
                    f'host "{host.name}" has devices "{name}", which are not described',
                    hint=hint,
                )
        ends = tuple(accumulate(host.num_devices for host in self.hosts))
        if ends[-1] > _MOST_RANKS:
            hint = f"describe at most {_MOST_RANKS}"
            raise ClusterError(f"a cluster of {ends[-1]} devices", hint=hint)
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "_own", _links_of(self.pairs, {host.name for host in self.hosts}))

    @property
    def num_ranks(self) -> int:
        return self._ends[-1]

    def host_of(self, rank: int) -> Host:
        """Return the host on which `rank` runs."""
        return self.hosts[self.host_number(rank)]

    def ranks_on(self, host: Host) -> Sequence[int]:
        """Return the ranks that run on `host`, which is one of `hosts`."""
        end = self._ends[self.hosts.index(host)]
        devices = range(end - host.num_devices, end)
        return tuple(map(self.order.index, devices)) if self.order else devices

    def device_of(self, rank: int) -> DeviceKind:
        """Return the kind of the device of `rank`."""
        number = self.host_number(rank)
        host = self.hosts[number]
        name = host.kinds[self._device(rank) - self._ends[number]] if host.kinds else host.device
        return next(kind for kind in self.devices if kind.name == name)

    def memory_of(self, rank: int) -> int:
        """Return the bytes that `rank` may hold: its own limit, or the memory of its device."""
        host = self.host_of(rank)
        if host.memory_bytes:
            return host.memory_bytes[self.ranks_on(host).index(rank)]
        return self.device_of(rank).memory_bytes

    @property
    def mtbf_s(self) -> float | None:
        """Return the mean seconds until one of the hosts is lost; None where that is not known.

        1 / sum over hosts of 1 / mtbf_s: hosts are lost independently, at any time alike.
        Ignores:  hosts of which it is not known.
        """
        kinds = {kind.name: kind.mtbf_s for kind in self.devices}
        known = [kinds[host.device] for host in self.hosts if kinds[host.device]]
        return 1 / sum(1 / mtbf_s for mtbf_s in known) if known else None

    def link(self, a: int, b: int) -> Link:
        """Return the link from a to b: `inside` a host, the pair's, `between` or `across` regions.

        Raises:   ClusterError: no such rank, a rank with itself, a level without a link.
        """
        if a == b:
            raise ClusterError(f"rank {a} has no link to itself")
        first, second = self.host_of(a), self.host_of(b)
        if self.pairs and (own := self._own.get((first.name, second.name))) is not None:
            return own
        level, link = "between", self.between
        if first is second:
            level, link = "inside", self.inside
        elif first.region != second.region:
            level, link = "across", self.across
        if link is None:
            where = f'ranks {a} and {b} on hosts "{first.name}" and "{second.name}"'
            raise ClusterError(
                f"{where} have no link: the cluster has none {level}", hint=f"describe [{level}]"
            )
        return link

    def message_s(self, a: int, b: int, size_bytes: int) -> float:
        """Return the seconds from when a message gets the wire until its last byte reaches `b`.

        latency_s + size_bytes / bytes_per_s; 0.0 from a rank to itself.

        Ignores:  waiting for earlier messages on the same lanes; what it costs the computing
                  threads (`Link.end_s`); the smaller bandwidth of small messages.
        Raises:   ClusterError: the two have no link.
        """
        if a == b:
            return 0.0
        link = self.link(a, b)
        return link.latency_s + size_bytes / link.bytes_per_s

    def all_reduce_s(
        self, size_bytes: float, ranks: Sequence[int], algorithm: Algorithm | None = None
    ) -> float:
        """Return the seconds of a sum over `ranks`, in their order.

        By the algorithm, or the faster of those that gloo and NCCL choose from: a ring,
        2 * (n - 1) * max over the ring's links of (latency_s + size_bytes / n / bytes_per_s) where
        no card is shared, and a double binary tree.  For two ranks both are
        2 * (latency_s + size_bytes / 2 / bytes_per_s); 0.0 for one rank.

        Ignores:  as collectives.py.
        Raises:   ClusterError: two ranks that exchange messages have no link.
        """
        if algorithm is None and len(ranks) == 2:  # often asked, so without building rounds
            link = self.link(ranks[0], ranks[1])
            return 2 * (link.latency_s + size_bytes / 2 / link.bytes_per_s)
        return self.collective_s("all_reduce", size_bytes, ranks, algorithm=algorithm)

    def collective_s(
        self,
        what: Collective,
        size_bytes: float,
        ranks: Sequence[int],
        *,
        algorithm: Algorithm | None = None,
    ) -> float:
        """Return the seconds of a collective over `ranks`, in their order.

        By the algorithm, or the fastest of those that gloo and NCCL choose from
        (`collectives.USUAL`).  0.0 for one rank.
        Raises:   as `collectives.way_of`.
        """
        among = USUAL[what] if algorithm is None else (algorithm,)
        return best(self, what, size_bytes, ranks=ranks, among=among).seconds

    def sum_s(self, size_bytes: float, ranks: Sequence[int], topology: str = "") -> float:
        """Return the seconds of a sum over `ranks` as ranks make it: all_reduce_s and `ends_s`.

        Over several hosts ranks without an accelerator sum through gloo, which is always a ring.

        topology:  along whose rounds it goes (cluster/routed.py); empty: as the transport sums.
        """
        if topology:
            return routed_s(self, topology, size_bytes, ranks)
        algorithm = "ring" if len(ranks) > 2 and self._is_through_gloo(ranks) else None
        return self.all_reduce_s(size_bytes, ranks, algorithm) + self.ends_s(ranks, rounds=2)

    def _is_through_gloo(self, ranks: Sequence[int]) -> bool:
        if any(self.device_of(rank).copy_engine for rank in ranks):
            return False
        return len({self.host_number(rank) for rank in ranks}) > 1

    def ends_s(self, ranks: Sequence[int], rounds: int = 1) -> float:
        """Return the seconds that a rank computes for the messages of a ring over `ranks`.

        rounds * (n - 1) * 2 overhead_s of the slowest link, whatever the size of the messages.

        rounds:  how often each part goes round: once in a gather, twice in a sum.
        """
        if len(ranks) < 2:
            return 0.0
        return rounds * (len(ranks) - 1) * 2 * self.slowest_link(ranks).overhead_s

    def slowest_link(self, ranks: Sequence[int]) -> Link:
        """Return the link of least bytes_per_s in the ring of `ranks`, which are two or more.

        Raises:   ClusterError: two neighbours have no link.
        """
        pairs = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        return min((self.link(a, b) for a, b in pairs), key=lambda each: each.bytes_per_s)

    def within(self, memory_bytes: int | Sequence[int] | None) -> "Cluster":
        """Return the cluster with the memory of every device cut to this; None: as it is.

        memory_bytes: of every device, or of each.
        Raises:   ClusterError: of another number of devices.
        """
        if memory_bytes is None:
            return self
        ranks = range(self.num_ranks)
        most = [memory_bytes] * len(ranks) if isinstance(memory_bytes, int) else list(memory_bytes)
        if len(most) != len(ranks):
            hint = "give one size for all, or one for each rank"
            raise ClusterError(f"memory of {len(most)} ranks, of {len(ranks)}", hint=hint)
        least = [min(size, self.memory_of(rank)) for rank, size in zip(ranks, most, strict=True)]
        if isinstance(memory_bytes, int) and not any(host.memory_bytes for host in self.hosts):
            sizes = (min(memory_bytes, kind.memory_bytes) for kind in self.devices)
            pairs = zip(self.devices, sizes, strict=True)
            kinds = tuple(replace(kind, memory_bytes=size) for kind, size in pairs)
            return replace(self, devices=kinds)
        rows = ((host, self.ranks_on(host)) for host in self.hosts)
        hosts = (replace(h, memory_bytes=tuple(least[rank] for rank in on)) for h, on in rows)
        return replace(self, hosts=tuple(hosts))

    def lanes(self, a: int, b: int) -> tuple[int, ...]:
        """Return the numbers of the lanes that messages from `a` to `b` share with other pairs.

        Inside a host: none.  Otherwise two network cards: 2 * host(a), on which all leave that
        host, and 2 * host(b) + 1, on which all reach that one, with hosts numbered as they stand.

        Ignores:  switches, and buses inside a host.
        """
        first, second = self.host_number(a), self.host_number(b)
        return () if first == second else (2 * first, 2 * second + 1)

    def host_number(self, rank: int) -> int:
        """Return the place among `hosts` of the one on which `rank` runs.

        Raises:   ClusterError: no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            hint = "use fewer ranks, or describe more hosts"
            raise ClusterError(
                f"rank {rank} is not in a cluster of {self.num_ranks} ranks", hint=hint
            )
        return bisect_right(self._ends, self._device(rank))

    def _device(self, rank: int) -> int:
        """Return the place of a rank's device among all of them, host by host."""
        return self.order[rank] if self.order else rank

    def __str__(self) -> str:
        """Return one line for the whole, and one for each device kind, host and link."""
        price_of = {kind.name: kind.usd_per_hour for kind in self.devices}
        usd = sum(
            sum(map(price_of.__getitem__, host.kinds or (host.device,) * host.num_devices))
            for host in self.hosts
        )
        price = f", {usd:.2f} usd/hour" if usd else ""
        lines = [f"{self.num_ranks} ranks on {len(self.hosts)} hosts{price}"]
        lines += [f"  device   {_describe(kind)}" for kind in self.devices]
        for host in self.hosts:
            own = self.ranks_on(host)
            apart = "-" if isinstance(own, range) else ", "
            ranks = f"ranks {apart.join(map(str, own if apart == ', ' else (own[0], own[-1])))}"
            kinds = ", ".join(host.kinds or (host.device,))
            lines.append(f"  host     {host.name}: {ranks} on {kinds}, {host.region}")
        lines += [f"  {name:8} {link}" for name, link in self._links() if link is not None]
        lines += [f"  pair     {one.source} to {one.target}: {one.link()}" for one in self.pairs]
        return "\n".join(lines)

    def _links(self) -> tuple[tuple[str, Link | None], ...]:
        return ("inside", self.inside), ("between", self.between), ("across", self.across)

    def save(self, path: Path | str) -> None:
        """Write the cluster to `path` as TOML, whole or not at all."""
        links = {name: link for name, link in self._links() if link is not None}
        own = {"pair": self.pairs} if self.pairs else {}
        write_text(path, toml.to_text({"device": self.devices, "host": self.hosts, **links, **own}))

    @classmethod
    def load(cls, path: Path | str) -> "Cluster":
        """Return the cluster that `path` describes (docs/cluster.md has the keys).

        Raises:   ClusterError: no such file, not TOML, a key that is missing or unknown, a value
                  of the wrong type, or numbers that no cluster can have.
        """
        content = read_bytes(path, ClusterError, "cluster")
        try:
            document = toml.parse(content)
            toml.check_keys("the file", document, ("device", "host", *LEVELS, "pair"))
            devices = tuple(
                toml.record(DeviceKind, *each) for each in toml.tables(document, "device")
            )
            hosts = tuple(toml.record(Host, *each) for each in toml.tables(document, "host"))
            links = {
                name: toml.record(Link, f"[{name}]", document[name])
                for name in LEVELS
                if name in document
            }
            pairs = tuple(toml.record(HostPair, *each) for each in toml.tables(document, "pair"))
            return cls(devices, hosts, *map(links.get, LEVELS), pairs=pairs)
        except ClusterError as problem:
            raise ClusterError(f"cluster {path}: {problem}", hint=problem.hint) from problem

    @property
    def holds_receives(self) -> bool:
        """Return whether a message takes memory as soon as its receive is posted.

        So on accelerators.
        """
        return any(device.copy_engine for device in self.devices)

    @classmethod
    def here(cls, ranks: int | None = None) -> "Cluster":
        """Return this machine as one host: a rank per accelerator, or per core without any.

        `ranks` overrides how many share the machine; each is a device with its part of the
        memory, and of the cores where there are enough for all to have one.  Cores and memory are
        what this process may use; accelerators are found only when the caller has imported torch.
        FLOP/s, memory bandwidth and the link are round guesses (CPU: 30 GFLOP/s in float32 and
        10 GB/s a core, messages through shared memory), to be replaced by measuring; the link says
        so (`Link.assumed`), and so does a plan that rests on it.
        Raises:   ClusterError: `ranks` is less than 1, or more than the accelerators there are.
        """
        return _here(detect(), ranks)


def _here(machine: Machine, ranks: int | None) -> Cluster:
    found = machine.accelerators
    count = ranks if ranks is not None else len(found) or machine.cores
    if count < 1 or (found and count > len(found)):
        limit = f"it has {len(found)} accelerators" if found else "there must be at least one"
        raise ClusterError(
            f"{count} ranks on this machine; {limit}", hint="give another number of ranks"
        )
    if found:
        least = min(found[:count], key=lambda each: each.memory_bytes)
        rates = (("float32", 15.0 * TFLOP), ("bfloat16", 100.0 * TFLOP))
        device = DeviceKind(
            *(least.name, least.memory_bytes, rates, 1000.0 * GB),
            copy_engine=all(each.has_copy_engine for each in found[:count]),
        )
        link = Link(latency_s=10e-6, bytes_per_s=20.0 * GB, assumed=True)
    else:
        cores = max(1.0, machine.cores / count)  # with fewer, ranks share them: Host.cores
        device = DeviceKind(
            "cpu", machine.memory_bytes // count, (("float32", 30 * GB * cores),), 10.0 * GB * cores
        )
        own = {"overhead_s": 10e-6, "copy_bytes_per_s": 15.0 * GB}
        link = Link(latency_s=20e-6, bytes_per_s=10.0 * GB, assumed=True, **own)
    cores = 0 if found else machine.cores
    return Cluster((device,), (Host(machine.name, device.name, count, cores=cores),), link)


def _links_of(pairs: Sequence[HostPair], names: Container[str]) -> dict[tuple[str, str], Link]:
    """Return the links of pairs of hosts, those that are said first, then their ways back.

    Raises:   ClusterError: a pair twice, of a host with itself or of one that is not there.
    """
    found: dict[tuple[str, str], Link] = {}
    for each in pairs:
        key, where = (each.source, each.target), f'pair "{each.source}" to "{each.target}"'
        if each.source not in names or each.target not in names or each.source == each.target:
            raise ClusterError(where, hint="name two different hosts of the cluster")
        if key in found:
            raise ClusterError(f"{where} is there twice", hint="delete one")
        found[key] = each.link()
    for each in pairs:
        found.setdefault((each.target, each.source), each.link())
    return found


def _describe(kind: DeviceKind) -> str:
    rates = "".join(f", {dtype} {rate / TFLOP:.3g} TFLOP/s" for dtype, rate in kind.flop_per_s)
    price = f", {kind.usd_per_hour:g} usd/hour" if kind.usd_per_hour else ""
    spot = f", preemptible with {kind.notice_s:g} s notice" if kind.preemptible else ""
    memory = f"{format_bytes(kind.memory_bytes)} at {kind.memory_bytes_per_s / GB:.4g} GB/s"
    beside = ", copies beside computing" if kind.copy_engine else ""
    return f"{kind.name}: {memory}{rates}{beside}{price}{spot}"


def _check_names(where: str, names: Sequence[str]) -> None:
    for name in names:
        if not name or not name.isprintable():
            raise ClusterError(f"{where} has the name {name!r}", hint="a name is printable text")


def _check(
    where: str, name: str, number: float, *, positive: bool = False, finite: bool = True
) -> None:
    """Raise a ClusterError unless times and sizes can be computed with `number`."""
    least, most = (_LEAST if positive else 0.0), (_MOST if finite else math.inf)
    if not least <= number <= most:  # also where it is no number
        wanted = f"from {least:g} to {most:g}"
        raise ClusterError(f"{where} has {name} = {number}", hint=f"{name} must be {wanted}")
