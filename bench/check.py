"""What works: thirty-nine architectures, cut in 2 and 4, against the plain step.

    python -m bench.check [--json] [--models gpt2 t5 ...]

Each model of examples/hf.py and bench/architectures.py is traced once and run in threads under
1F1B and ZB-H1; loss, every gradient and every buffer are compared with eager autograd on the uncut
model.

difference     the greatest relative difference of any tensor; 0 where all are bit-equal.  A
               parameter that several stages use adds its gradients up in another order.
"""

import argparse
import json
import time
from collections.abc import Iterator

import torch

from bench.architectures import JOBS
from bench.machine import machine
from penstock.errors import GraphError, PlanError
from penstock.graph.trace import capture
from penstock.job import load_job
from penstock.plan import plan_by_hand
from penstock.prove.prove import Planned, prove
from penstock.search.balance import balanced_cuts

EXAMPLES = ("gpt2", "llama", "bert", "t5", "vit", "resnet", "mixtral", "whisper", "mamba")
MODELS = (*EXAMPLES, *JOBS)
CASES = tuple((stages, schedule) for stages in (2, 4) for schedule in ("one_f_one_b", "zb_h1"))
EQUAL = 1e-6  # relative; float32


def rows_of(name: str) -> Iterator[dict[str, object]]:
    """Yield one row for each cut and schedule of one model; `why` says why one was not checked."""
    job = JOBS[name] if name in JOBS else load_job(f"examples/hf.py:{name}")
    start = time.perf_counter()
    try:
        captured = capture(job)
    except GraphError as problem:
        yield {"model": name, "traced": False, "ok": False, "why": problem.message}
        return
    graph = captured.graph
    about = {
        "model": name,
        "traced": True,
        "ops": sum(node.kind == "op" for node in graph.nodes),
        "trace_s": time.perf_counter() - start,
    }
    for stages, schedule in CASES:
        case = {**about, "stages": stages, "schedule": schedule}
        try:
            cuts = balanced_cuts(graph, [float(node.flop) for node in graph.nodes], stages)
        except PlanError as problem:
            yield {**case, "ok": False, "why": problem.message}
            continue
        plan = plan_by_hand(graph, cuts, schedule, num_micro_batches=4)
        found = prove(Planned(job, captured, plan)).differences
        worst = max(found, key=lambda difference: difference.value)
        bitwise = all(difference.bitwise for difference in found)
        result = {"bitwise": bitwise, "difference": worst.value, "where": worst.where}
        yield {**case, **result, "ok": worst.value < EQUAL}


def _line(row: dict[str, object]) -> str:
    if not row["traced"]:
        return f"{row['model']:10} not traced: {row['why']}"
    what = f"{row['model']:10} {row['ops']:5} ops  {row['stages']} stages, {row['schedule']:12}"
    if "why" in row:
        return f"{what} not cut: {row['why']}"
    equal = "bit-equal" if row["bitwise"] else f"{row['difference']:.1e} in {row['where']}"
    return f"{what} {equal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[dict[str, object]]()
    for name in options.models:
        for row in rows_of(name):
            rows.append(row)
            if not options.json:
                print(_line(row), flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
