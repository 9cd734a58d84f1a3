"""penstock doctor --overlap: computes and a sum, alone, one by one and at once, on two ranks.

Alone: on two processes of this host.  Under torchrun: on the first ranks of two hosts, or on two of
one host where there is no other.  What a sum takes of a core is kept with the link: in that of this
machine, which runs take, and with `--out` in a file, which may have been there before.
"""

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import face
from penstock.cluster.cluster import Cluster, Link
from penstock.errors import ClusterError
from penstock.files import Json, cache_folder
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.gauge.sum_beside import SumBeside, Tenths
    from penstock.runtime.worker import RankResult, Report
    from penstock.transport.transport import Transport

_DISTURBED = 0.15  # of the median: half of what lies between the tenths


def overlap(out: Path | None, *, as_json: bool) -> None:
    """Measure, keep and show; under torchrun only rank 0 shows, and nothing but `out` is kept.

    Raises:   RunError: a rank failed, or there is one accelerator only.
    """
    import torch

    from penstock.cli.links import start_ranks
    from penstock.device import here
    from penstock.gauge.sum_beside import sums_of
    from penstock.processes.started import under_torchrun

    joined = under_torchrun()
    if not (here().can_fork or joined):
        start_ranks()
    torch.set_num_threads(1)
    with face.busy("computing and summing on two ranks"):
        measured = sums_of(_of_torchrun() if joined else _of_this_host())
    if joined and os.environ["RANK"] != "0":
        return
    link = None if joined else _kept(measured)
    if out is not None:
        _added(out, measured, link).save(out)
    if as_json:
        face.show_json(_document(measured))
    else:
        face.show(_words(measured, link))
    if out is not None:
        face.say(f"wrote {out}")


def _of_this_host() -> list[object]:
    """Return what two processes of this host have measured."""
    from penstock.runtime.launch import run_processes

    with tempfile.TemporaryFile() as told:
        run_processes(partial(_write, told.fileno()), 2, lambda step: None)
        told.seek(0)
        return json.loads(told.read())


def _write(told: int, transport: "Transport", report: "Report") -> "RankResult":
    from penstock.gauge.sum_beside import measure_sums
    from penstock.runtime.worker import RankResult

    found = measure_sums(transport, (0, 1))
    if transport.rank == 0:
        os.write(told, json.dumps(found).encode())
    return RankResult(transport.rank, (), (), 0, (), 0.0, {})


def _of_torchrun() -> list[object]:
    """Return what the first rank and the first one of another host have measured, on rank 0."""
    from penstock.gauge.sum_beside import measure_sums
    from penstock.runtime.launch import join_torchrun, torchrun_store, under
    from penstock.training.rendezvous import Rendezvous

    meeting = Rendezvous(torchrun_store())
    meeting.begin()
    try:
        store = under(meeting.store, "overlap")
        return join_torchrun(lambda end: measure_sums(end, _pair()), store, way=meeting.way) or []
    except BaseException as problem:
        meeting.fail(problem)
        raise
    finally:
        meeting.leave()


def _kept(measured: "Sequence[SumBeside]") -> Link:
    """Return this machine's link with what sums beside computes take, and keep it for runs."""
    from penstock.gauge.links import measure_link
    from penstock.gauge.sum_beside import with_sums
    from penstock.profile.kept_profiles import keep_link, kept_link

    folder = cache_folder("profiles")
    link = kept_link(folder, lambda path: None)
    if link is None:
        with face.busy("measuring the link between two ranks"):
            link = measure_link()
    return keep_link(folder, with_sums(link, measured))


def _added(out: Path, measured: "Sequence[SumBeside]", link: Link | None) -> Cluster:
    """Return the cluster of the file with what was measured; this machine where there is no file.

    link:     between ranks of this host; None: under torchrun, where the file has one.
    Raises:   ClusterError: under torchrun, and there is no file, or no such link in it.
    """
    from penstock.gauge.sum_beside import with_sums

    if link is not None:
        there = Cluster.load(out) if out.exists() else Cluster.here()
        own = with_sums(there.inside or link, measured) if out.exists() else link
        return replace(there, inside=own)
    if not out.exists():
        hint = f"penstock doctor --links --out {out}, by the same torchrun, makes it"
        raise ClusterError(f"there is no {out} to write to", hint=hint)
    there = Cluster.load(out)
    own = with_sums(there.link(*_pair()), measured)
    if len(there.hosts) == 1:
        return replace(there, inside=own)
    if there.hosts[0].region == there.hosts[1].region:
        return replace(there, between=own)
    return replace(there, across=own)


def _pair() -> tuple[int, int]:
    """Return the first rank under torchrun, and the first of another host if there is one."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return 0, local if local < int(os.environ["WORLD_SIZE"]) else 1


# -- words ----------------------------------------------------------------------------------------


def _document(measured: "Sequence[SumBeside]") -> dict[str, Json]:
    """Return each size with its prediction, and the line through what sums take of a core."""
    from penstock.gauge.sum_beside import with_sums

    rows: list[Json] = []
    for one, at_once_s in _with_predicted(measured):
        ways = "compute", "sum", "one_by_one", "at_once"
        found: dict[str, Json] = {way: dict(getattr(one, way)._asdict()) for way in ways}
        found |= {"beside_s": one.beside_s, "core_s": one.core_s, "slowdown": one.slowdown}
        found |= {"gain": one.gain, "predicted_s": at_once_s}
        rows.append({"size_bytes": one.size_bytes, **found})
    line = with_sums(Link(0.0, 1.0), measured)
    rate = line.core_bytes_per_s if math.isfinite(line.core_bytes_per_s) else None
    core: dict[str, Json] = {"core_s": line.core_s, "core_bytes_per_s": rate}
    return {"sizes": rows, "core": core, "disturbed": _is_disturbed(measured)}


def _with_predicted(measured: "Sequence[SumBeside]") -> "list[tuple[SumBeside, float | None]]":
    """Return each size with what the others say of it; None with fewer than two others."""
    from penstock.gauge.sum_beside import predicted_s

    few = len(measured) < 3
    return [(one, None if few else predicted_s(measured, one)) for one in measured]


def _is_disturbed(measured: "Sequence[SumBeside]") -> bool:
    return any(one.compute.spread > _DISTURBED for one in measured)


def _words(measured: "Sequence[SumBeside]", link: Link | None) -> str:
    """Return both tables, what is kept, and whether other programs disturbed."""
    from penstock.gauge.sum_beside import WAYS

    if not measured:
        return "a sum of the smallest size is too slow here to be measured"
    own = [(one, (one.compute, one.sum, one.one_by_one, one.at_once)) for one in measured]
    taken = [(format_bytes(one.size_bytes), *map(_cell, ways)) for one, ways in own]
    rows = [_row(*each) for each in _with_predicted(measured)]
    head = "a sum of", "at once", "predicted", "off", "computes slowed", "gain"
    parts = [face.table(("a sum of", *WAYS), taken), face.table(head, rows)]
    if link is not None:
        parts.append(f"kept for runs here: {link}")
    if _is_disturbed(measured):
        parts.append("disturbed: computes alone took unlike times; try again when less else runs")
    return "\n\n".join(parts)


def _cell(ways: "Tenths") -> str:
    return f"{format_seconds(ways.median_s)} +-{100 * ways.spread:.0f} %"


def _row(one: "SumBeside", at_once_s: float | None) -> tuple[str, ...]:
    """Return a size's row: at once as measured, and as the simulator says from the other sizes."""
    taken_s = one.at_once.median_s
    told = ("-", "-")
    if at_once_s is not None:
        told = format_seconds(at_once_s), f"{100 * (at_once_s / taken_s - 1):+.0f} %"
    rates = f"{100 * one.slowdown:.0f} %", f"{100 * one.gain:.0f} %"
    return format_bytes(one.size_bytes), format_seconds(taken_s), *told, *rates
