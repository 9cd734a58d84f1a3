"""Own runs: tables of what runs have measured, which `penstock fleet predict` reads."""

import json

import pytest

from penstock.cli import main
from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import EstimateError
from penstock.fleet.measurement import read_table
from penstock.fleet.own_runs import tables_of
from penstock.profile.profile import Profile
from tests.graph.tiny import GRAPH
from tests.search.chains import with_costs
from tests.simulate.test_what_if import PROFILE


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    GRAPH.save(folder / "graph.json")
    device = DeviceKind("d", 2**30, (("float32", 1e9),), 1e9)
    Cluster((device,), (Host("h", "d", 2),), Link(0.0, 1e9)).save(folder / "cluster.toml")
    with_costs(PROFILE, how="measured").save(folder / "profile.json")
    (folder / "summary.json").write_text(json.dumps({"checkpointing": {"blocked_s": 0.25}}))
    return folder


def test_tables_are_read_by_what_learns_from_them(run, tmp_path):
    assert main(["fleet", "measured", str(run), "--out", str(tmp_path)]) == 0
    steps, saves = (read_table(tmp_path / name) for name in ("steps.csv", "saves.csv"))
    assert (steps.layout, saves.layout) == ("step", "transfer")
    profile = Profile.load(run / "profile.json")
    seconds = sum(profile.op_s) + profile.update.update_s
    assert steps.rows[0].seconds == pytest.approx(seconds, rel=1e-5)
    assert saves.rows[0].seconds == 0.25
    assert steps.rows[0].group == "small"


def test_runs_that_have_measured_nothing_are_refused(run):
    PROFILE.save(run / "profile.json")
    with pytest.raises(EstimateError, match="no run has measured"):
        tables_of([run])
