"""Big: plans of models that have no room here, for machines elsewhere.

    python -m bench.big [--json] [--limit 30] [--models llama_8b ...] [--gpus 64 ...]

Each row is a process of its own: the model is built without values and traced, estimated on H100 in
hosts of eight (datasheet peaks), and searched.  Configurations are made from numbers.

parameters      of the model
cluster         GPUs
plan_s          seconds from the job to the plan, imports aside
processor_s     of these, of this process's own processor time
peak_rss_bytes  most memory of the process, Python and its libraries included
plans, tried    that there were, and of them simulated before the time was over
step_s          predicted, of a step of `micro_batches` sequences, in bfloat16
mfu             FLOP of a step over what the GPUs of the cluster could do meanwhile
peak_bytes      predicted, of the fullest rank
problem         why there is no plan, if there is none
"""

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

import penstock as ps
from bench.machine import machine
from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import PlanError
from penstock.search.search import search
from penstock.search.shapes import Fixed

PEAK = 989e12  # of an H100 in bfloat16, dense
H100 = DeviceKind(
    "h100",
    80 << 30,
    (("float32", 67e12), ("bfloat16", PEAK)),
    3.35e12,
    usd_per_hour=2.5,
    copy_engine=True,
)
Make = Callable[[], nn.Module]


class Model(NamedTuple):
    """What is planned: the class, its configuration, and the length of a sequence (0: images)."""

    kind: type[PreTrainedModel]
    config: PretrainedConfig
    tokens: int = 0


def _llama(hidden: int, layers: int, heads: int, inner: int, words: int, tokens: int) -> Model:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
    more = {"vocab_size": words, "max_position_embeddings": tokens, "use_cache": False}
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=8, **sizes, **more)
    return Model(LlamaForCausalLM, config, tokens)


def models() -> dict[str, Model]:
    """Return the models by name; `tiny` is for a test."""
    moe = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
    moe |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
    vit = {"hidden_size": 1664, "num_hidden_layers": 32, "intermediate_size": 6656}
    vit |= {"num_attention_heads": 16, "patch_size": 14, "num_labels": 1000}
    return {
        "tiny": _llama(64, 4, 8, 128, 256, 32),
        "llama_1b": _llama(2048, 16, 32, 8192, 32000, 2048),
        "llama_8b": _llama(4096, 32, 32, 14336, 128256, 8192),
        "llama_70b": _llama(8192, 80, 64, 28672, 128256, 8192),
        "mixtral_8x7b": Model(MixtralForCausalLM, MixtralConfig(use_cache=False, **moe), 4096),
        "vit_1b": Model(ViTForImageClassification, ViTConfig(**vit)),
    }


CASES = (
    *(("llama_1b", 8), ("llama_8b", 8), ("llama_8b", 64), ("llama_8b", 512)),
    *(("llama_70b", 64), ("llama_70b", 512), ("mixtral_8x7b", 64), ("mixtral_8x7b", 512)),
    *(("vit_1b", 8), ("vit_1b", 64)),
)


def job_of(model: Model, micro_batches: int) -> ps.Job:
    """Return the job of a model: one sequence, or eight images, a micro-batch."""
    words = getattr(model.config, "vocab_size", 0)

    def data(start: int) -> Iterator[dict[str, Tensor]]:
        for index in count(start):
            source = torch.Generator().manual_seed(index)
            if model.tokens:
                drawn = torch.randint(words, (1, model.tokens), generator=source)
                yield {"input_ids": drawn, "labels": drawn}
            else:
                images = torch.rand(8, 3, 224, 224, generator=source)
                yield {"pixel_values": images, "labels": torch.arange(8)}

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return module(**batch).loss

    return ps.Job(
        lambda: model.kind(model.config),
        loss,
        data,
        lambda weights: torch.optim.AdamW(weights, lr=1e-4),
        micro_batches=micro_batches,
        precision="bfloat16",
    )


def cluster_of(gpus: int) -> Cluster:
    """Return hosts of eight H100, NVLink inside and 400 Gb/s a GPU between."""
    hosts = tuple(Host(f"host{k}", H100.name, 8) for k in range(gpus // 8))
    inside, between = Link(5e-6, 450e9, 5e-6), Link(10e-6, 50e9, 10e-6)
    return Cluster((H100,), hosts, inside, between)


def row(name: str, gpus: int, limit_s: float) -> dict[str, object]:
    """Return the figures of one plan."""
    start, worked = time.perf_counter(), time.process_time()
    job, cluster = job_of(models()[name], max(16, gpus)), cluster_of(gpus)
    graph = ps.trace(job, elsewhere=True)
    profiles, began = ps.estimate(graph, cluster), list[float]()

    def is_over() -> bool:
        began.append(time.perf_counter())
        return began[-1] - began[0] > limit_s

    found: dict[str, object] = {"model": name, "cluster": gpus}
    found["parameters"] = sum(
        torch.Size(node.shape).numel() for node in graph.nodes if node.kind == "parameter"
    )
    given = {"micro_batches": job.micro_batches, "fixed": Fixed(), "is_over": is_over}
    try:
        result = search(graph, profiles, cluster, **given)
    except PlanError as problem:
        found["problem"] = problem.message
    else:
        best, tally = result.candidates[0], result.tally
        found |= {"step_s": best.step_s, "peak_bytes": max(best.peak_bytes)}
        found["mfu"] = graph.flop * job.micro_batches / (best.step_s * gpus * PEAK)
        found |= {"plan": str(result.plan).splitlines()[0], "tried": tally.simulated}
        found["plans"] = tally.simulated + tally.slower + tally.late
    found["plan_s"] = time.perf_counter() - start
    found["processor_s"] = time.process_time() - worked
    found["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of judging plans")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--gpus", nargs="*", type=int, help="only these clusters")
    asked = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, gpus in CASES:
        if name not in (asked.models or [name]) or gpus not in (asked.gpus or [gpus]):
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(row, (name, gpus, asked.limit)))
        if not asked.json:
            print(rows[-1], flush=True)
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
