"""Schedules: every built-in schedule simulated, step time against memory.

    python -m bench.schedules [--json] [--svg docs/pictures/schedules.svg]
    python -m bench.schedules --published [--json]

On 4, 8 and 16 ranks, with 1, 2 and 4 micro-batches per rank.  The model is the same for all: where
a schedule has two stages per rank, each takes half the time and holds half the activations.  F, I
and W of one rank's share of the model take a second each.  Schedules that are made for given
seconds are made for these and for the links.

links              free, or 0.2 s: what each message between two ranks takes
step               seconds of one step; of a window of several, its length divided by its steps
steady             seconds per step of a long run, one after the other without a barrier
bubble_fraction    idle part of all ranks' time, with these links
peak_activations   most that a rank holds, in activations of the whole model for one micro-batch
weight_versions    most that are alive at once of one stage on one rank
weight_copies      of a rank's share of the model, on one rank, counting stages that live twice
messages           between ranks, in one step

With --published the rows are other ones: see bench/published.py.
"""

import argparse
import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import published
from bench.machine import machine
from bench.schedule_picture import Point, picture
from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.program.lower import lower
from penstock.schedule import (
    SCHEDULES,
    Builder,
    Schedule,
    Seconds,
    find,
    num_messages,
    peak_activations,
    steady_s,
    versions,
)
from penstock.simulate import simulate
from penstock.timeline import step_s

RANKS, PER_RANK, LINKS_S = (4, 8, 16), (1, 2, 4), (0.0, 0.2)
PICTURED = (8, 2)  # ranks, and micro-batches for each
LEFT_OUT = ("forward_only",)  # trains nothing: in the table, not in the picture


class Row(NamedTuple):
    schedule: str
    ranks: int
    stages: int
    micro_batches: int
    links: str
    step: float
    steady: float
    bubble_fraction: float
    peak_activations: float
    weight_versions: int
    weight_copies: float
    messages: float


def rows() -> Iterator[Row]:
    """Yield a row for each schedule, number of ranks, of micro-batches, and kind of links."""
    for ranks in RANKS:
        for per_rank in PER_RANK:
            for builder in SCHEDULES:
                for message_s in LINKS_S:
                    schedule = on_ranks(builder, ranks, per_rank * ranks, message_s)
                    yield row(schedule, message_s)


def on_ranks(builder: Builder, ranks: int, micro_batches: int, message_s: float) -> Schedule:
    """Return the schedule with as many stages as bring it onto all ranks, about one or two each.

    One that is made for given seconds is told what an action and a message take.
    """
    for stages in (ranks, 2 * ranks, *range(ranks - 1, 0, -1)):
        if builder(stages, 1).num_ranks == ranks:
            if "seconds" not in inspect.signature(builder).parameters:
                return builder(stages, micro_batches)
            share = ranks / stages
            told = {"seconds": Seconds(share, share, share, message_s)}
            return builder(stages, micro_batches, **told)
    raise ValueError(f"{builder.__name__} is not on {ranks} ranks with any number of stages")


def row(schedule: Schedule, message_s: float) -> Row:
    """Return the figures of one schedule where a message takes `message_s`."""
    ranks, steps = schedule.num_ranks, schedule.num_steps
    share = ranks / schedule.num_stages  # of a rank's part of the model, in each stage
    took_s = {"F": share, "I": share, "W": share, "B": 2 * share, "U": 0.0}
    timeline = simulate(
        lower(schedule), lambda a: took_s[a.kind], _cluster(ranks, message_s), spans=False
    )
    window_s = step_s(timeline)
    lives = np.bincount([rank for homes in schedule.stage_ranks for rank in homes])
    return Row(
        schedule.name,
        ranks,
        schedule.num_stages,
        schedule.num_micro_batches,
        f"{message_s:g} s" if message_s else "free",
        window_s / steps,
        steady_s(schedule, Seconds(share, share, share, message_s)),
        1 - sum(timeline.totals.busy_s) / (window_s * ranks),
        max(peak_activations(schedule)) / schedule.num_stages,
        max(versions(schedule).alive),
        float(lives.max()) * share,
        num_messages(schedule) / steps,
    )


def _cluster(ranks: int, message_s: float) -> Cluster:
    device = DeviceKind("device", 2**40, (("float32", 1e12),), 1e12)
    return Cluster((device,), (Host("host", "device", ranks),), Link(message_s, math.inf))


def points(found: list[Row], links: str) -> list[Point]:
    """Return the rows of the picture: schedules that train in one step, for one kind of links."""
    ranks, per_rank = PICTURED
    return [
        Point(each.schedule, each.step, each.peak_activations, each.weight_copies > 1)
        for each in found
        if (each.ranks, each.micro_batches, each.links) == (ranks, per_rank * ranks, links)
        and each.schedule not in LEFT_OUT
        and not find(each.schedule)(2, 2).has_updates
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--published", action="store_true", help="figures of papers beside ours")
    parser.add_argument("--svg", type=Path, help="draw step time against memory to this file")
    options = parser.parse_args()
    if options.published:
        published.show(as_json=options.json)
        return
    found = list(rows())
    if options.svg:
        ranks, per_rank = PICTURED
        title = f"{ranks} ranks, {per_rank * ranks} micro-batches; F : I : W = 1 : 1 : 1"
        panels = [
            ("links free", points(found, "free")),
            ("a message takes 0.2 of F", points(found, "0.2 s")),
        ]
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(picture(title, panels, ideal_s=3.0 * per_rank * ranks))
    if options.json:
        print(json.dumps({"rows": [each._asdict() for each in found], "machine": machine()}))
        return
    print("  ".join(f"{name:>16}" for name in Row._fields))
    for each in found:
        cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in each)
        print("  ".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
