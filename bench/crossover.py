"""Crossover: two jobs on the same two ranks by turns, beside one after the other and both at once.

    python -m bench.crossover [--json] [--steps N] [--rates X ...]

Two GPTs (bench/models.py, seeds of their own) as two replicas each, one micro-batch a rank and
step, in two places with a real line between them (bench/network.py; as root), one core each, over
gloo; free: two processes of this host, through shared memory.  Each is `penstock train` under
torchrun by one plan, without the proof.  Seconds are from the moment at which all ranks of the runs
may begin until the last step of either.

link                    free, or the rate of the line
alone_a_s, alone_b_s    each alone
after_each_other_s      both of them
together_s              by turns: --set turns=first:DIR, turns=second:DIR
free_for_all_s          both at once without turns: the kernel's scheduler divides the cores
predicted_s, predicted_free_s, predicted_after_s   the same by the simulator
equal_bits              whether all weights are those of the job alone
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from bench import beside
from bench.beside import DELAY_S, RATES, cluster_of, link_of
from bench.line import at_both_ends
from bench.machine import machine
from bench.network import can_throttle, line
from penstock.checkpoints import checkpoint
from penstock.cli import face
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.profile.measure import measure
from penstock.search import evaluate
from penstock.simulate.two_runs import SideBySide, makespans, share_of

Row = dict[str, Any]
Start = Callable[[Sequence[str]], object]
_GIVEN = ("check=false", "trial=false", "audit=0%", "checkpoint_every=1000000")


def a() -> Job:
    return replace(beside.job_of("gpt"), micro_batches=2)


def b() -> Job:
    return replace(a(), seed=1)


def started(words: Sequence[str]) -> object:
    """Run on two processes of this host."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*torchrun, "-m", *words], check=True, env=environment)


def played(folder: Path, turns: dict[str, str], steps: int, start: Start) -> float:
    """Run jobs, each with its turns, from when all are ready; return the seconds to the last step.

    Raises:   RuntimeError: a job failed.
    """
    with ExitStack() as closes:
        gates: list[int] = []
        for each in sorted({text.partition(":")[2] for text in turns.values()}):
            Path(each).mkdir(parents=True)
            gates.append(os.open(Path(each) / "gate", os.O_RDWR | os.O_CREAT))
            fcntl.flock(gates[-1], fcntl.LOCK_EX)
            closes.callback(os.close, gates[-1])
        ended: list[str] = []

        def run(name: str) -> None:
            words = ["penstock", "train", f"bench.crossover:{name}", "--steps", str(steps)]
            words += ["--plan", str(folder.parent / "plan.json"), "--out", str(folder / name)]
            sets = (*_GIVEN, f"turns={turns[name]}")
            start([*words, *(word for text in sets for word in ("--set", text))])
            ended.append(name)

        threads = [Thread(target=run, args=(name,)) for name in turns]
        for thread in threads:
            thread.start()
        ready = [Path(t.partition(":")[2]) / f"ready-{t.partition(':')[0]}" for t in turns.values()]
        while not all(each.exists() for each in ready):
            if not all(thread.is_alive() for thread in threads):
                raise RuntimeError("a job ended before its first step")
            time.sleep(0.01)
        began = time.time()
        for gate in gates:
            fcntl.flock(gate, fcntl.LOCK_UN)
        for thread in threads:
            thread.join()
        if len(ended) < len(turns):
            raise RuntimeError(f"of {', '.join(turns)} only {', '.join(ended)} ended well")
        return max((folder / name / "metrics.jsonl").stat().st_mtime for name in turns) - began


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    return dict(checkpoint.load(newest).tensors)


def equal(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    same = (torch.equal(value, second[key]) for key, value in first.items())
    return first.keys() == second.keys() and all(same)


def row_of(rate: float, steps: int, start: Start) -> Row:
    captured = capture(a())
    plan = plan_by_hand(captured.graph, [], "gpipe", num_micro_batches=1, replicas=2)
    profile, cluster = measure(captured, a(), beside=1), cluster_of(2, rate)
    kind = replace(profile, kind=cluster.devices[0].name)
    _, timeline = evaluate(captured.graph, kind, cluster, plan)
    run = SideBySide(timeline, steps, share_of(timeline, cluster))
    said = makespans(run, run)
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        plan.save(folder / "plan.json")
        ways = {
            "alone a": {"a": f"first:{folder}/c0"},
            "alone b": {"b": f"first:{folder}/c1"},
            "by turns": {"a": f"first:{folder}/c2", "b": f"second:{folder}/c2"},
            "at once": {"a": f"first:{folder}/c3", "b": f"first:{folder}/c4"},
        }
        took = {way: played(folder / way, turns, steps, start) for way, turns in ways.items()}
        pairs = [
            (folder / way / n, folder / f"alone {n}" / n) for way in list(ways)[2:] for n in "ab"
        ]
        return {
            "link": link_of(rate),
            "alone_a_s": took["alone a"],
            "alone_b_s": took["alone b"],
            "after_each_other_s": took["alone a"] + took["alone b"],
            "together_s": took["by turns"],
            "free_for_all_s": took["at once"],
            "predicted_s": said.by_turns_s,
            "predicted_free_s": said.at_once_s,
            "predicted_after_s": said.one_by_one_s,
            "equal_bits": all(equal(*pair) for pair in pairs),
        }


def rows_of(rates: Sequence[float], steps: int) -> Iterator[Row]:
    for rate in rates:
        if rate == float("inf"):
            yield row_of(rate, steps, started)
            continue
        with line(rate, DELAY_S) as places:
            yield row_of(rate, steps, lambda words, places=places: at_both_ends(places, words))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="bytes/s; inf: free")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    works, why = can_throttle()
    if not works:
        print(f"only free links: {why}", file=sys.stderr)
    rates = [rate for rate in given.rates if rate == float("inf") or works]
    rows = list(rows_of(rates, given.steps))
    if given.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return 0
    cells = [[f"{v:.3g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    print(face.table([key.removesuffix("_s") for key in rows[0]], cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
