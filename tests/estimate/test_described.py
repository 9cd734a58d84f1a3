"""Described: a run in columns, what is taken for those that lack, what is refused and why."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import EstimateError
from penstock.estimate import MODELS, TrainingRun, read
from penstock.estimate.columns import COLUMNS
from penstock.estimate.datasheet import DEVICES, find_device
from penstock.estimate.frameworks import FRAMEWORKS
from penstock.estimate.training_run import Hiding

ROW = {  # invented
    "layers": "18", "hidden": "1536", "heads": "16", "vocabulary": "51200", "sequence": "1024",
    "device": "a100-80", "gpus": "8", "data": "2", "tensor": "2", "pipeline": "2",
    "micro_batch": "2", "batch": "32", "step_s": "0.3",
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path):
    def to_file(*rows: dict[str, str]) -> Path:
        path = tmp_path / "runs.csv"
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
        return path

    return to_file


@pytest.fixture
def only(write):
    def sample(**changed: str):
        (found,) = read(write(ROW | changed)).samples
        return found

    return sample


def test_a_row_is_its_run(only):
    found = only(kv_heads="4", gated="yes", intermediate="4096", recompute="full")
    run = found.run
    assert (found.seconds, found.peak_bytes) == (0.3, None)
    assert (run.tensor, run.data, run.pipe, run.micro_batch, run.num_micro_batches) == (
        2, 2, 2, 2, 8,
    )  # fmt: skip
    assert (run.stage_blocks, run.ranks, run.recompute) == ((9, 9), 8, "full")
    model = run.model
    assert (model.hidden, model.key_heads, model.feed_forward, model.gated) == (1536, 4, 4096, True)
    assert run.cluster == "a100-80"
    assert run.devices == (find_device("a100-80"),) * 2


def test_a_model_can_be_named(write):
    names = ("layers", "hidden", "heads", "vocabulary", "sequence")
    row = {name: cell for name, cell in ROW.items() if name not in names}
    (found,) = read(write({"model": "llama3-8b", **row, "step_s": "3.0"})).samples
    assert found.run.model == replace(MODELS["llama3-8b"], scores="flash 3")
    eager = {"model": "llama3-8b", **row, "step_s": "3.0", "attention": "eager"}
    assert read(write(eager)).samples[0].run.model.scores == "eager"
    with pytest.raises(EstimateError, match="no model is called 'llama9'"):
        read(write({**eager, "model": "llama9"}))


def test_what_no_column_says_is_said(write, only):
    taken = read(write(ROW)).taken
    assert "framework: megatron-core" in taken
    assert "recompute: none" in taken
    assert not any(word.startswith(("layers", "data", "model")) for word in taken)
    run = only().run
    assert (run.overlap, run.sharding) == (Hiding(gradients=True, pipe=True), "optimizer")
    assert (run.sequence_parallel, run.product_speed, run.model.is_flash) == (True, 1.0, True)


def test_each_framework_has_its_defaults_and_a_row_can_say_otherwise(only):
    for name, framework in FRAMEWORKS.items():
        run = only(framework=name).run
        assert (run.overlap, run.sharding) == (framework.overlap, framework.sharding)
        assert (run.stops_early, run.gradient_bytes) == (
            framework.stops_early,
            framework.gradient_bytes,
        )
    run = only(framework="fsdp", overlap="tensor+gradients", sharding="none").run
    assert run.overlap == Hiding(gathers=False, gradients=True, tensor=True)
    assert run.sharding == "none"
    assert only(overlap="none").run.overlap == Hiding(gathers=False)


def test_a_device_is_as_its_row_says(only):
    changed = {
        "memory_gb_per_s": "1000", "power_w": "300", "gpus_per_host": "4",
        "inside_gb_per_s": "100", "across_gb_per_s": "5",
    }  # fmt: skip
    device = only(**changed).run.devices[0]
    known = find_device("a100-80")
    assert device == replace(
        known,
        bytes_per_s=1e12,
        power_w=300.0,
        ranks_per_host=4,
        inside_bytes_per_s=100e9,
        across_bytes_per_s=5e9,
    )
    unlike = only(device="a100-80/T4").run.devices
    assert [each.name for each in unlike] == ["a100-80", "t4"]


def test_each_stage_and_each_kind_in_it_can_have_rates_of_its_own(only):
    found = only(device="h100/a100-80+v100", across_gb_per_s="50/25+3", gpus_per_host="8/4")
    first, second = found.run.devices
    assert (first.across_bytes_per_s, first.ranks_per_host) == (50e9, 8)
    assert (second.across_bytes_per_s, second.ranks_per_host) == (3e9, 4)
    assert found.run.cluster == "h100/a100-80+v100"


def test_a_stage_of_several_kinds_is_as_slow_as_its_slowest_and_its_slowest_link(only):
    found = only(device="t4+v100").run.devices[0]
    slow, fast = find_device("t4"), find_device("v100")
    assert found.peak_flop_per_s == slow.peak_flop_per_s
    assert (found.bytes_per_s, found.power_w) == (slow.bytes_per_s, slow.power_w)
    assert found.inside_bytes_per_s == slow.inside_bytes_per_s < fast.inside_bytes_per_s
    assert found.shared
    assert found.memory_bytes == min(slow.memory_bytes, fast.memory_bytes)


def test_tokens_per_second_are_of_all_devices(only):
    assert only(step_s="", tokens_per_s="100000").seconds == pytest.approx(32 * 1024 / 1e5)


def test_a_run_that_was_not_made_is_kept_and_one_that_failed_is_not(write):
    rows = [ROW | {"step_s": cell} for cell in ("0.3", "", "OOM", "nan")]
    table = read(write(*rows))
    assert [math.isnan(sample.seconds) for sample in table.samples] == [False, True]
    assert table.skipped == 2


def test_replicas_are_what_the_other_ways_leave(only):
    assert only(data="").run.data == 2
    assert only(gpus="", data="4").run.ranks == 16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tensor": "16"}, "tensor 16 x data 2 x context 1 x pipeline 2 on 8 GPUs"),
        ({"gpus": "999"}, "on 999 GPUs"),
        ({"tensor": "16", "data": "", "pipeline": "1"}, "tensor 16 x data 1 .* on 8 GPUs"),
        ({"stages": "6/6/6"}, "stages are 6/6/6 and pipeline is 2"),
        ({"stages": "9/8"}, "stages of .9, 8. blocks for a model of 18"),
        ({"batch": "1"}, "a batch of 1 samples for 2 replicas"),
        ({"batch": "33"}, "a batch of 33 on 2 replicas in micro-batches of 2"),
        ({"sequence": "1e11"}, "sequence is 1e11"),
        ({"sequence": "99999999"}, "sequence is 99999999"),
        ({"hidden": "1537"}, "hidden size 1537 is not divisible by 16 heads"),
        ({"kv_heads": "5"}, "16 heads share 5 heads"),
        ({"tensor": "3", "gpus": "12"}, "heads are 16 and tensor 3"),
        ({"context": "3", "gpus": "24"}, "sequence is 1024 and context 3"),
        ({"device": "a100-80/t4/t4"}, "3 devices for 2 stages"),
        ({"intermediate": "1537"}, "intermediate is 1537 and tensor 2"),
        ({"experts": "5", "expert": "2"}, "experts are 5 and expert 2"),
        ({"heads": "12", "kv_heads": "3"}, "kv_heads are 3 and tensor 2"),
        ({"precision": "fp8"}, "precision is fp8, and a100-80 has no such products"),
        ({"peak_bytes": "1e12"}, "peak_bytes is 1e12, and a device has"),
        ({"peak_bytes": "51"}, "peak_bytes is 51, and its part of the weights"),
        ({"layers": "1_8"}, "layers is '1_8', not a positive number"),
        ({"layers": "\uff11\uff18"}, "layers is .*, not a positive number"),
        ({"inside_gb_per_s": "1e9"}, "inside_gb_per_s is 1e9"),
        ({"inside_gb_per_s": "300/25/25"}, "inside_gb_per_s is 300/25/25 and device a100-80"),
        ({"device": "a100-80+t4", "power_w": "1+2+3"}, "power_w is 1.2.3 and device a100-80.t4"),
        ({"gpus_per_host": "4/2.5"}, "gpus_per_host is '4/2.5', not a whole number"),
        ({"device": "abacus"}, "no device is called 'abacus'"),
        ({"model": "llama3-8b"}, "model is llama3-8b, and hidden is given, too"),
        ({"expert": "2"}, "expert is 2, and the model has no experts"),
        ({"expert_intermediate": "64"}, "expert_intermediate is 64, and the model has no experts"),
        ({"interleave": "10"}, "10 chunks on each of 2 stages of 18 layers"),
        ({"pipeline": "1", "tensor": "4", "interleave": "2"}, "2 chunks on each of 1 stages"),
        ({"pipeline": "20", "gpus": "80"}, "20 stages for 18 blocks"),
        ({"experts": "4", "experts_per_token": "8"}, "8 experts a token of 4"),
        ({"experts": "6", "expert": "3"}, "3 ranks share the experts"),
        ({"precision": "fp4"}, "precision is 'fp4'"),
        ({"overlap": "everything"}, "overlap is 'everything'"),
        ({"offload": "optimizer"}, "offload is 'optimizer'"),
        ({"framework": "keras"}, "framework is 'keras'"),
        ({"step_s": "0.0000001"}, "at peak its FLOP take"),
        ({"step_s": "fast"}, "step_s is 'fast', not a possible number"),
        ({"tokens_per_s": "5"}, "step_s and tokens_per_s are both given"),
        ({"batch": ""}, "batch is empty"),
        ({"device": "a100\x00-80"}, "a cell is 'a100.x00-80'"),
        ({"power_w": "-3"}, "power_w is '-3', not a positive number"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_row(write, changed, message):
    with pytest.raises(EstimateError, match=message) as caught:
        read(write(ROW | changed))
    assert "row 2" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"hiden": "3"}, "columns of no known name: hiden"),
        ({name: cell for name, cell in ROW.items() if name != "batch"}, "no column batch"),
        ({name: cell for name, cell in ROW.items() if name != "hidden"}, "no column hidden"),
    ],
)
def test_columns_that_are_strange_or_lack_are_refused(write, row, message):
    with pytest.raises(EstimateError, match=message):
        read(write(row))


def test_a_column_twice_is_refused(write):
    path = write(ROW)
    path.write_text("\n".join(f"{line},{line.split(',')[0]}" for line in path.read_text().split()))
    with pytest.raises(EstimateError, match="two columns layers"):
        read(path)


def test_every_column_is_a_field_of_a_run_or_of_what_was_measured(only):
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)
    assert all(column.meaning for column in COLUMNS)
    assert isinstance(only().run, TrainingRun)


def test_devices_that_people_have_are_known_with_their_source():
    names = (
        "A100", "H100", "H200", "B200", "L4", "L40S", "A10G", "T4", "V100",
        "RTX 3090", "RTX 4090", "RTX 5090", "MI250X", "MI300X",
    )  # fmt: skip
    for name in names:
        device = find_device(name)
        assert device.source
        assert 1e9 < device.memory_bytes < 1e12
        assert 50 < device.power_w < 1500
    assert len({device.name for device in DEVICES}) == len(DEVICES)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(EstimateError, match="is not CSV"):
        read(path)
    with pytest.raises(EstimateError, match=r"cannot read .*missing"):
        read(tmp_path / "missing.csv")
    path.write_text("")
    with pytest.raises(EstimateError, match="is empty"):
        read(path)
