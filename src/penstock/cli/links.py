"""penstock doctor --links: what messages cost here, measured, and written as a cluster.

Alone: between two processes of this host, or between its accelerators, each with a process that
this one starts.  Under torchrun: between all of its hosts.
"""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from penstock.cli import face
from penstock.cluster.cluster import Cluster
from penstock.errors import RunError
from penstock.files import Json
from penstock.units import GB, format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.gauge.benchmark import Benchmark
    from penstock.gauge.hosts import Compared, Survey
    from penstock.gauge.links import Probe


def links(out: Path | None, region: str, *, as_json: bool) -> None:
    """Measure, show and write; under torchrun only rank 0 shows and writes.

    Raises:   RunError: a rank failed, or there is one accelerator only.
    """
    import torch

    from penstock.device import here
    from penstock.gauge.hosts import measured_kinds
    from penstock.processes.started import under_torchrun

    if not (here().can_fork or under_torchrun()):
        start_ranks()
    torch.set_num_threads(1)
    found = _of_torchrun(region) if under_torchrun() else _of_this_host(region)
    if found is None:
        return
    found = replace(found, cluster=measured_kinds(found.cluster, found.benchmarks))
    if out is not None:
        found.cluster.save(out)
    if as_json:
        face.show_json(_document(found))
    else:
        face.show(_words(found))
    if out is not None:
        face.say(f"wrote {out}")


def start_ranks() -> NoReturn:
    """Run this command on each accelerator here, and end as it does."""
    from penstock.device import all_here
    from penstock.training import local_ranks

    if (count := len(all_here())) < 2:
        raise RunError("here is one accelerator, so there is no link to measure")
    raise typer.Exit(local_ranks.start_ranks(count)[0])


def _of_this_host(region: str) -> "Survey":
    from penstock.gauge.benchmark import benchmark
    from penstock.gauge.hosts import Survey
    from penstock.gauge.links import probe_here

    with face.busy("measuring the link between two ranks"):
        found, computes = probe_here(), benchmark()
    here = Cluster.here()
    cluster = replace(here, hosts=(replace(here.hosts[0], region=region),), inside=found.link)
    return Survey(cluster, (), (("inside", found),), (computes,), ((0,),))


def _of_torchrun(region: str) -> "Survey | None":
    """Return what all ranks have found, on rank 0."""
    from penstock.gauge.hosts import seat_here, survey
    from penstock.runtime.launch import join_torchrun, torchrun_store, under
    from penstock.training.rendezvous import Rendezvous

    seat, meeting = seat_here(platform.node() or "host", region), Rendezvous(torchrun_store())
    meeting.begin()
    try:
        with face.busy("measuring the links between hosts"):
            store = under(meeting.store, "survey")
            found = join_torchrun(lambda end: survey(end, seat), store, way=meeting.way)
    except BaseException as problem:
        meeting.fail(problem)
        raise
    finally:
        meeting.leave()
    return found if os.environ["RANK"] == "0" else None


# -- words ----------------------------------------------------------------------------------------


def _document(found: "Survey") -> dict[str, Json]:
    cluster = found.cluster
    return {
        "devices": [_plain(asdict(device)) for device in cluster.devices],
        "hosts": [_plain(asdict(host)) for host in cluster.hosts],
        "links": {level: each.to_json() for level, each in found.probes},
        "compared": [
            _plain({**each._asdict(), "s_per_byte": each.capability}) for each in found.compared
        ],
        "computes": [
            _plain({**each._asdict(), "seconds": each.seconds}) for each in found.benchmarks
        ],
        "inside": [
            _plain({**each._asdict(), "bytes_per_s": 1 / each.byte_s}) for each in found.inside
        ],
        "regions": [[cluster.hosts[host].name for host in group] for group in found.near],
    }


def _plain(content: object) -> Json:
    return json.loads(json.dumps(content))


def _words(found: "Survey") -> str:
    parts = [str(found.cluster)]
    parts += [f"{level}\n{_of_level(each)}" for level, each in found.probes]
    names = [host.name for host in found.cluster.hosts]
    parts.append(computing(found.cluster, found.benchmarks))
    if found.inside:
        parts.append(inside_words(found.inside))
    if found.compared:
        parts += [matrix(names, found.compared), regions_words(found)]
    return "\n\n".join(parts)


def computing(cluster: Cluster, benchmarks: "Sequence[Benchmark]") -> str:
    """Return a table of what the ranks of each host compute."""
    rows = [
        (
            host.name,
            f"{1 / each.flop_s / GB:.3g} GFLOP/s",
            f"{1 / each.byte_s / GB:.3g} GB/s",
            format_seconds(each.call_s),
            format_seconds(each.seconds),
            host.device,
        )
        for host, each in zip(cluster.hosts, benchmarks, strict=True)
    ]
    head = "a rank computes", "products", "memory", "a call", "a piece of training", "kind"
    return face.table(head, rows)


def regions_words(found: "Survey") -> str:
    """Return the regions that pairs of hosts tell of, beside those that were named."""
    hosts, near = found.cluster.hosts, found.near
    if len(near) == 1:
        return "one region: no group of hosts is far from the others"
    of = {host: number for number, group in enumerate(near) for host in group}
    inside, across = list[float](), list[float]()
    for each in found.compared:
        (inside if of[each.hosts[0]] == of[each.hosts[1]] else across).append(each.capability)
    times = statistics.median(across) / statistics.median(inside)
    listed = "; ".join(", ".join(hosts[host].name for host in group) for group in near)
    words = f"{len(near)} regions: {listed}\nbetween them a byte takes {times:.3g} times as long"
    named = [{hosts[host].region for host in group} for group in near]
    is_so = all(len(names) == 1 for names in named) and len(set[str]().union(*named)) == len(near)
    return words if is_so else f"{words}\n--region says otherwise, and counts"


def _of_level(found: "Probe") -> str:
    rows = [
        (
            format_bytes(timing.size_bytes),
            *map(format_seconds, (timing.low_s, timing.median_s, timing.high_s, timing.end_s)),
        )
        for timing in found.timings
    ]
    head = "payload", "one way, first tenth", "median", "ninth tenth", "each end computes"
    overlap = found.overlap
    slower = 100 * (overlap.beside_s / overlap.compute_s - 1)
    noise = "" if found.link.slowdown else ", which counts as noise"
    gain = 1 - overlap.both_s / overlap.sequential_s
    lines = [
        f"computes alone {format_seconds(overlap.compute_s)}, messages both ways alone "
        f"{format_seconds(overlap.message_s)}",
        f"one after the other {format_seconds(overlap.sequential_s)}, at once "
        f"{format_seconds(overlap.both_s)}: {100 * gain:.0f} % less",
        f"computes beside messages {format_seconds(overlap.beside_s)}: {slower:+.1f} %{noise}",
    ]
    shown = [*face.table(head, rows).splitlines(), *lines]
    return "\n".join(f"  {line}" for line in shown)


def inside_words(compared: "Sequence[Compared]") -> str:
    """Return a table of the pairs of accelerators of a host, and what seems to connect each."""
    from penstock.device import all_here

    there = all_here()
    rows = [
        (
            f"{a} and {b}",
            f"{format_seconds(each.small_s)} + {1 / each.byte_s / GB:.3g} GB/s",
            there[a].way_to(there[b], 1 / each.byte_s),
        )
        for each in compared
        for a, b in (each.hosts,)
    ]
    return face.table(("accelerators", "one way", "seems to be"), rows)


def matrix(names: Sequence[str], compared: "Sequence[Compared]") -> str:
    """Return a table of all pairs of hosts: a minimal payload's seconds, and bytes/s of a large."""
    cells = {
        each.hosts: f"{format_seconds(each.small_s)} + {1 / each.byte_s / GB:.3g} GB/s"
        for each in compared
    }
    rows = [
        (name, *(cells.get((min(a, b), max(a, b)), "-") for b in range(len(names))))
        for a, name in enumerate(names)
    ]
    return face.table(("between", *names), rows)
