"""Replicas beside torch's DistributedDataParallel: one micro-batch each, sums beside the backward;
and one micro-batch of eight samples among all of them.

    python -m bench.replicas [--json] [--quick] [--rounds N]

The GPT of bench/models.py, AdamW; two and four ranks that torchrun starts, by turns in the same
processes and over the links of bench/beside.py.  Ours is one stage in units, a block each, whose
gradients are summed as they are made; the peer is DDP with its default buckets, over gloo.  Where
there is one micro-batch, ours divides it as a plan does, and DDP is given the rows of each rank.

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
from fractions import Fraction

from bench.beside import (
    ONE_BATCH,
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
from penstock.choose.prepare import joined_step
from penstock.graph.trace import Capture, capture
from penstock.listener import SILENT
from penstock.plan import Plan, plan_by_hand
from penstock.profile.measure import measure
from penstock.taken import Taken

ROUNDS = 5
OURS, PEER = "ours", "ddp"
Row = dict[str, float | int | str]


def plan_of(captured: Capture, ranks: int, joined: Taken) -> Plan:
    """Return plain replicas in units of a block; `joined` of the job's micro-batches for each."""
    whole = plan_by_hand(captured.graph, (), "gpipe", num_micro_batches=1, replicas=ranks)
    return whole.refined(captured.graph).changed(joined=joined)


def rows(name: str, sizes: Sequence[int], rates: Sequence[float], rounds: int) -> Iterator[Row]:
    job, size = job_of(name), model_of(name)[0]
    whole = capture(job)
    for where in itertools.product(sizes, rates):
        joined = Fraction(1, where[0]) if name == ONE_BATCH else 1
        own, captured = joined_step(job, whole, joined, (), SILENT)
        profile = measure(captured, own, beside=1)
        plan = plan_of(captured, where[0], joined)
        told = played(name, {OURS: plan}, where, rounds, [PEER])
        yield {
            "model": size.name if name == "gpt" else name,
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
    rates = RATES if can else RATES[:1]
    found = itertools.chain.from_iterable(
        rows(name, sizes, rates, rounds) for name in ("gpt", ONE_BATCH)
    )
    if given.json:
        print(json.dumps({"machine": machine(), "rows": list(found)}))
        return
    print(
        f"{'model':<10}{'ranks':>5}{'link':>11}{'ours':>9}{'peer':>9}{'ratio':>8}{'predicted':>11}"
    )
    for row in found:
        times = "".join(f"{row[name]:>7.3f} s" for name in ("ours_s", "peer_s"))
        own = f"{row['model']:<10}{row['ranks']:>5}{row['link']:>11}{times}"
        print(f"{own}{row['ratio']:>8.3f}{row['predicted_s']:>9.3f} s", flush=True)


if __name__ == "__main__":
    main()
