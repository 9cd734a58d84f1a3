"""`penstock train` on rehearsal GPUs, with its proof; a few commands of some seconds each."""

import json
from pathlib import Path

import pytest

from tests.rehearsal.command import rehearse

JOBS = Path(__file__).parent / "jobs.py"


def test_job_trains_on_one_gpu_as_the_plain_loop_does(tmp_path: Path) -> None:
    """The file asks for CUDA when it is imported, its loss says `.cuda()`, and all that can be is
    in far memory, whose gradients are clipped.
    """
    asked = [
        "--steps",
        "3",
        "--set",
        "stages=1",
        "--set",
        "units=2",
        "--set",
        "offload=all",
        "--out",
        "run",
    ]
    seen = rehearse(["train", f"{JOBS}:job", *asked], tmp_path)
    assert seen.code == 0, seen.text
    assert "equal to the plain loop" in seen.text
    assert "val loss" in seen.text
    assert seen.races == []
    (last,) = seen.last_windows
    assert last["live"] <= 1.02 * last["held"] + 4096  # the module waits in the host's memory
    assert last["far"] > 0
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["far_bytes_measured"] == [last["far"]]
    assert 0.97 * last["far"] <= told["far_bytes_predicted"][0] <= last["far"]
    assert sum(map(sum, told["breakdown"]["seconds"])) > 0
    assert last["pinned"] <= last["far"] + 4096  # of a micro-batch, and of what is looked at
    assert last["syncs"] <= 1  # the norm and the loss are looked at, together
    assert last["pageable"] == 0


def test_command_starts_a_rank_on_each_gpu(tmp_path: Path) -> None:
    """The loss says `.cuda()`, and means the device of its rank; sums go on beside backwards."""
    asked = [
        "--set",
        "stages=1",
        "--set",
        "units=2",
        "--set",
        "trial=false",
        "--steps",
        "3",
        "--out",
        "run",
    ]
    seen = rehearse(["train", f"{JOBS}:job", *asked], tmp_path, gpus=2)
    assert seen.code == 0, seen.text
    assert "equal to the plain loop" in seen.text
    assert seen.races == []
    assert seen.devices == {0, 1}
    assert "link between accelerators, measured" in seen.text
    for last in seen.last_windows:
        assert last["live"] <= 1.02 * last["held"]
        assert last["syncs"] <= 1
        assert last["pageable"] == 0
        assert last["beside"] > 0


def test_sums_in_few_numbers_are_proved_and_accounted_for(tmp_path: Path) -> None:
    """What is held back lies on each device, and comes from a checkpoint of the host."""
    asked = [
        "--set",
        "stages=1",
        "--set",
        "sums=int8",
        "--set",
        "trial=false",
        "--steps",
        "2",
        "--out",
        "run",
    ]
    seen = rehearse(["train", f"{JOBS}:job", *asked], tmp_path, gpus=2)
    assert seen.code == 0, seen.text
    assert "equal to the plain loop" in seen.text
    assert seen.races == []
    for last in seen.last_windows:
        assert last["live"] <= 1.02 * last["held"]
        assert last["syncs"] <= 1
        assert last["pageable"] == 0


def test_stages_send_over_nccl_as_the_plain_loop_computes(tmp_path: Path) -> None:
    """In float16, whose gradients may overflow: that is asked with all else."""
    asked = ["--set", "stages=2", "--schedule", "zb_h1", "--steps", "2", "--out", "run"]
    seen = rehearse(["train", f"{JOBS}:in_halves", *asked], tmp_path, gpus=2)
    assert seen.code == 0, seen.text
    assert "equal to the plain loop" in seen.text
    assert seen.races == []
    assert seen.devices == {0, 1}
    for last in seen.last_windows:
        assert last["syncs"] <= 1
        assert last["pageable"] == 0


def test_model_without_a_trace_trains_as_a_replica_on_each_gpu(tmp_path: Path) -> None:
    arguments = ["train", f"{JOBS}:untraceable", "--steps", "2", "--out", "run"]
    seen = rehearse(arguments, tmp_path, gpus=2)
    assert seen.code == 0, seen.text
    assert "training 2 replicas without a plan" in seen.text
    assert "equal to the plain loop" in seen.text
    assert "copies equal" in seen.text
    assert seen.races == []


def test_plan_of_several_ranks_is_checked_on_one_gpu(tmp_path: Path) -> None:
    seen = rehearse(["check", f"{JOBS}:job", "--steps", "1"], tmp_path, gpus=2)
    assert seen.code == 0, seen.text
    assert seen.races == []


@pytest.mark.long
def test_kind_that_torch_does_not_know_trains_as_cuda_does(tmp_path: Path) -> None:
    """A row in device.py is all that it needs.  It pins as torch does, in powers of two; its
    modules cannot be set aside, as its tensors cannot become the host's.
    """
    asked = [
        "--set",
        "stages=2",
        "--set",
        "units=block",
        "--set",
        "offload=all",
        "--set",
        "trial=false",
        "--steps",
        "2",
    ]
    arguments = ["train", f"{JOBS}:job", *asked, "--out", "run"]
    seen = rehearse(arguments, tmp_path, gpus=2, kind="pretend")
    assert seen.code == 0, seen.text
    assert "equal to the plain loop" in seen.text
    assert "validating" in seen.text
    assert seen.races == []
    assert seen.devices == {0, 1}
    for last in seen.last_windows:
        assert last["far"] > 0
        assert last["syncs"] <= 1
        assert last["pageable"] == 0


def test_collects_run_on_a_stream_beside_computes(tmp_path: Path) -> None:
    asked = "--set", "tensor=2", "--set", "units=woven", "--set", "trial=false", "--steps", "2"
    seen = rehearse(
        ["train", f"{JOBS}:job", "--ranks", "2", *asked, "--out", "run"], tmp_path, gpus=2
    )
    assert seen.code == 0, seen.text
    assert "equal to the plain loop" in seen.text
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["schedule"].endswith(" woven")
    assert seen.races == []
    assert seen.devices == {0, 1}
    assert all(last["syncs"] <= 1 for last in seen.last_windows)


def test_kind_without_a_row_is_said_to_stay_idle(tmp_path: Path) -> None:
    seen = rehearse(["doctor"], tmp_path, kind="idle")
    assert "an accelerator of kind idle, on which Penstock does not compute" in seen.text
