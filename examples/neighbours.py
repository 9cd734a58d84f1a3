"""A graph network learns from sampled neighbours; features come from a store, the hot ones cached.

    python examples/neighbours.py                       both ways, and where the time goes
    penstock train examples/neighbours.py --out runs/cached
    penstock train examples/neighbours.py:uncached --out runs/uncached

GraphSAGE in plain PyTorch: of each node some neighbours are drawn, and of each of these some.  Each
node's features are asked for once a micro-batch, in one request to a store far away; rows of the
nodes with most neighbours, which are drawn most often, are kept here, as many as there is room for.
The numbers of a micro-batch are the same; only what is fetched differs (`fetched`, in kB).

Source: "Characterizing and understanding distributed GNN training on GPUs", arXiv:2204.08150.

Letters of tensor shapes: N nodes, E edges, S seeds, K neighbours of a seed, L of each of these,
D features.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

import penstock as ps

NODES, EDGES, COMMUNITIES, D = 20_000, 200_000, 8, 64
SEEDS, K, L = 64, 10, 5
WIDTH, STEPS = 32, 100
HELD_OUT = NODES // 10  # the last nodes are for validation
CACHE_BYTES = NODES * D * 4 // 10  # a tenth of all features
REQUEST_S, BYTES_PER_S = 2e-3, 50e6  # of the store, which is played: a wait

Batch = dict[str, Tensor]


class Neighbours(NamedTuple):
    """Who is beside whom: the neighbours of node n are `beside[first[n] : first[n + 1]]`."""

    first: Tensor
    beside: Tensor
    community: Tensor

    def drawn(self, nodes: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Return so many neighbours of each node, with replacement: shapes are always the same."""
        begin, size = self.first[nodes], self.first[nodes + 1] - self.first[nodes]
        place = torch.rand(*nodes.shape, count, generator=generator, dtype=torch.float64)
        return self.beside[begin[..., None] + (place * size[..., None]).long()]


@cache
def graph() -> Neighbours:
    """Return a graph in which few nodes have many neighbours, most of them of their community."""
    generator = torch.Generator().manual_seed(0)
    community = torch.randint(COMMUNITIES, (NODES,), generator=generator)
    fame_N = 1 / (1 + torch.randperm(NODES, generator=generator)) ** 0.75
    begin_E = torch.multinomial(fame_N, EDGES, replacement=True, generator=generator)
    end_E = torch.multinomial(fame_N, EDGES, replacement=True, generator=generator)
    alike_E = community[begin_E] == community[end_E]
    kept_E = alike_E | (torch.rand(EDGES, generator=generator) < 0.05)
    begin_E, end_E, own_N = begin_E[kept_E], end_E[kept_E], torch.arange(NODES)
    sources = torch.cat([begin_E, end_E, own_N])  # both ways, and each is its own neighbour
    order = sources.argsort(stable=True)
    counts_N = sources.bincount(minlength=NODES)
    first = F.pad(counts_N.cumsum(0), (1, 0))
    return Neighbours(first, torch.cat([end_E, begin_E, own_N])[order], community)


@cache
def stored() -> Tensor:
    """Return all features, which nobody has here but the store: [N, D], a weak hint and noise."""
    generator = torch.Generator().manual_seed(1)
    centre_CD = torch.randn(COMMUNITIES, D, generator=generator)
    noise_ND = torch.randn(NODES, D, generator=generator)
    return 0.3 * centre_CD[graph().community] + noise_ND


class Features:
    """Features of nodes: from the cache, and the others by one request to the store."""

    def __init__(self, cache_bytes: int) -> None:
        counts_N = graph().first.diff()
        room = cache_bytes // (stored().shape[1] * stored().itemsize)
        hot = counts_N.argsort(descending=True, stable=True)[:room]
        self.place_N = torch.full((len(counts_N),), -1)
        self.place_N[hot] = torch.arange(len(hot))
        self.rows = stored()[hot]

    def of(self, nodes: Tensor) -> tuple[Tensor, int]:
        """Return rows of nodes, and the bytes that were fetched for them."""
        place = self.place_N[nodes]
        missing = place < 0
        rows = torch.empty(len(nodes), stored().shape[1])
        rows[~missing] = self.rows[place[~missing]]
        fetched = stored()[nodes[missing]]
        if fetched.nbytes:
            time.sleep(REQUEST_S + fetched.nbytes / BYTES_PER_S)
        rows[missing] = fetched
        return rows, fetched.nbytes


@cache
def features(cache_bytes: int) -> Features:
    return Features(cache_bytes)


def sampled(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the seeds of micro-batch `number`, their neighbours and those of these."""
    generator = torch.Generator().manual_seed(number)
    seeds_S = torch.randint(NODES - HELD_OUT, (SEEDS,), generator=generator)
    near_SK = graph().drawn(seeds_S, K, generator)
    return seeds_S, near_SK, graph().drawn(near_SK, L, generator)


def batch_of(nodes: tuple[Tensor, Tensor, Tensor], cache_bytes: int) -> Batch:
    """Return features of sampled nodes; each node is asked for once."""
    flat = torch.cat([part.flatten() for part in nodes])
    distinct, place = flat.unique(return_inverse=True)
    rows, fetched_bytes = features(cache_bytes).of(distinct)
    parts = rows[place].split([part.numel() for part in nodes])
    own, near, far = (x.view(*n.shape, D) for x, n in zip(parts, nodes, strict=True))
    labels, kilobytes = graph().community[nodes[0]], torch.tensor(fetched_bytes / 1e3)
    return {"own": own, "near": near, "far": far, "labels": labels, "fetched": kilobytes}


def data(start: int, cache_bytes: int) -> Iterator[Batch]:
    while True:
        yield batch_of(sampled(start), cache_bytes)
        start += 1


def validation(cache_bytes: int) -> Iterable[Batch]:
    """Return held-out nodes, with neighbours that are the same each time."""
    generator = torch.Generator().manual_seed(2)
    for seeds_S in torch.arange(NODES - HELD_OUT, NODES).split(SEEDS)[:8]:
        near_SK = graph().drawn(seeds_S, K, generator)
        yield batch_of((seeds_S, near_SK, graph().drawn(near_SK, L, generator)), cache_bytes)


class Mix(nn.Module):
    """A node's own vector and the mean of its neighbours' make its next one."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.own, self.near = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, own: Tensor, near: Tensor) -> Tensor:
        return self.own(own) + self.near(near.mean(-2))


class Sage(nn.Module):
    """Features of seeds, neighbours and neighbours of these in, scores of communities out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mix(D, WIDTH), Mix(WIDTH, COMMUNITIES)

    def forward(self, own_SD: Tensor, near_SKD: Tensor, far_SKLD: Tensor) -> Tensor:
        seeds = self.first(own_SD, near_SKD).relu()
        return self.second(seeds, self.first(near_SKD, far_SKLD).relu())


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    scores = model(batch["own"], batch["near"], batch["far"])
    return F.cross_entropy(scores, batch["labels"]), {"fetched": batch["fetched"]}


def metrics(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, int]]:
    """Return how many nodes are put into their community, and of how many."""
    scores = model(batch["own"], batch["near"], batch["far"])
    return {"right": ((scores.argmax(1) == batch["labels"]).sum(), len(scores))}


def optimizer(weights: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(weights, lr=1e-2)


def classifier(cache_bytes: int = CACHE_BYTES) -> ps.Job:
    """Return the job with so many bytes of features kept here."""
    return ps.Job(
        model=Sage,
        loss=loss,
        data=partial(data, cache_bytes=cache_bytes),
        optimizer=optimizer,
        micro_batches=2,
        num_steps=STEPS,
        validation=partial(validation, cache_bytes),
        metrics=metrics,
    )


job, uncached = partial(classifier), partial(classifier, 0)


def reading_s(cache_bytes: int, batches: int = 50) -> tuple[float, float]:
    """Return the seconds of sampling, and of loading features, of a micro-batch."""
    batch_of(sampled(0), cache_bytes)  # makes the graph, and fills the cache
    begin = time.perf_counter()
    drawn = [sampled(number) for number in range(batches)]
    middle = time.perf_counter()
    for nodes in drawn:
        batch_of(nodes, cache_bytes)
    return (middle - begin) / batches, (time.perf_counter() - middle) / batches


def trained(folder: Path, name: str, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Train by two replicas; return seconds of a step by part, and figures of the run."""
    out, where, plan = folder / name, f"{__file__}:{name}", folder / "uncached" / "plan.json"
    plans = ["--plan", str(plan)] if plan.exists() else ["--ranks", "2", "--set", "stages=1"]
    options = ["--out", str(out), "--steps", str(steps), *plans]
    command = [sys.executable, "-m", "penstock", "train", where, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    told = summary["breakdown"]
    seconds = dict(zip(told["parts"], told["seconds"][0], strict=True))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    fetched = sum(row["fetched"] for row in rows) / len(rows)
    figures = {"fetched": fetched, "loss": rows[-1]["loss"], "right": summary["val_right"]}
    return {part: s / told["num_steps"] for part, s in seconds.items()}, figures


def main(steps: int = STEPS) -> None:
    """Train with and without a cache, and print where the time of a micro-batch goes."""
    print("cache     sampling  features   compute      sums  fetched  last loss    right")
    with tempfile.TemporaryDirectory() as folder:
        for name, cache_bytes in (("uncached", 0), ("job", CACHE_BYTES)):
            sampling_s, features_s = reading_s(cache_bytes)
            spent, run = trained(Path(folder), name, steps)
            compute_s = spent["F"] + spent["B"] + spent["optimizer"]
            seconds = sampling_s, features_s, compute_s, spent["collectives"] + spent["meeting"]
            times = " ".join(f"{1e3 * each:6.2f} ms" for each in seconds)
            told = f"{run['fetched']:5.0f} kB  {run['loss']:.7f} {run['right']:8.1%}"
            print(f"{cache_bytes / 1e6:3.1f} MB {times} {told}")


if __name__ == "__main__":
    main()
