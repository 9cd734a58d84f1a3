"""A link of this host is measured as a link that a simulation can use."""

import math

from penstock.cluster import Cluster
from penstock.runtime.links import measure_link


def test_measured_link_has_figures_of_this_world():
    link = measure_link()
    assert 0 < link.latency_s < 1
    assert 0 < link.overhead_s < 1
    assert 1e6 < link.bytes_per_s < 1e13
    assert 1e6 < link.copy_bytes_per_s <= math.inf


def test_measured_link_can_be_saved_and_loaded(tmp_path):
    from dataclasses import replace

    cluster = replace(Cluster.here(2), inside=measure_link())
    cluster.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml") == cluster
