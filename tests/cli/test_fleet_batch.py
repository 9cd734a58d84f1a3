"""penstock fleet batch: ranks and batches from the folders of short runs, and what is refused."""

import json

import pytest

from penstock.fleet.batch_size import Phase, phase_of
from tests.fleet.test_batch_size import took


@pytest.fixture
def runs(tmp_path):
    return [a_run(tmp_path, *row) for row in ((1, 8), (1, 32), (2, 32))]


def a_run(within, ranks, batch, copy_ranks=1, law=(0.1, 0.01, 0.05)):
    """Return the folder of a run with a summary that tells of such a phase."""
    folder = within / f"{ranks}-{batch}-{copy_ranks}"
    folder.mkdir()
    summary = {
        "step_s_measured": took(ranks // copy_ranks, batch, law),
        "peak_bytes_measured": [1] * ranks,
        "noise_scale_samples": 50.0,
        "noise_scale_steps": 4,
        "noise_scale_batch": batch,
        "copy_ranks": copy_ranks,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_summary_of_a_run_is_a_phase(runs):
    assert phase_of(runs[2]) == Phase(2, 32, took(2, 32, (0.1, 0.01, 0.05)), 50.0, 4)


def test_command_lists_ranks_and_batches_best_first(call, runs):
    asked = "fleet", "batch", *runs, "--ranks", "1,2,4", "--batches", "8,64", "--price", "3"
    found = json.loads(call(*asked, "--json").out)
    assert found["noise_scale_samples"] == 50.0
    times = [row["seconds"] for row in found["rows"]]
    assert times == sorted(times)
    assert len(times) == 6
    cheap = json.loads(call(*asked, "--objective", "cost", "--json").out)["rows"]
    assert cheap[0]["usd"] == min(row["usd"] for row in found["rows"])
    assert cheap[0]["ranks"] == 1
    assert "noise scale 50 samples" in call(*asked).out


def test_command_refuses_what_tells_nothing(call, runs, tmp_path):
    (tmp_path / "summary.json").write_text('{"step_s_measured": 1.0}')
    error, hint = call("fleet", "batch", tmp_path, runs[0]).refusal(2)
    assert "lacks noise_scale_batch" in error
    assert "20 steps" in hint
    assert '--ranks is "a"' in call("fleet", "batch", *runs, "--ranks", "a").refusal(2)[0]
    assert "cannot read summary" in call("fleet", "batch", tmp_path / "no").refusal(2)[0]


def test_command_says_from_how_many_ranks_on_pipelines_are_better(call, runs, tmp_path):
    law = (0.06, 0.0085, 0.05)
    pipelines = [a_run(tmp_path, *row, 2, law) for row in ((2, 8), (2, 32), (4, 32))]
    asked = "fleet", "batch", *runs, *pipelines, "--ranks", "1,2,4,8,16", "--batches", "8,64"
    found = json.loads(call(*asked, "--json").out)
    best = {
        k: min((r["seconds"], r["copy_ranks"]) for r in found["rows"] if r["ranks"] == k)
        for k in (1, 2, 4, 8, 16)
    }
    assert [best[k][1] for k in (1, 2, 16)] == [1, 1, 2]
    cross = found["crossover_ranks"]
    assert best[cross][1] == 2
    assert best[cross // 2][1] == 1
    assert f"from {cross} ranks on copies of several ranks are better" in call(*asked).out
    assert (
        "no number of ranks in 1"
        in call("fleet", "batch", *pipelines, "--ranks", "1").refusal(2)[0]
    )
