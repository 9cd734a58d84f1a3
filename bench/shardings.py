"""Shardings: ways to spread embedding tables over two ranks, predicted beside measured.

    python -m bench.shardings [--json] [--quick] [--rounds N]
    python -m bench.shardings FOLDER      what torchrun starts for each rank: the plans of FOLDER

A small DLRM: tables of unlike sizes, a bottom and a top network, products of all pairs of features;
SGD, four micro-batches a step.  Eight sizes of it, two ranks, over memory of this host and over a
line of 100 MB/s and 0.5 ms (bench/network.py; as root).  The ways are what rules can say
(docs/rules.md), played by turns on the same ranks; each is predicted by the simulation of both
ranks, from ops and links that were measured.

way    replicate         each replica has all tables
       shard             stages are pieces; that of the tables is divided, and gathered while used
       shard_keep        the same, whole from its first use in a step to its last
       shard all         all pieces are divided
       slices            tables in two slices of rows, each a stage that is divided
       largest           the largest table in four slices, divided; the others whole
       tables | rest     no replicas: tables and bottom on one rank, the rest on the other
       half | half       no replicas: cut at the first product of the top network, or before it

predicted_s, measured_s    of a step; measured: the median of the rounds' medians
searched_s predicted of the plan that the search finds with no way named; `searched`: that, beside
           the way that is predicted best
error      of all ways of a size and link: geometric mean of how far predicted / measured is from 1
is_best    whether the way that is predicted best is the one that is measured best, or takes at most
           2 % longer; `regret`: how much longer it takes

Source of the comparison: 5.21 % and 85 % for DLRM over GPUs, as measured by others.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.line import at_both_ends, cluster_over
from bench.machine import machine
from bench.network import Place, can_throttle, line
from bench.play import Block, Played, Rounds, Traced, play
from penstock.choose.prepare import machines
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.graph.graph import Graph
from penstock.graph.split import split
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.listener import SILENT
from penstock.plan import Plan, Sharding, plan_by_hand
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.runtime.launch import join_torchrun, on_one_host, torchrun_store
from penstock.search import Fixed, evaluate, search
from penstock.transport import Transport
from penstock.transport.shared_memory import SharedMemoryTransport

RANKS, MICRO_BATCHES, DENSE, WIDTH = 2, 4, 13, 64
RATE, DELAY_S = 100e6, 0.0005
NEAR = 0.02
Row = dict[str, float | int | str | bool]


class DlrmSize(NamedTuple):
    """Rows of the tables, numbers of a row, samples of a micro-batch."""

    rows: tuple[int, ...]
    dim: int
    batch: int

    def __str__(self) -> str:
        rows = "+".join(f"{rows:,}" for rows in self.rows[:4])
        more = f"+... ({len(self.rows)} tables)" if len(self.rows) > 4 else ""
        return f"{rows}{more} x {self.dim}, {self.batch} samples"


SIZES = (
    DlrmSize((20_000, 8_000, 2_000, 500), 32, 128),
    DlrmSize((100_000, 1_000), 16, 256),
    DlrmSize((5_000,) * 8, 32, 128),
    DlrmSize((40_000, 20_000, 10_000, 5_000), 64, 64),
    DlrmSize((1_000, 500, 200, 100), 64, 512),
    DlrmSize((200_000,), 16, 128),
    DlrmSize((2_000,) * 16, 16, 256),
    DlrmSize((60_000, 60_000), 32, 32),
)


class Dlrm(nn.Module):
    """Rows of tables and a network's features, their products in pairs, and a network on top."""

    def __init__(self, size: DlrmSize) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, size.dim) for rows in size.rows)
        own = nn.Linear(DENSE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, size.dim), nn.ReLU()
        self.bottom = nn.Sequential(*own)
        count = len(size.rows) + 1
        wide = size.dim + count * (count - 1) // 2
        self.top = nn.Sequential(nn.Linear(wide, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, dense_BD: Tensor, index_BT: Tensor) -> Tensor:
        rows = [table(index_BT[:, at]) for at, table in enumerate(self.tables)]
        own = self.bottom(dense_BD)
        all_BFD = torch.stack([own, *rows], dim=1)
        pairs_BFF = all_BFD @ all_BFD.transpose(1, 2)
        one, other = torch.triu_indices(all_BFD.shape[1], all_BFD.shape[1], 1)
        return self.top(torch.cat([own, pairs_BFF[:, one, other]], dim=1))


def job_of(size: DlrmSize) -> Job:
    def data(start: int) -> Iterator[dict[str, Tensor]]:
        return itertools.islice(itertools.cycle(made), start % len(made), None)

    made = [*itertools.islice(_batches(size), 8)]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["dense"], batch["index"]) - batch["y"]).square().mean()

    def sgd(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, 0.01)

    return Job(lambda: Dlrm(size), loss, data, sgd, micro_batches=MICRO_BATCHES)


def _batches(size: DlrmSize) -> Iterator[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    while True:
        index = [torch.randint(rows, (size.batch,), generator=source) for rows in size.rows]
        yield {
            "dense": torch.randn(size.batch, DENSE, generator=source),
            "index": torch.stack(index, dim=1),
            "y": torch.randn(size.batch, 1, generator=source),
        }


# -- ways -----------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A way to spread the tables: its plan, and the trace that it is of."""

    plan: Plan
    captured: Capture


def ways_of(captured: Capture) -> dict[str, Spread]:
    """Return all ways of one size."""
    graph = captured.graph
    names = [f"tables.{at}.weight" for at in range(_tables(captured))]
    halves = split(captured, dict.fromkeys(names, 2))
    largest = max(names, key=lambda name: _rows(captured, name))
    quarters = split(captured, {largest: 4})
    top = next(at for at, point in enumerate(graph.cut_points) if "top" in point.name)
    return {
        "replicate": Spread(_replicas(captured), captured),
        "shard": Spread(_divided(captured, "shard", _tables_at(captured)), captured),
        "shard_keep": Spread(_divided(captured, "shard_keep", _tables_at(captured)), captured),
        "shard all": Spread(_divided(captured, "shard", lambda stage: True), captured),
        "slices": Spread(_divided(halves, "shard", _tables_at(halves)), halves),
        "largest": Spread(_divided(quarters, "shard", _slices_at(quarters)), quarters),
        "tables | rest": Spread(_staged(graph, 0), captured),
        "half | half": Spread(_staged(graph, top), captured),
    }


def _staged(graph: Graph, cut: int) -> Plan:
    return plan_by_hand(graph, [cut], "one_f_one_b", num_micro_batches=MICRO_BATCHES)


def _replicas(captured: Capture) -> Plan:
    count = MICRO_BATCHES // RANKS
    return plan_by_hand(captured.graph, (), "one_f_one_b", num_micro_batches=count, replicas=RANKS)


def _divided(captured: Capture, how: Sharding, which: Callable[[int], bool]) -> Plan:
    """Return replicas whose stages are pieces, of which some are divided."""
    whole = _replicas(captured).refined(captured.graph, units=len(captured.graph.cut_points) + 1)
    words = tuple(how if which(stage) else "replicate" for stage in range(whole.num_stages))
    return whole.changed(shard=words, prefetch=1)


def _tables_at(captured: Capture) -> Callable[[int], bool]:
    """Return whether a piece has tables: those before the first cut that is no slice's."""
    points = [point.name for point in captured.graph.cut_points]
    last = next(at for at, name in enumerate(points) if "tables" not in name)
    is_first = not captured.graph.slices
    return lambda stage: stage == 0 if is_first else stage < last


def _slices_at(captured: Capture) -> Callable[[int], bool]:
    """Return whether a piece is a slice."""
    points = [point.name for point in captured.graph.cut_points]
    count = sum("slice" in name for name in points)
    return lambda stage: stage <= count


def _tables(captured: Capture) -> int:
    names = {node.name for node in captured.graph.nodes if node.kind == "parameter"}
    return sum(name.startswith("tables.") for name in names)


def _rows(captured: Capture, name: str) -> int:
    node = next(n for n in captured.graph.nodes if n.name == name and n.kind == "parameter")
    return node.shape[0]


# -- played and predicted -------------------------------------------------------------------------


def hold(folder: Path) -> None:
    """Be one rank that torchrun has started."""
    torch.set_num_threads(1)
    size, rounds = json.loads((folder / "task.json").read_text())
    plans = [Plan.load(path) for path in sorted((folder / "plans").iterdir())]
    job = job_of(DlrmSize(tuple(size[0]), *size[1:]))
    traced = {1: Traced(job, capture(job))}

    store, is_here = torchrun_store(), on_one_host()

    def work(end: Transport) -> list[Played]:
        def own(number: int) -> Transport:
            """Return an end of this plan alone: edges of shared memory have the sizes of one."""
            prefix = dist.PrefixStore(f"plan {number}", store)
            return SharedMemoryTransport(end.rank, RANKS, prefix) if is_here else end

        return play(traced, plans, own, Rounds(*rounds))

    found = join_torchrun(work, store, groups=[tuple(range(RANKS))])
    if os.environ["RANK"] == "0":
        (folder / "played.json").write_text(json.dumps(found))


def measured_s(
    size: DlrmSize, plans: Sequence[Plan], rounds: Rounds, places: Sequence[Place]
) -> list[float]:
    """Return the median seconds of a step of each plan, at two places, or here for none."""
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        (folder / "plans").mkdir()
        for number, plan in enumerate(plans):
            plan.save(folder / "plans" / f"{number:02}.json")
        (folder / "task.json").write_text(json.dumps([size, rounds]))
        own = ["bench.shardings", given]
        if places:
            at_both_ends(places, own)
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc-per-node={RANKS}", "-m", *own]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        rows = json.loads((folder / "played.json").read_text())
    return [statistics.median(Block(*block).step_s for block in blocks) for blocks, _ in rows]


class Known(NamedTuple):
    """A size with its ways, and seconds of the ops of the graphs that these are of."""

    size: DlrmSize
    ways: dict[str, Spread]
    profiles: dict[str, Profile]

    @classmethod
    def of(cls, size: DlrmSize) -> "Known":
        """Measure the ops of a size."""
        job, profiles = job_of(size), dict[str, Profile]()
        ways = ways_of(capture(job))
        for one in ways.values():
            digest = one.captured.graph.digest
            if digest not in profiles:
                profiles[digest] = measure(one.captured, job, beside=RANKS - 1)
        return cls(size, ways, profiles)

    def predicted_s(self, way: str, cluster: Cluster) -> float:
        """Return the seconds of a step by the simulation of both ranks."""
        plan, captured = self.ways[way]
        profile = self.profiles[captured.graph.digest]
        own = replace(profile, kind=cluster.hosts[0].device)
        return evaluate(captured.graph, (own,), cluster, plan)[0].step_s


def searched_s(captured: Capture, profile: Profile, cluster: Cluster) -> float:
    """Return the predicted seconds of the plan on both ranks that the search finds by itself."""
    fixed = Fixed(ranks=RANKS)
    found = search(captured.graph, profile, cluster, micro_batches=MICRO_BATCHES, fixed=fixed)
    assert found.plan.predicted is not None, "a search predicts"
    return found.plan.predicted.step_s


def rows_of(
    known: Known, link: str, cluster: Cluster, rounds: Rounds, places: Sequence[Place]
) -> Iterator[Row]:
    """Yield a row for each way of one size over one link."""
    plans = [one.plan for one in known.ways.values()]
    took = measured_s(known.size, plans, rounds, places)
    whole = known.ways["replicate"].captured
    profile = replace(known.profiles[whole.graph.digest], kind=cluster.hosts[0].device)
    alone_s = searched_s(whole, profile, cluster)
    for way, seconds in zip(known.ways, took, strict=True):
        step_s = known.predicted_s(way, cluster)
        own = {"size": str(known.size), "link": link, "way": way}
        yield {**own, "predicted_s": step_s, "measured_s": seconds, "searched_s": alone_s}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each size and link, and one over all."""
    found: list[Row] = []
    for key in dict.fromkeys((str(row["size"]), str(row["link"])) for row in rows):
        own = [row for row in rows if (row["size"], row["link"]) == key]
        best = min(own, key=lambda row: float(row["measured_s"]))
        picked = min(own, key=lambda row: float(row["predicted_s"]))
        regret = float(picked["measured_s"]) / float(best["measured_s"]) - 1
        words = {"best": str(best["way"]), "predicted_best": str(picked["way"])}
        beside = float(own[0]["searched_s"]) / float(picked["predicted_s"])
        about = {"regret": regret, "is_best": regret <= NEAR, "searched": beside}
        found.append({"size": key[0], "link": key[1], "error": error_of(own), **words, **about})
    share = sum(bool(row["is_best"]) for row in found) / len(found)
    regrets = [float(row["regret"]) for row in found]
    searched = max(float(row["searched"]) for row in found)
    everything = {"error": error_of(rows), "is_best": share, "regret": max(regrets)}
    everything["searched"] = searched
    return [*found, {"size": "all", "link": "all", **everything}]


def error_of(rows: Sequence[Row]) -> float:
    """Return the distance of predicted / measured from 1, as a geometric mean of factors."""
    off = [abs(math.log(float(r["predicted_s"]) / float(r["measured_s"]))) for r in rows]
    return math.exp(sum(off) / len(off)) - 1


def all_rows(sizes: Sequence[DlrmSize], rounds: Rounds, *, over_line: bool) -> Iterator[Row]:
    """Yield the rows of all sizes, here and over a line."""
    here, known = machines(None, RANKS, SILENT), [Known.of(size) for size in sizes]
    for one in known:
        yield from rows_of(one, "free", here, rounds, ())
    if not over_line:
        return
    with line(RATE, DELAY_S) as places, tempfile.TemporaryDirectory() as folder:
        apart = cluster_over(places, Path(folder))
        for one in known:
            yield from rows_of(one, f"{RATE / 1e6:g} MB/s", apart, rounds, places)


def main() -> None:
    """Print the rows and what they come to."""
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_dir():
        return hold(Path(sys.argv[1]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two sizes, here, one round")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    can, why = can_throttle()
    if not can:
        face.say(f"free links only: {why}")
    torch.set_num_threads(1)
    rounds = Rounds(turns=1 if asked.quick else asked.rounds)
    sizes = SIZES[:2] if asked.quick else SIZES
    rows: list[Row] = []
    for row in all_rows(sizes, rounds, over_line=can and not asked.quick):
        rows.append(row)
        off = float(row["predicted_s"]) / float(row["measured_s"]) - 1
        both = f"{1e3 * float(row['predicted_s']):8.3f} {1e3 * float(row['measured_s']):8.3f}"
        face.say(f"{row['size']:45} {row['link']:9} {row['way']:14} {both} ms {100 * off:+6.1f} %")
    found = summary(rows)
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": rows, "summary": found}))
        return
    for row in found:
        words = "" if "best" not in row else f"{row['predicted_best']} for {row['best']}"
        figures = (
            f"error {100 * float(row['error']):.1f} %, regret {100 * float(row['regret']):.1f} %, "
            f"searched {float(row['searched']):.3f} of the best way"
        )
        print(f"{row['size']:45} {row['link']:9} {figures}, best {row['is_best']} {words}")


if __name__ == "__main__":
    main()
