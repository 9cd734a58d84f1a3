"""penstock fleet predict: a table beside what was measured, a job on a cluster, what is refused."""

import json

import pytest

from tests.cli.conftest import MLP

MODELS = [(1e9, 1e6, 50), (3e9, 2e6, 60), (2e9, 4e6, 90), (6e9, 5e6, 120), (9e9, 8e6, 70)]


@pytest.fixture
def steps(tmp_path):
    lines = ["model,device,flop,parameters,tensors,seconds"]
    for at, (flop, parameters, tensors) in enumerate(MODELS):
        for device, peak in (("k80", 4.1e12), ("p100", 9.5e12)):
            seconds = 3 * flop / peak + 1e-5 * tensors
            lines.append(f"m{at},{device},{flop},{parameters},{tensors},{seconds}")
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([*lines, "new,k80,4e9,3e6,80,"]))
    return path


@pytest.fixture
def others(tmp_path):
    saves, starts = tmp_path / "saves.csv", tmp_path / "starts.csv"
    rows = [f"m{n},{n * 10**6},{20 * n},{1 + 0.1 * n}" for n in range(1, 6)]
    saves.write_text("\n".join(["model,size_bytes,tensors,seconds", *rows]))
    rows = [f"m{n},cold,{20 * n},{70 + n}" for n in range(1, 6)]
    starts.write_text("\n".join(["model,kind,tensors,seconds", *rows]))
    return "--fit", saves, "--fit", starts


def test_each_row_is_foreseen_without_its_group(call, steps):
    done = call("fleet", "predict", steps, "--json")
    found = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert found.keys() == {"layout", "interval", "rows", "mape", "coverage"}
    assert (found["layout"], found["interval"], len(found["rows"])) == ("step", 80.0, 11)
    for row in found["rows"]:
        assert row["low"] <= row["predicted"] <= row["high"]
    assert found["rows"][-1]["measured"] is None
    assert found["rows"][-1]["predicted"] == pytest.approx(3 * 4e9 / 4.1e12 + 8e-4, rel=0.1)
    errors = [abs(r["predicted"] / r["measured"] - 1) for r in found["rows"] if r["measured"]]
    inside = [r["low"] <= r["measured"] <= r["high"] for r in found["rows"] if r["measured"]]
    assert found["coverage"] == pytest.approx(100 * sum(inside) / len(inside))
    assert found["mape"] == pytest.approx(100 * sum(errors) / len(errors))


def test_other_measurements_may_be_learned_from(call, steps, tmp_path):
    one = tmp_path / "one.csv"
    one.write_text("model,device,flop,parameters,tensors,seconds\nx,v100,5e9,3e6,80,\n")
    words = call("fleet", "predict", one, "--fit", steps).out
    assert "extrapolates in" in words
    assert "device, peak, bandwidth" in words
    assert "mean error" not in words


def test_job_is_foreseen_on_a_cluster_to_its_end(call, steps, others):
    asked = "fleet", "predict", MLP, "--fit", steps, *others, "--ranks", "k80=3,p100=1"
    more = "--cap", "server=40", "--observed", "39", "--steps", "400", "--every", "100"
    done = call(*asked, *more, "--losses", "1", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["work"]["flop"] > 0
    assert found["work"]["size_bytes"] == 4 * found["work"]["parameters"]
    assert found["steps"].keys() == {"k80", "p100"}
    assert found["starts"].keys() == {"cold"}
    cluster = found["cluster"]
    assert (cluster["steps_per_s"], cluster["held_by"]) == (40.0, "server")
    assert cluster["observed"]["as_predicted"] is False
    (save,) = found["checkpoints"].values()
    ends = 400 / 40 + 4 * save["seconds"] + found["starts"]["cold"]["seconds"] / 4
    assert cluster["seconds"] == pytest.approx(ends)
    words = call(*asked, *more).out
    assert "held by the server: add a server" in words
    assert "to the end:" in words


def test_job_without_measurements_says_what_a_row_of_it_would_be(call):
    done = call("fleet", "predict", MLP)
    assert done.code == 0
    assert "a micro-batch:" in done.out
    assert "--fit CSV" in done.err


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (["--steps", "5"], "--prices are about a cluster"),
        (["--ranks", "k80"], '--ranks is "k80"'),
        (["--ranks", "k80=2"], "nothing is known of steps"),
        (["--ranks", "k80=2", "--cap", "disk=3", "--fit"], '--cap is "disk=3"'),
        (["--ranks", "k80=2", "--scales", "1=a", "--fit"], '--scales is "1=a"'),
        (["--ranks", "k80=2", "--steps", "5", "--every", "2", "--fit"], "known of checkpoints"),
        (["--ranks", "k80=2", "--steps", "5", "--losses", "2", "--fit"], "known of starts"),
        (["--ranks", "abacus=2", "--fit"], "known of a device 'abacus'"),
    ],
)
def test_what_cannot_be_is_refused(call, steps, wrong, error):
    wrong = [*wrong, steps] if wrong[-1] == "--fit" else wrong
    assert error in call("fleet", "predict", MLP, *wrong).refusal(2)[0]


def test_flags_of_a_job_are_refused_with_a_table(call, steps):
    error, hint = call("fleet", "predict", steps, "--ranks", "k80=2").refusal(2)
    assert error == "--ranks given with a table"
    assert "penstock fleet predict JOB" in hint


def test_scaling_that_was_measured_lowers_the_sum(call, steps):
    asked = "fleet", "predict", MLP, "--fit", steps, "--ranks", "k80=4", "--json"
    alone = json.loads(call(*asked).out)["cluster"]["steps_per_s"]
    less = json.loads(call(*asked, "--scales", "1=10,2=16").out)["cluster"]["steps_per_s"]
    assert less == pytest.approx(alone / 1.75)
