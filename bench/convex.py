"""Convex: every way to agree along every topology, on a problem with one answer, beside formulas.

    python -m bench.convex [--json] [--ranks 2 3 4] [--steps 80]

Least squares of a matrix of 16 by 16 that fits, one micro-batch a replica and step, SGD, ranks as
threads.  What a way refuses is refused by the table of what fits (plan/fits.py).

way, topology   as `sums` and `topology` say it; None: gradients, and as the transport sums
rounds          of one sum
sent_bytes      that all ranks together gave each other along the rounds, or to a server and
                back, in all steps
formula_bytes   the same by docs/agree.md; null: the transport's own way is not counted.  Of backup
                workers the most: a rank that is left out gives less
first, last     losses of the first and the last step
outcome         works, or refused with the reason
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.agree import AS_THEY_COME, WAYS
from penstock.checkpoints.saver import SavePolicy
from penstock.cli import face
from penstock.errors import PlanError
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.routes import routes_of
from penstock.runtime.launch import run_threads
from penstock.runtime.run import Steps, outcome_of, windows_of
from penstock.runtime.worker import Task, work
from penstock.sums import sums_way
from penstock.transport import Transport

TOPOLOGIES = (*(None, "ring", "tree", "halving", "doubling", "direct", "server", "hierarchical:2"),)
WIDTH = 16
EVERY = *WAYS, *AS_THEY_COME
Row = dict[str, Any]


class CountedSwaps:
    """A transport that counts the bytes that are given away in swaps; all else is the other's."""

    def __init__(self, end: Transport, given: list[int]) -> None:
        self._end, self._given = end, given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def bind_send(self, edge: int, peer: int, specs: Any, *, ahead: int = 0) -> Any:
        send = self._end.bind_send(edge, peer, specs, ahead=ahead)
        size = sum(spec.size_bytes for spec in specs)

        def counted(tensors: Sequence[Tensor]) -> None:
            self._given.append(size)
            send(tensors)

        return counted

    def swap(
        self, gives: Sequence[Tensor], takes: Sequence[Tensor], ranks: tuple[int, ...]
    ) -> None:
        own = ranks.index(self._end.rank)
        self._given.append(sum(row.nbytes for at, row in enumerate(gives) if at != own))
        self._end.swap(gives, takes, ranks)


def job_of(way: str | None, ranks: int) -> Job:
    def data(start: int) -> Iterator[dict[str, Tensor]]:
        wanted = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
        while True:
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(start))
            yield {"x": x, "y": x @ wanted}
            start += 1

    return Job(
        model=lambda: torch.nn.Linear(WIDTH, WIDTH, bias=False),
        loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(),
        data=data,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=1.5),
        micro_batches=ranks,
        sums=way,
    )


def formula_bytes(way: str | None, topology: str, ranks: int, steps: int) -> int:
    """Return the bytes that all ranks send together: 2 (n - 1) S a sum, but for doubling."""
    own = sums_way(way)
    if own.served:  # pushes and answers, those of the last checkpoint, and a word at the end
        return (ranks - 1) * (2 * steps + 3) * (4 * WIDTH * WIDTH + 3 * 8)
    columns = own.columns_of((WIDTH, WIDTH)) if own.kind == "rank" else 0
    size_bytes = 4 * (2 * WIDTH * columns or WIDTH * WIDTH)
    power = ranks.bit_length() - 1
    times = 2**power * power + 2 * (ranks - 2**power) if topology == "doubling" else 2 * ranks - 2
    return times * size_bytes * (steps // own.every)


def row_of(way: str | None, topology: str | None, ranks: int, steps: int) -> Row:
    job = job_of(way, ranks)
    captured = capture(job)
    row: Row = {"ranks": ranks, "way": way, "topology": topology}
    empty = dict.fromkeys(("rounds", "sent_bytes", "formula_bytes", "first", "last"))
    try:
        plan: Plan = plan_by_hand(
            captured.graph, [], "gpipe", num_micro_batches=1, replicas=ranks
        ).changed(sums=way, topology=topology)
    except PlanError as problem:
        return {**row, **empty, "outcome": f"refused: {problem.message}"}
    given: list[int] = []
    program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
    with tempfile.TemporaryDirectory() as folder:
        policy = SavePolicy(Path(folder))
        task = Task(captured, stages, job, windows_of(program, steps), policy=policy)
        told = Steps(program.grid.step_micro_batches)
        live = partial(_live, task, given)
        done = outcome_of(run_threads(live, ranks, told.add, groups=task.groups), told, {})
    losses = [each.loss or 0.0 for each in done.steps]
    counted = topology is not None or sums_way(way).served
    return {
        **row,
        "rounds": len(routes_of(topology, ranks).rounds) if topology else None,
        "sent_bytes": sum(given) if counted else None,
        "formula_bytes": formula_bytes(way, topology or "", ranks, steps) if counted else None,
        **{"first": losses[0], "last": losses[-1], "outcome": "works"},
    }


def _live(task: Task, given: list[int], end: Transport, tell: Any) -> Any:
    counted: Any = CountedSwaps(end, given)
    return work(task, counted, tell)


def rows(ranks: Sequence[int], steps: int, ways: Sequence[str | None] = EVERY) -> Iterator[Row]:
    for count in ranks:
        for way in ways:
            yield from map(partial(row_of, way, ranks=count, steps=steps), TOPOLOGIES)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--steps", type=int, default=80, help="a multiple of 8")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = list(rows(given.ranks, given.steps))
    if given.json:
        print(json.dumps(found))
        return
    shown = [[_shown(value) for value in row.values()] for row in found]
    print(face.table(list(found[0]), shown))


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
