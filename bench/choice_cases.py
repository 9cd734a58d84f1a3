"""Cases of bench.choices: forty random nets and four models, on described devices.

Seconds are estimated, so they are the same wherever the bench runs: devices of 50 GFLOP/s, and of
each net how fast its link and its far memory are, whether copies run beside computes, and what is
fixed of the shape, by its number.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import transformers as hf
from torch import nn
from torch.optim import AdamW

from bench.architectures import COMMON
from bench.zoo import GPT
from bench.zoo import JOBS as ZOO
from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.graph.graph import Graph
from penstock.graph.traced_graph import trace
from penstock.job import Job
from penstock.profile.estimate import estimated
from penstock.profile.profile import Profile
from penstock.search.shapes import Fixed
from penstock.units import GiB

RANDOM_NETS = 40
_STATE = 2.0  # AdamW's, per byte of weights
_FIXED = (
    Fixed(ranks=2, replicas=2),
    Fixed(ranks=2, replicas=1),
    Fixed(ranks=2),
    Fixed(ranks=1),
)
_TINY = 4  # nets of two layers, of which all choices are tried


@dataclass(frozen=True)
class Case:
    """A net, where it is to be trained, and what is fixed."""

    name: str
    graph: Graph
    profile: Profile
    cluster: Cluster
    micro_batches: int
    fixed: Fixed
    tiny: bool = False

    def under(self, cap_bytes: int | None) -> Cluster:
        """Return the cluster, its devices with that memory."""
        if cap_bytes is None:
            return self.cluster
        kinds = (replace(kind, memory_bytes=cap_bytes) for kind in self.cluster.devices)
        return replace(self.cluster, devices=tuple(kinds))


def cases(names: str = "") -> Iterator[Case]:
    """Yield the cases whose name begins with `names`, one after the other."""
    for number in range(RANDOM_NETS):
        name = f"net {number:02}"
        if name.startswith(names):
            yield _net(number, name)
    for number, (name, (model, batch)) in enumerate(_MODELS.items()):
        if name.startswith(names):
            yield _case(name, _job(model, batch), random.Random(100 + number), number % 4)


def _net(number: int, name: str) -> Case:
    source = random.Random(number)
    tiny = number < _TINY
    layers = 2 if tiny else source.randint(3, 6)
    widths = [source.choice((64, 128, 256, 512)) for _ in range(layers + 1)]
    act = source.choice((nn.ReLU, nn.GELU, nn.Tanh, nn.Identity))
    rows = source.choice((16, 64, 256))

    def model() -> nn.Module:
        pairs = pairwise(widths)
        return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), act()) for a, b in pairs))

    job = _job(model, {"input": torch.ones(rows, widths[0])})
    return replace(_case(name, job, source, 0 if tiny else number % 4), tiny=tiny)


def _case(name: str, job: Job, source: random.Random, shape: int) -> Case:
    kind = DeviceKind(
        name="described",
        memory_bytes=64 * GiB,
        flop_per_s=(("float32", 50e9),),
        memory_bytes_per_s=10e9,
        copy_engine=source.random() < 0.5,
    )
    fixed = _FIXED[shape]
    graph = trace(job, elsewhere=True)
    guess, far_s = estimated(graph, kind, _STATE), 1 / source.choice((0.5e9, 2e9, 8e9))
    profile = replace(guess, copying=replace(guess.copying, far_s_per_byte=far_s))
    link = Link(20e-6, source.choice((50e6, 150e6, 1e9, 4e9)))
    hosts = (Host("host", "described", fixed.ranks or 2),)
    cluster = Cluster(devices=(kind,), hosts=hosts, inside=link)
    return Case(name, graph, profile, cluster, source.choice((4, 8)), fixed)


def _job(model: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> Job:
    def data(start: int) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield batch

    return Job(model, _loss, data, lambda weights: AdamW(weights, lr=1e-3))


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a scalar that reads all that the model gives."""
    made = model(**batch)
    return (made if isinstance(made, torch.Tensor) else made.logits).float().square().mean()


_SIZES = COMMON | {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
_TOKENS = torch.zeros(4, 32, dtype=torch.long)
_MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "gpt": (lambda: GPT(128, 4, 256, 32), {"ids": _TOKENS}),
    "llama": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(use_cache=False, **_SIZES)),
        {"input_ids": _TOKENS},
    ),
    "resnet": (lambda: ZOO["cnn"].model(), {"input": torch.zeros(4, 3, 16, 16)}),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(use_cache=False, num_local_experts=4, **_SIZES)
        ),
        {"input_ids": _TOKENS},
    ),
}
