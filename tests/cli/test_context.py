"""Tokens of sequences divided among ranks, on the command line: checked, resumed, refused."""

from pathlib import Path

import pytest

from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.plan import Plan
from tests.cli.conftest import Call
from tests.cli.goes_on import check_goes_on

JOB = """
import torch
import penstock as ps
from torch import nn
from torch.nn import functional as F


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.qkv = nn.Embedding(32, 16), nn.Linear(16, 48, bias=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, words):
        x = self.table(words)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))


def data(start):
    for number in range(start, 10**6):
        drawn = torch.Generator().manual_seed(number)
        yield torch.randint(32, (2, TOKENS + 1), generator=drawn)


def loss(model, words):
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


job = ps.Job(Words, loss, data, lambda p: torch.optim.AdamW(p, lr=0.01), micro_batches=2)
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    return written(tmp_path, 16)


def written(folder: Path, tokens: int) -> str:
    file = folder / f"words{tokens}.py"
    file.write_text(JOB.replace("TOKENS", str(tokens)))
    return f"{file}:job"


def test_a_step_divided_by_tokens_equals_the_plain_one(call: Call, job: str) -> None:
    done = call("check", job, "--set", "stages=1", "--set", "context=2")
    assert done.code == 0, done.err
    assert "ok" in done.out


def test_a_run_goes_on_in_one_process_and_divided_again(
    call: Call, job: str, tmp_path: Path
) -> None:
    check_goes_on(call, job, "context=2", tmp_path)


def test_a_plan_for_machines_of_a_file_is_simulated_and_explained(
    call: Call, job: str, tmp_path: Path
) -> None:
    machines, file = tmp_path / "four.toml", tmp_path / "plan.json"
    kind = DeviceKind("small", 1 << 30, (("float32", 1e11),), 2e10)
    Cluster((kind,), (Host("host", "small", 4),), inside=Link(1e-6, 50e9)).save(machines)
    asked = "--set", "context=2", "--ranks", 4, "--replicas", 2
    done = call("plan", job, "--cluster", machines, *asked, "--out", file)
    assert done.code == 0, done.err
    words = "context: 2 ranks (user): requested: each has 1 / 2 of the tokens of a sequence"
    assert words in done.out
    assert Plan.load(file).place.replicas == 2
    assert call("simulate", file).code == 0
    assert "context: 2 ranks (user)" in call("explain", file).out


def test_what_no_such_plan_has_is_refused_by_name(call: Call, job: str, tmp_path: Path) -> None:
    asked = "train", job, "--ranks", 2, "--set", "context=2"
    error, hint = call(*asked, "--set", "tensor=2").refusal(2)
    assert error == "2 ranks are to divide ops, and 2 tokens; no plan has both"
    assert hint == "leave out tensor, or context"
    error, hint = call(*asked, "--elastic").refusal(2)
    assert error == "2 ranks are to divide the tokens of sequences, and no such plan has elastic"
    assert hint == "leave out context, or elastic"
    odd = written(tmp_path, 18)
    error, _ = call("check", odd, "--set", "context=2").refusal(2)
    assert "sequences of 19 tokens, and a multiple of 4 is needed" in error
