"""penstock infer: it plans, runs or rehearses, and says how far it is from the plain model."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.conftest import MLP, Call

MIXED = """
[[device]]
name = "slow"
memory_bytes = 100000000
flop_per_s = { float32 = 1e7 }
memory_bytes_per_s = 1e8

[[device]]
name = "fast"
memory_bytes = 100000000
flop_per_s = { float32 = 3e7 }
memory_bytes_per_s = 1e9

[[host]]
name = "a"
device = "slow"
num_devices = 1

[[host]]
name = "b"
device = "fast"
num_devices = 1

[between]
latency_s = 1e-5
bytes_per_s = 1e8
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.toml"
    path.write_text(MIXED)
    return path


def test_unlike_devices_get_unlike_parts_and_are_rehearsed(call: Call, mixed: Path) -> None:
    flags = ["--cluster", mixed, "--batches", "6", "--rehearse", "--compare", "--json"]
    found = json.loads(call("infer", f"{MLP}:job", *flags).out)
    assert (found["ok"], found["loss"], found["returns"]) == (None, None, ["output"])
    assert found["plan"]["stages"][0]["name"] == "after 0.0"
    faster = found["batches_per_second_predicted"] / found["even_batches_per_second_predicted"]
    assert faster > 1.1
    assert found["batches_per_second_measured"] > 0 < found["even_batches_per_second_measured"]


def test_stream_on_this_machine_gives_files_like_the_plain_model(
    call: Call, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = call("infer", f"{MLP}:job", "--ranks", "1", "--batches", "3", "--out", out)
    assert done.code == 0, done.err
    assert "outputs: equal to the plain model's" in done.out
    assert sorted(path.name for path in out.iterdir()) == [
        f"0000000{n}.safetensors" for n in range(3)
    ]
    assert load_file(out / "00000002.safetensors")["output"].shape == (8, 1)


def test_other_machines_are_refused_unless_rehearsed(call: Call, mixed: Path) -> None:
    error, hint = call("infer", f"{MLP}:job", "--cluster", mixed).refusal(2)
    assert error.endswith("has 2 hosts; here is one")
    assert "--rehearse" in hint
