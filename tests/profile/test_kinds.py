"""Profiles of several kinds of device: which is of which, and their file; estimates of a job."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import ClusterError, GraphError, ProfileError
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.profile import Profile
from penstock.profile.kinds import (
    as_tuple,
    load_profiles,
    place_of,
    places_of,
    save_profiles,
)
from penstock.profile.measure import optimizer_state
from tests.graph.zoo import floats, job_of
from tests.profile.test_profile import PROFILE

A, B = replace(PROFILE, kind="a"), replace(PROFILE, kind="b", op_s=(0.0, 1.0, 2.0))
FAST = DeviceKind("fast", 1 << 30, (("float32", 1e12),), 1e11)
SLOW = DeviceKind("slow", 1 << 30, (("float32", 1e10),), 1e9)
UNUSED = DeviceKind("unused", 1 << 30, (), 1e9)


def cluster(*hosts: Host) -> Cluster:
    return Cluster((UNUSED, SLOW, FAST), hosts, *(Link(0.0, 1.0),) * 3)


def test_profile_is_found_by_its_kind_and_one_of_no_kind_is_of_any() -> None:
    assert (place_of((A, B), "b"), place_of((A, B), "a"), place_of((PROFILE,), "b")) == (1, 0, 0)
    with pytest.raises(
        ProfileError, match='no profile is of device "c"; there are profiles of a, b'
    ):
        place_of((A, B), "c")


def test_ranks_get_the_profiles_of_their_devices() -> None:
    there = cluster(Host("x", "slow", 2), Host("y", "fast", 1))
    row = (replace(A, kind="fast"), replace(B, kind="slow"))
    assert places_of(row, there, 3) == (1, 1, 0)
    assert places_of(row[1:], there, 2) == (0, 0)


@pytest.mark.parametrize("row", [(), (A, A), (PROFILE, A)])
def test_profiles_that_leave_it_open_which_is_meant_are_refused(row: tuple[Profile, ...]) -> None:
    with pytest.raises(ProfileError):
        as_tuple(row)


@pytest.mark.parametrize("row", [(PROFILE,), (A,), (A, B)])
def test_profiles_that_are_saved_are_read_back(row: tuple[Profile, ...], tmp_path: Path) -> None:
    save_profiles(row, tmp_path / "profile.json")
    assert load_profiles(tmp_path / "profile.json") == row
    if len(row) == 1:
        assert Profile.load(tmp_path / "profile.json") == row[0]


@pytest.mark.parametrize("damage", [{"profiles": 3}, {"profiles": [3]}, {"profiles": []}])
def test_damaged_file_of_profiles_is_refused(damage: dict, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profiles((A, B), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(ProfileError):
        load_profiles(path)


# -- estimates ------------------------------------------------------------------------------------


def job(optimizer=lambda weights: torch.optim.AdamW(weights)) -> Job:
    made = job_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), floats(4, 8))
    return replace(made, optimizer=optimizer)


def test_estimate_has_a_profile_of_each_kind_that_a_host_has() -> None:
    graph = ps.trace(job())
    there = cluster(Host("x", "fast", 1), Host("y", "slow", 1), Host("z", "fast", 1))
    fast, slow = ps.estimate(graph, there)
    assert [(p.kind, p.basis.how, p.graph) for p in (fast, slow)] == [
        ("fast", "estimated", graph.digest),
        ("slow", "estimated", graph.digest),
    ]
    assert fast.micro_batch_s < slow.micro_batch_s
    assert fast.update.state_bytes_per_byte == 2.0
    plan = ps.search(graph, (fast, slow), there)
    assert plan.predicted is not None


def test_estimate_of_a_graph_without_its_job_wants_the_job(tmp_path: Path) -> None:
    traced = ps.trace(job())
    traced.save(tmp_path / "graph.json")
    graph = ps.Graph.load(tmp_path / "graph.json")
    there = cluster(Host("x", "fast", 1))
    with pytest.raises(GraphError, match="does not know its job"):
        ps.estimate(graph, there)
    assert ps.estimate(graph, there, job()) == ps.estimate(traced, there)


def test_estimate_for_a_device_without_a_rate_names_device_and_dtype() -> None:
    there = cluster(Host("x", "unused", 1))
    with pytest.raises(ClusterError, match='device "unused" has no FLOP/s for float32'):
        ps.estimate(ps.trace(job()), there)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (lambda weights: torch.optim.SGD(weights, lr=0.1), 0.0),
        (lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), 1.0),
        (lambda weights: torch.optim.AdamW(weights), 2.0),
        (lambda weights: torch.optim.Adam(weights, amsgrad=True), 3.0),
    ],
)
def test_state_of_the_optimizer_is_what_it_keeps_per_byte(optimizer, state: float) -> None:
    made = job(optimizer)
    assert optimizer_state(capture(made), made) == state


def test_measured_profile_is_of_the_kind_that_this_machine_is_called() -> None:
    profile = ps.measure(ps.trace(job()))
    assert (profile.basis.how, profile.kind) == ("measured", Cluster.here(1).devices[0].name)
