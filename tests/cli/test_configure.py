"""penstock configure: the best configurations with their intervals, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.configure import op_by_op
from penstock.estimate import load
from penstock.estimate.datasheet import Datasheet
from penstock.estimate.known import find_model
from penstock.search.transformer.configurations import configurations
from penstock.search.transformer.found import Pool
from penstock.search.transformer.machines import constants_for
from tests.cli.conftest import Call
from tests.estimate.test_config import LLAMA

ROOT = Path(__file__).parents[2]
MIXED = ROOT / "examples" / "mixed.toml"
ALIKE = """
[[device]]
name = "a100-80"
memory_bytes = 85899345920
flop_per_s = { bfloat16 = 312e12 }
memory_bytes_per_s = 2.039e12
usd_per_hour = 2.0

[[host]]
name = "one"
device = "a100-80"
num_devices = 8

[inside]
latency_s = 1e-5
bytes_per_s = 300e9
"""


@pytest.fixture
def alike(tmp_path: Path) -> Path:
    path = tmp_path / "alike.toml"
    path.write_text(ALIKE)
    return path


def test_best_are_those_of_the_search_with_their_intervals(call: Call, alike: Path):
    done = call("configure", "mpt-1b", alike, "--batch", 64, "--json", "--show", 3)
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    device = Datasheet("a100-80", 312e12, 2.039e12, 300e9, 300e9, 8, memory_bytes=80 * 2**30)
    pool = Pool(device, 8, 80 * 2**30, 2.0)
    time, memory = (constants_for(each.quantity, (pool,), load()) for each in load())
    model = op_by_op(find_model("mpt-1b"))
    expected = configurations(model, pool, batch=64, constants=(time, memory))
    assert found["parameters"] == model.parameters
    assert found["candidates"] == expected.candidates
    assert found["rejected"] == dict(expected.rejected)
    assert len(found["configurations"]) == 3
    for row, made in zip(found["configurations"], expected.simulated, strict=False):
        assert row["seconds"]["value"] == made.seconds
        assert row["peak_bytes"]["value"] == made.peak_bytes <= pool.memory_bytes
        for key, item in (("seconds", time), ("peak_bytes", memory)):
            factor = row[key]["high"] / row[key]["value"]
            assert math.log(factor) > 1.28 * item.spread  # and the doubt of constants
            assert row[key]["low"] == pytest.approx(row[key]["value"] / factor)
        assert row["usd"] == pytest.approx(made.seconds * 8 * 2.0 / 3600)
        samples = row["data"] * row["micro_batch"] * row["num_micro_batches"]
        assert (samples, row["tensor"] * row["data"] * len(row["stages"])) == (64, 8)
        assert row["on_front"] == (made in expected.front)
        assert "cluster" in row["extrapolates"]


def test_operators_are_kernels_of_their_own():
    plain = find_model("llama3-8b")
    made = op_by_op(plain)
    assert (made.is_op_by_op, made.scores) == (True, "masked")
    assert op_by_op(find_model("mpt-1b")).scores == "flash 1"
    assert replace(made, is_op_by_op=False, scores="fused") == plain


def test_table_says_what_it_rests_on(call: Call, alike: Path):
    out = call("configure", "mpt-1b", alike, "--batch", 64).out
    lines = out.splitlines()
    assert lines[0] == ("mpt-1b: 1.32 billion parameters, 2048 tokens a sample, 64 samples a step")
    assert [line.split()[0].strip("*") for line in lines[3:8]] == ["1", "2", "3", "4", "5"]
    assert lines[3].split()[0] == "1*"
    assert "need more than 80.0 GiB a device" in out
    assert "time: rests on " in out
    assert "; here it extrapolates in cluster" in out
    assert " runs on " in out
    assert "memory: rests on " in out


def test_devices_of_several_kinds_are_stages_of_one_pipeline(call: Call):
    found = json.loads(call("configure", "opt-350", MIXED, "--batch", 32, "--json").out)
    rows = found["configurations"]
    assert {name for row in rows for name in row["devices"]} <= {"a100", "t4"}
    assert rows[0]["devices"] != ["t4"]
    assert [row["seconds"]["value"] for row in rows] == (
        sorted(row["seconds"]["value"] for row in rows)
    )


def test_model_of_a_file_and_a_longer_sequence(call: Call, alike: Path, tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    short, long = (
        json.loads(call("configure", path, alike, "--batch", 8, *more, "--json").out)
        for more in ((), ("--sequence", 4096))
    )
    assert short["parameters"] == long["parameters"]
    seconds = [found["configurations"][0]["seconds"]["value"] for found in (short, long)]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt-9", MIXED), "no model is called 'gpt-9'"),
        (("opt-350", ROOT / "nothing.toml"), "cannot read"),
        (("llama3-405b", MIXED), "none of"),
    ],
)
def test_what_cannot_be_is_one_line_and_a_hint(call: Call, arguments: tuple[str], words: str):
    done = call("configure", *arguments)
    assert done.code == 2
    first, *rest = done.err.splitlines()
    assert first.startswith("error: ")
    assert words in first
    assert [line[:6] for line in rest] == ["hint: "]
