"""Units that the search finds for plain replicas beside usual settings of them, and beside DDP.

    python -m bench.buckets [--json] [--quick] [--rounds N]

The GPT of bench/models.py and the one with a huge embedding, AdamW, one micro-batch a rank and
step, on two ranks as in bench/beside.py: over free links, and over real lines.  All take turns in
the same processes and have to come to the same weights.

way           whole: all gradients are summed at the end; block: a bucket and a unit for each block;
              25 MB: cut where so many bytes have come together; each: at every cut point; searched:
              by `search/cut_units.py`, for this line; ddp: DistributedDataParallel, 25 MB
units         stages that the model is cut into
seconds       of a step on the slowest rank, median over the rounds; low, high: the range
ratio         seconds of searched / seconds of this way: the median of the rounds' ratios
predicted_s   by the simulator, from ops measured here
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence

from bench.beside import RATES, Told, cluster_of, job_of, link_of, played, predicted, ratio_of
from bench.machine import machine
from bench.network import can_throttle
from penstock.graph.trace import Capture, capture
from penstock.plan import Plan, divided, plan_by_hand
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.search.cut_units import in_best_units, settings
from penstock.search.judge import Judge

MODELS = ("gpt", "embedding")
RANKS, ROUNDS = 2, 7
SEARCHED, PEER = "searched", "ddp"
Row = dict[str, float | int | str | None]


def plans_of(captured: Capture, profile: Profile, rate: float) -> dict[str, Plan]:
    """Return replicas in the usual settings of units, and in the best that are found for a line."""
    graph = captured.graph
    whole = plan_by_hand(graph, (), "gpipe", num_micro_batches=1, replicas=RANKS)
    usual = {name: divided(whole, graph, at) for name, at in settings(graph, whole).items()}
    found = in_best_units(Judge(graph, profile, cluster_of(RANKS, rate)), whole)
    assert found is not None, "no rules forbid them, and there is memory"
    return usual | {SEARCHED: found.candidate.plan}


def rows(models: Sequence[str], rates: Sequence[float], rounds: int) -> Iterator[Row]:
    for name in models:
        captured = capture(job_of(name))
        profile = measure(captured, job_of(name), beside=1)
        for rate in rates:
            plans = plans_of(captured, profile, rate)
            told = played(name, plans, (RANKS, rate), rounds, [PEER])
            for way in (*plans, PEER):
                own = predicted(plans[way], captured, profile, (RANKS, rate)) if way != PEER else {}
                yield {
                    "model": name,
                    "ranks": RANKS,
                    "link": link_of(rate),
                    "way": way,
                    "units": plans[way].num_stages if way != PEER else None,
                    **_seconds(told[way], told[SEARCHED]),
                    "predicted_s": own.get("predicted_s"),
                }


def _seconds(own: Told, searched: Told) -> Row:
    times_s = own.times_s
    return {
        "seconds": statistics.median(times_s),
        "low": min(times_s),
        "high": max(times_s),
        "ratio": ratio_of(searched, own),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--quick", action="store_true", help="the GPT, three rounds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    can, why = can_throttle()
    if not can:
        print(f"only free links: {why}", file=sys.stderr)
    models, rounds = (MODELS[:1], 3) if given.quick else (MODELS, given.rounds)
    found = rows(models, RATES if can else RATES[:1], rounds)
    if given.json:
        print(json.dumps({"machine": machine(), "rows": list(found)}))
        return
    head = f"{'model':<10}{'link':>10}{'way':>10}{'units':>6}{'seconds':>10}{'range':>16}"
    print(f"{head}{'searched / this':>17}{'predicted':>11}")
    for _, group in itertools.groupby(found, key=lambda row: (row["model"], row["link"])):
        for row in group:
            predicted_s = row["predicted_s"]
            said = "" if predicted_s is None else f"{predicted_s:9.3f} s"
            span = f"{row['low']:.3f} - {row['high']:.3f}"
            print(
                f"{row['model']:<10}{row['link']:>10}{row['way']:>10}{row['units'] or '':>6}"
                f"{row['seconds']:>8.3f} s{span:>16}{row['ratio']:>17.3f}{said:>11}",
                flush=True,
            )


if __name__ == "__main__":
    main()
