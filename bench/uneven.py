"""Schedules built for the seconds of their stages beside the same builders told that all are alike.

    python -m bench.uneven [--json] [--quick] [--rounds N] [--ahead]

Two networks of unequal pieces are traced and every op is measured: the convolutional one of
bench/zoo.py, and one of 24 layers of unequal widths.  Cuts are balanced, so what is unequal is what
cuts leave: stages, and F, I and W of each.  Three builders take seconds (`zb_greedy`, `zb_v`,
`list_schedule`); each makes its schedule for equal seconds, and for those of the stages.  Both are
simulated on two, four and eight ranks; on two they are also run, by turns (bench/play.py), where
the simulation says that they differ by more than a hundredth.

alike_s, own_s    seconds of a step, built for equal seconds, and for those of the stages
ratio             own_s / alike_s: simulated; measured, the median of the rounds' ratios
low, high         the smallest and the largest of these
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bench import zoo
from bench.machine import machine
from bench.play import Block, Played, Rounds, Traced
from bench.predict import Model, played_here
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.gauge.links import measure_link
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.search.balance import balanced_cuts
from penstock.search.judge import Judge
from penstock.units import format_seconds

SIZES = (2, 4, 8)  # ranks
RUN = 2  # ranks
BUILDERS = {"zb_greedy": 1, "zb_v": 2, "list_schedule": 2}  # stages of a rank
MICRO_BATCHES = 8
WORTH = 0.01  # of a step
Row = dict[str, float | int | str]


def _widths() -> nn.Module:
    widths = (128, 512, 256, 1024, 384, 768, 192, 640, 128, 896, 320, 1024)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((*widths, *widths, 10)):
        layers += [nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU())]
    return nn.Sequential(*layers)


def jobs() -> dict[str, Job]:
    """Return the networks; the deep one has the data and the optimizer of the shallow one."""
    return {"cnn": zoo.JOBS["cnn"], "widths": replace(zoo.JOBS["uneven"], model=_widths)}


def plans(captured: Any, profile: Profile, ranks: int) -> Iterator[tuple[str, Plan]]:
    """Yield a plan of each builder on so many ranks, without seconds."""
    graph = captured.graph
    for name, each in BUILDERS.items():
        stages = each * ranks
        if stages > len(graph.cut_points) + 1:
            continue
        cuts = balanced_cuts(graph, profile.op_s, stages)
        counts = {"num_micro_batches": MICRO_BATCHES, "num_ranks": ranks}
        yield name, plan_by_hand(graph, cuts, name, **counts)


def pairs(captured: Any, profile: Profile, cluster: Cluster) -> Iterator[tuple[Row, Plan, Plan]]:
    """Yield what is simulated of each pair of plans, and the plans."""
    alike = Judge(captured.graph, profile, cluster, suits=False)
    own = Judge(captured.graph, profile, cluster)
    for name, plan in plans(captured, profile, cluster.num_ranks):
        a, b = alike.candidate(plan), own.candidate(plan)
        row: Row = {
            "ranks": cluster.num_ranks,
            "schedule": name,
            "alike_s": a.step_s,
            "own_s": b.step_s,
            "ratio": b.step_s / a.step_s,
        }
        yield row, a.plan, b.plan


def of_network(name: str, job: Job, link: Any, rounds: Rounds) -> Iterator[Row]:
    """Yield the rows of one network: simulated, then run."""
    captured = capture(job)
    face.say(f"{name}: measuring every op")
    profile = measure(captured, job, beside=RUN - 1)
    ran: list[tuple[Row, Plan, Plan]] = []
    for ranks in SIZES:
        host = replace(Cluster.here(ranks).hosts[0], cores=0)
        cluster = replace(Cluster.here(ranks), hosts=(host,), inside=link)
        for row, a, b in pairs(captured, profile, cluster):
            yield {"network": name, "how": "simulated", **row}
            differ = abs(float(row["ratio"]) - 1) > WORTH
            ran += [(row, a, b)] * (ranks == RUN and differ)
    if not ran:
        return
    model = Model({1: Traced(job, captured)}, {1: profile})
    played = played_here(model, [plan for _, a, b in ran for plan in (a, b)], rounds)
    for at, (row, _, _) in enumerate(ran):
        yield {"network": name, "how": "measured", **row, **measured(*played[2 * at : 2 * at + 2])}


def measured(alike: Played, own: Played) -> Row:
    """Return the medians of two plans that took turns, and of the ratios of their turns."""
    times = [[Block(*block).step_s for block in each.blocks] for each in (alike, own)]
    ratios = [b / a for a, b in zip(*times, strict=True)]
    return {
        "alike_s": statistics.median(times[0]),
        "own_s": statistics.median(times[1]),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
    }


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row."""
    lines: list[str] = []
    for row in rows:
        a, b = (format_seconds(float(row[key])) for key in ("alike_s", "own_s"))
        spread = f" ({row['low']:.3f} to {row['high']:.3f})" if "low" in row else ""
        lines.append(
            f"{row['network']:7} {row['how']:9} {row['ranks']} ranks  {row['schedule']:13} "
            f"{a:>8} -> {b:>8}  {row['ratio']:.3f}{spread}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one network, two short rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--ahead", action="store_true", help="on a machine in use: blocks run first (as root)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    link = measure_link()
    rounds = Rounds(2, 0.2) if options.quick else Rounds(options.rounds)
    rounds = rounds._replace(ahead=options.ahead)
    rows: list[Row] = []
    for name, job in list(jobs().items())[: 1 if options.quick else None]:
        rows += of_network(name, job, link, rounds)
    if options.json:
        json.dump({"machine": machine(), "rows": rows}, sys.stdout, indent=1)
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
