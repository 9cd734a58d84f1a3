"""Replicas beside torch's DistributedDataParallel: one micro-batch each, sums beside the backward.

    python -m bench.replicas [--json] [--quick] [--rounds N]

The GPT of bench/models.py, AdamW; two and four ranks that torchrun starts, by turns in the same
processes and over the links of bench/beside.py.  Ours is one stage in units, a block each, whose
gradients are summed as they are made; the peer is DDP with its default buckets, over gloo.

ours_s, peer_s    seconds of a step on the slowest rank, median over the rounds
ratio             ours_s / peer_s: the median of the rounds' ratios
predicted_s       by the simulator, from ops measured here and the line's rate
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence

from bench.beside import (
    RANKS,
    RATES,
    job_of,
    link_of,
    model_of,
    played,
    predicted,
    ratio_of,
)
from bench.machine import machine
from bench.network import can_throttle
from penstock.graph.trace import Capture, capture
from penstock.plan import Plan, plan_by_hand
from penstock.profile.measure import measure

ROUNDS = 5
OURS, PEER = "ours", "ddp"
Row = dict[str, float | int | str]


def plan_of(captured: Capture, ranks: int) -> Plan:
    """Return plain replicas in units of a block."""
    whole = plan_by_hand(captured.graph, (), "gpipe", num_micro_batches=1, replicas=ranks)
    return whole.refined(captured.graph)


def rows(name: str, sizes: Sequence[int], rates: Sequence[float], rounds: int) -> Iterator[Row]:
    job, size = job_of(name), model_of(name)[0]
    captured = capture(job)
    profile = measure(captured, job, beside=1)
    for where in itertools.product(sizes, rates):
        plan = plan_of(captured, where[0])
        told = played(name, {OURS: plan}, where, rounds, [PEER])
        yield {
            "model": size.name,
            "ranks": where[0],
            "link": link_of(where[1]),
            "ours_s": statistics.median(told[OURS].times_s),
            "peer_s": statistics.median(told[PEER].times_s),
            "ratio": ratio_of(told[OURS], told[PEER]),
            "predicted_s": predicted(plan, captured, profile, where)["predicted_s"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--quick", action="store_true", help="two ranks, three rounds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    can, why = can_throttle()
    if not can:
        print(f"only free links: {why}", file=sys.stderr)
    sizes, rounds = (RANKS[:1], 3) if given.quick else (RANKS, given.rounds)
    found = rows("gpt", sizes, RATES if can else RATES[:1], rounds)
    if given.json:
        print(json.dumps({"machine": machine(), "rows": list(found)}))
        return
    print(
        f"{'model':<7}{'ranks':>5}{'link':>11}{'ours':>9}{'peer':>9}{'ratio':>8}{'predicted':>11}"
    )
    for row in found:
        times = "".join(f"{row[name]:>7.3f} s" for name in ("ours_s", "peer_s"))
        own = f"{row['model']:<7}{row['ranks']:>5}{row['link']:>11}{times}"
        print(f"{own}{row['ratio']:>8.3f}{row['predicted_s']:>9.3f} s", flush=True)


if __name__ == "__main__":
    main()
