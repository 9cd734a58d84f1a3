"""Slow ranks: a cluster in which some ranks take longer than their kind of device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.cluster.cluster import Cluster
from penstock.profile.kinds import place_of
from penstock.profile.profile import Profile

_ALIKE = 1.05  # ranks that are apart by less are alike


def is_like(factor: float) -> bool:
    """Return whether a rank takes about as long as it took."""
    return 1 / _ALIKE < factor < _ALIKE


class Slowed(NamedTuple):
    """A cluster in which ranks that take longer are of kinds of their own.

    kinds:    name, of which kind it was, and by how much longer it takes.
    """

    cluster: Cluster
    kinds: tuple[tuple[str, str, float], ...]

    def profiles(self, plain: Sequence[Profile]) -> tuple[Profile, ...]:
        """Return a profile for each kind, by those of the kinds that there were."""
        rows = ((plain[place_of(plain, kind)], factor, name) for name, kind, factor in self.kinds)
        return tuple(_slower(*row) for row in rows)


def slowed(cluster: Cluster, factors: Sequence[float]) -> Slowed:
    """Return `cluster` with its first ranks slower by these factors; alike where 5 % are between.

    The hosts have no `kinds` yet.
    """
    kinds: list[tuple[str, str, float]] = []
    hosts, start = list(cluster.hosts), 0
    for at, host in enumerate(hosts):
        names: list[str] = []
        for factor in (*factors[start : start + host.num_devices],):
            near = (n for n, k, f in kinds if k == host.device and is_like(factor / f))
            own = host.device if is_like(factor) else f"{host.device} x {factor:.2f}"
            if (name := next(near, own)) not in [n for n, _, _ in kinds]:
                kinds.append((name, host.device, 1.0 if name == host.device else factor))
            names.append(name)
        names += [host.device] * (host.num_devices - len(names))
        start += host.num_devices
        is_unlike = set(names) != {host.device}
        hosts[at] = replace(host, kinds=tuple(names) if is_unlike else ())
    known = {name for name, _, _ in kinds}
    kinds += [(host.device, host.device, 1.0) for host in hosts if host.device not in known][:1]
    by_name = {device.name: device for device in cluster.devices}
    devices = tuple(replace(by_name[kind], name=name) for name, kind, _ in kinds)
    others = tuple(d for d in cluster.devices if d.name not in {name for name, _, _ in kinds})
    return Slowed(replace(cluster, devices=(*devices, *others), hosts=tuple(hosts)), tuple(kinds))


def _slower(profile: Profile, factor: float, name: str) -> Profile:
    """Return a profile of which everything that a rank computes takes longer."""
    copying = profile.copying
    return replace(
        profile,
        kind=name,
        op_s=tuple(factor * s for s in profile.op_s),
        call_s=factor * profile.call_s,
        accumulate_s_per_byte=factor * profile.accumulate_s_per_byte,
        update=profile.update.times(factor),
        copying=replace(copying, copy_s_per_byte=factor * copying.copy_s_per_byte),
    )
