"""What passes of a program give, one by one and in pairs: equal gradients, bytes, seconds.

    python -m bench.passes [--json] [--quick] [--models NAME ...] [--rounds N] [--ahead]

The models of examples/hf.py, traced once each.  Two replicas of 1F1B with two stages each, so four
ranks that are threads, train one step by a plan with each pass and with each pair of passes; loss,
every gradient and every buffer are compared with eager autograd on the uncut model.  Then two
replicas of one stage each, in two processes by turns, with the same passes: what is predicted (ops
measured beside a companion) beside what is measured.

passes         units: a stage for each block; shard, keep: all stages divided among replicas, freed
               after forward or not; recompute: all of it; state, activations: copied to far memory
               between computes; beside: both, beside computes
difference     the greatest relative difference of any tensor; 0 where all are bit-equal
error          predicted / measured - 1, of the median block; bytes_error: of the rank that holds
               most.  Of copies to far memory the bytes are, not the seconds: the machine's file
               cache decides these
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from bench.check import EQUAL, EXAMPLES
from bench.machine import machine
from bench.play import Rounds, Traced, ahead
from bench.predict import RANKS, Model, played_here
from penstock.cluster import Cluster
from penstock.gauge.links import measure_link
from penstock.graph.graph import Graph
from penstock.graph.merge import merged
from penstock.graph.trace import Capture, capture
from penstock.job import Job, load_job
from penstock.plan import Offloaded, Plan, Sharding, plan_by_hand
from penstock.profile.measure import measure
from penstock.prove.prove import Planned, prove
from penstock.search import evaluate
from penstock.search.balance import balanced_cuts

MICRO_BATCHES, REPLICAS = 4, 2
Row = dict[str, float | int | str | bool | None]
Pass = Callable[[Plan, Graph], Plan]


def _units(plan: Plan, graph: Graph) -> Plan:
    return plan.refined(graph)


def _shard(plan: Plan, graph: Graph, word: Sharding) -> Plan:
    return plan.changed(shard=(word,) * plan.num_stages, prefetch=1)


def _recompute(plan: Plan, graph: Graph) -> Plan:
    return plan.changed(recompute=(True,) * plan.num_stages)


def _offload(plan: Plan, graph: Graph, word: Offloaded, *, beside: bool = False) -> Plan:
    return plan.changed(offload=(word,) * plan.num_stages, beside=beside)


PASSES: dict[str, Pass] = {  # in the order in which they are made
    "units": _units,
    "shard": partial(_shard, word="shard"),
    "keep": partial(_shard, word="shard_keep"),
    "recompute": _recompute,
    "state": partial(_offload, word="state"),
    "activations": partial(_offload, word="activations"),
    "beside": partial(_offload, word="both", beside=True),
}
ALIKE = {"shard", "keep"}, {"state", "activations", "beside"}  # one of them at a time


def combinations() -> list[tuple[str, ...]]:
    """Return no pass, each pass, and each pair."""
    pairs = itertools.combinations(PASSES, 2)
    return [(), *((name,) for name in PASSES), *(p for p in pairs if not _excludes(p))]


def _excludes(pair: tuple[str, ...]) -> bool:
    return any(alike.issuperset(pair) for alike in ALIKE)


def plan_of(captured: Capture, stages: int, names: Sequence[str]) -> Plan:
    """Return two replicas of so many stages, with these passes."""
    graph = captured.graph
    cuts = balanced_cuts(graph, [float(node.flop) for node in graph.nodes], stages)
    each = MICRO_BATCHES // REPLICAS
    made = plan_by_hand(graph, cuts, "one_f_one_b", num_micro_batches=each, replicas=REPLICAS)
    for name in names:
        made = PASSES[name](made, graph)
    return made


def equal(job: Job, captured: Capture, names: Sequence[str]) -> Row:
    """Return the distance of a step's gradients and buffers from those of eager autograd."""
    found = prove(Planned(job, captured, plan_of(captured, 2, names))).differences
    worst = max(found, key=lambda difference: difference.value)
    return {
        "bitwise": all(difference.bitwise for difference in found),
        "difference": worst.value,
        "ok": worst.value < EQUAL,
    }


def figures(
    job: Job, captured: Capture, wanted: Sequence[Sequence[str]], cluster: Cluster, rounds: Rounds
) -> list[Row]:
    """Return the predicted and measured figures of plans on two ranks."""
    with ahead(rounds.ahead):
        profile = measure(captured, job, beside=RANKS - 1)
    plans = [plan_of(captured, 1, names) for names in wanted]
    said = [evaluate(captured.graph, profile, cluster, plan)[0] for plan in plans]
    played = played_here(Model({1: Traced(job, captured)}, {1: profile}), plans, rounds)
    rows: list[Row] = []
    for candidate, (blocks, held) in zip(said, played, strict=True):
        measured_s = statistics.median(block[0] for block in blocks)
        rows.append(
            {
                "predicted_s": candidate.step_s,
                "measured_s": measured_s,
                "error": candidate.step_s / measured_s - 1,
                "predicted_bytes": max(candidate.peak_bytes),
                "measured_bytes": held,
                "bytes_error": max(candidate.peak_bytes) / held - 1,
            }
        )
    return rows


def rows(models: Sequence[str], wanted: Sequence[Sequence[str]], rounds: Rounds) -> Iterator[Row]:
    cluster = replace(Cluster.here(RANKS), inside=measure_link())
    for name in models:
        job = replace(load_job(f"examples/hf.py:{name}"), micro_batches=MICRO_BATCHES)
        captured = capture(job)
        told = figures(merged(job, 1), captured, wanted, cluster, rounds)
        for names, own in zip(wanted, told, strict=True):
            what = " + ".join(names) or "none"
            yield {"model": name, "passes": what, **equal(job, captured, names), **own}


def summary(found: Sequence[Row]) -> Mapping[str, float | int]:
    """Return the number of equal rows, and the errors of all."""
    seconds = [abs(float(row["error"] or 0)) for row in found if not _copies(row)]
    sizes = [abs(float(row["bytes_error"] or 0)) for row in found]
    return {
        "rows": len(found),
        "equal": sum(bool(row["ok"]) for row in found),
        "median_error": statistics.median(seconds),
        "worst_error": max(seconds),
        "median_bytes_error": statistics.median(sizes),
        "worst_bytes_error": max(sizes),
    }


def _copies(row: Row) -> bool:
    return not ALIKE[1].isdisjoint(str(row["passes"]).split(" + "))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--quick", action="store_true", help="no pairs, one turn each")
    parser.add_argument("--models", nargs="*", default=EXAMPLES, choices=EXAMPLES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ahead", action="store_true", help="run before other programs, by turns")
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [names for names in combinations() if len(names) < 2 or not given.quick]
    rounds = Rounds(turns=1 if given.quick else given.rounds, ahead=given.ahead)
    found = list[Row]()
    for row in rows(given.models, wanted, rounds):
        found.append(row)
        if not given.json:
            print(_line(row), flush=True)
    if given.json:
        print(json.dumps({"machine": machine(), "rows": found, "summary": summary(found)}))
    else:
        print(json.dumps(summary(found), indent=2))


def _line(row: Row) -> str:
    same = "bit-equal" if row["bitwise"] else f"{row['difference']:.1e}"
    seconds = [1e3 * float(row[name] or 0) for name in ("predicted_s", "measured_s")]
    sizes = [float(row[name] or 0) / 2**20 for name in ("predicted_bytes", "measured_bytes")]
    errors = [float(row[name] or 0) for name in ("error", "bytes_error")]
    return (
        f"{row['model']:8} {row['passes']:24} {same:>10}"
        f"{seconds[0]:8.1f} {seconds[1]:7.1f} ms {errors[0]:+7.1%}"
        f"{sizes[0]:8.2f} {sizes[1]:7.2f} MiB {errors[1]:+7.2%}"
    )


if __name__ == "__main__":
    main()
