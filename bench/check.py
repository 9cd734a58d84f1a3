"""What works: nine Hugging Face architectures, cut in 2 and 4, against the plain step.

    python -m bench.check [--json] [--models gpt2 t5 ...]

Each model of examples/hf.py is traced once and run in threads under 1F1B and ZB-H1; loss, every
gradient and every buffer are compared with eager autograd on the uncut model.

difference     the greatest relative difference of any tensor; 0 where all are bit-equal.  A
               parameter that several stages use adds its gradients up in another order.
"""

import argparse
import json
import time

import torch

from bench.machine import machine
from penstock.errors import GraphError
from penstock.graph.trace import capture
from penstock.job import load_job
from penstock.plan import plan_by_hand
from penstock.runtime.check import check
from penstock.search.balance import balanced_cuts

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "resnet", "mixtral", "whisper", "mamba")
CASES = tuple((stages, schedule) for stages in (2, 4) for schedule in ("one_f_one_b", "zb_h1"))


def rows_of(name: str) -> list[dict[str, object]]:
    """Return one row for each cut and schedule of one model."""
    job = load_job(f"examples/hf.py:{name}")
    start = time.perf_counter()
    try:
        captured = capture(job)
    except GraphError as problem:
        return [{"model": name, "traced": False, "ok": False, "why": problem.message}]
    trace_s = time.perf_counter() - start
    graph, rows = captured.graph, list[dict[str, object]]()
    for stages, schedule in CASES:
        cuts = balanced_cuts(graph, [float(node.flop) for node in graph.nodes], stages)
        plan = plan_by_hand(graph, cuts, schedule, num_micro_batches=4)
        found = check(plan, captured, job)
        worst = max(found, key=lambda difference: difference.value)
        rows.append(
            {
                "model": name,
                "traced": True,
                "ops": sum(node.kind == "op" for node in graph.nodes),
                "trace_s": trace_s,
                "stages": stages,
                "schedule": schedule,
                "bitwise": all(difference.bitwise for difference in found),
                "difference": worst.value,
                "where": worst.where,
                "ok": worst.value < 1e-6,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in options.models for row in rows_of(name)]
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}))
        return
    for row in rows:
        if not row["traced"]:
            print(f"{row['model']:8} not traced: {row['why']}")
            continue
        equal = "bit-equal" if row["bitwise"] else f"{row['difference']:.1e} in {row['where']}"
        what = f"{row['stages']} stages, {row['schedule']}"
        print(f"{row['model']:8} {row['ops']:5} ops  {what:22} {equal}")


if __name__ == "__main__":
    main()
