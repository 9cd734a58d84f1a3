"""Shards beside FSDP2 and DDP: stages divided among replicas, by turns in the same processes.

    python -m bench.shard [--json] [--quick] [--rounds N] [--model NAME]

Two and four ranks that torchrun starts.  Models (a GPT, one with a huge embedding, one with
experts), peers and links are those of bench/beside.py.  Ours is one stage in units, a block each.

way         ours: "shard", gathered one unit ahead; "shard_keep", whole until the backward is over;
            "split", as "shard", with what is larger than any block in eight slices;
            "planned", what the search finds for ranks and line with as many bytes as "shard" holds
plan        that, in words
cap_bytes   the most that a rank may hold by that plan
peer        fsdp2: fully_shard of each block and of the whole, freed after forward; fsdp2_keep: kept
            for the backward; ddp: DistributedDataParallel
ours_s, peer_s    seconds of a step on the slowest rank, median over the rounds
ratio             ours_s / peer_s: the median of the rounds' ratios
*_peak_bytes      tensors held at most by any rank in a step, under torch's profiler
*_cpu_s           processor seconds of a step on the busiest rank, its other threads included
*_sent_bytes      what leaves rank 0's end of the line in a step; 0 where links are free
predicted_s, predicted_bytes   of ours, by the simulator, from ops measured here
"""

import argparse
import itertools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from bench.beside import (
    MODELS,
    PEERS,
    RANKS,
    RATES,
    Told,
    cluster_of,
    job_of,
    link_of,
    played,
    predicted,
    ratio_of,
)
from bench.machine import machine
from bench.network import can_throttle
from penstock.graph.split import split
from penstock.graph.trace import Capture, capture
from penstock.plan import Plan, Sharding, plan_by_hand
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.search.huge import huge
from penstock.search.search import search
from penstock.search.shapes import Fixed

ROUNDS = 5
WAYS: tuple[Sharding, ...] = ("shard", "shard_keep")
PLANNED, SPLIT, SLICES = "planned", "split", 8
Row = dict[str, float | int | str | None]


def plan_of(captured: Capture, ranks: int, way: Sharding) -> Plan:
    """Return replicas in units of a block, all of them divided."""
    whole = plan_by_hand(captured.graph, (), "gpipe", num_micro_batches=1, replicas=ranks)
    units = whole.refined(captured.graph)
    return units.changed(shard=(way,) * units.num_stages, prefetch=1)


def planned(captured: Capture, profile: Profile, where: tuple[int, float], cap: int) -> Plan:
    """Return the plan that the search finds where a rank may hold `cap` bytes."""
    ranks, cluster = where[0], cluster_of(*where).within(cap)
    fixed = Fixed(ranks=ranks)
    return search(captured.graph, profile, cluster, micro_batches=ranks, fixed=fixed).plan


def rows(
    models: Sequence[str], sizes: Sequence[int], rates: Sequence[float], rounds: int
) -> Iterator[Row]:
    for name in models:
        captured = capture(job_of(name))
        profile = measure(captured, job_of(name), beside=1)
        cut = split(captured, dict.fromkeys(huge(captured.graph), SLICES))
        steps = dict.fromkeys((*WAYS, PLANNED), (captured, profile))
        if cut.graph.slices:
            steps[SPLIT] = cut, measure(cut, job_of(name), beside=1)
        for where in itertools.product(sizes, rates):
            plans: dict[str, Plan] = {way: plan_of(captured, where[0], way) for way in WAYS}
            cap = int(predicted(plans["shard"], captured, profile, where)["predicted_bytes"])
            plans[PLANNED] = planned(captured, profile, where, cap)
            plans |= {SPLIT: plan_of(cut, where[0], "shard")} if cut.graph.slices else {}
            told = played(name, plans, where, rounds)
            for way, kind in itertools.product(plans, PEERS):
                is_planned = way == PLANNED
                yield (
                    {
                        "model": name,
                        "ranks": where[0],
                        "link": link_of(where[1]),
                        "way": way,
                        "plan": _words(plans[way]) if is_planned else None,
                        "cap_bytes": cap if is_planned else None,
                        "peer": kind,
                    }
                    | _row(told[way], told[kind])
                    | predicted(plans[way], *steps[way], where)
                )


def _words(plan: Plan) -> str:
    """Return a plan in words."""
    shards = ", ".join(f"{n} {word}" for word, n in Counter(plan.shard).items())
    recomputed = sum(map(bool, plan.recompute))
    return (
        f"{plan.replicas} x {plan.num_ranks} ranks, {plan.num_stages} stages"
        f"{f' ({shards})' if shards else ''}"
        f"{f', {recomputed} recomputed, whole or in part' if recomputed else ''}"
        f", {plan.num_micro_batches} micro-batches"
    )


def _row(own: Told, other: Told) -> Row:
    return {
        "ours_s": statistics.median(own.times_s),
        "peer_s": statistics.median(other.times_s),
        "ratio": ratio_of(own, other),
        "ours_peak_bytes": own.peak,
        "peer_peak_bytes": other.peak,
        "ours_sent_bytes": own.sent,
        "peer_sent_bytes": other.sent,
        "ours_cpu_s": statistics.median(own.cpu_s),
        "peer_cpu_s": statistics.median(other.cpu_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--quick", action="store_true", help="two ranks, one round")
    parser.add_argument("--model", choices=MODELS, help="one of the models only")
    parser.add_argument("--ranks", type=int, choices=RANKS, help="so many ranks only")
    names = [link_of(rate) for rate in RATES]
    parser.add_argument("--link", choices=names, help="one of the links only")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    can, why = can_throttle()
    if not can:
        print(f"only free links: {why}", file=sys.stderr)
    sizes, rounds = (RANKS[:1], 1) if given.quick else (RANKS, given.rounds)
    sizes = sizes if given.ranks is None else (given.ranks,)
    rates = [r for r in (RATES if can else RATES[:1]) if given.link in (None, link_of(r))]
    models = MODELS if given.model is None else (given.model,)
    found = rows(models, sizes, rates, rounds)
    if given.json:
        print(json.dumps({"machine": machine(), "rows": list(found)}))
        return
    head = f"{'model':<10}{'ranks':>5}{'link':>10}{'way':>12}{'peer':>13}{'ours':>9}{'peer':>9}"
    head += f"{'ratio':>7}{'predicted':>11}{'ours, peer, predicted MiB':>27}"
    print(f"{head}{'sent MB':>15}{'cpu s':>15}", flush=True)
    for row in found:
        print(_line(row), flush=True)


def _line(row: Row) -> str:
    def figures(names: str, unit: float, digits: int) -> str:
        return ", ".join(f"{float(row[name] or 0) / unit:.{digits}f}" for name in names.split())

    sizes_mib = figures("ours_peak_bytes peer_peak_bytes predicted_bytes", 2**20, 1)
    sent, cpu = figures("ours_sent_bytes peer_sent_bytes", 1e6, 1), "ours_cpu_s peer_cpu_s"
    return (
        f"{row['model']:<10}{row['ranks']:>5}{row['link']:>10}{row['way']:>12}{row['peer']:>13}"
        f"{row['ours_s']:>7.3f} s{row['peer_s']:>7.3f} s{row['ratio']:>7.3f}"
        f"{row['predicted_s']:>9.3f} s{sizes_mib:>27}{sent:>15}{figures(cpu, 1, 3):>15}"
        f"  {row['plan'] or ''}"
    )


if __name__ == "__main__":
    main()
