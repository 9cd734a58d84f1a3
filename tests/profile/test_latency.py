"""Latency: a device's factors are learned from a few segments, and how sure they are is told."""

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.cluster import DeviceKind
from penstock.errors import ClusterError
from penstock.profile.estimate import estimated
from penstock.profile.kept_profiles import keep_samples, samples_of
from penstock.profile.latency import NUM_PARTS, TimedSegment, learned, parts_of
from penstock.profile.roofline import CLASSES, DEFAULT, op_seconds
from tests.search.chains import chain

FACTORS = np.array([2.5, 4.0, 1.5, 2.0, 3.0, 2.2, 5.0])  # of a device that nobody knows
DEVICE = DeviceKind("board", 10**9, (("int8", 1e9),), 1e9)


def drawn(count: int, seed: int = 0, noise: float = 0.05) -> list[TimedSegment]:
    """Return segments of random parts on that device."""
    source = np.random.default_rng(seed)
    parts = source.exponential(1.0, (count, NUM_PARTS))
    seconds = parts @ FACTORS * np.exp(source.normal(0.0, noise, count))
    return [TimedSegment(tuple(p.tolist()), float(s)) for p, s in zip(parts, seconds, strict=True)]


def off(known, tested) -> list[float]:
    return [abs(known.seconds(each.parts_s) / each.seconds - 1) for each in tested]


def test_more_samples_predict_better_and_say_so():
    tested = drawn(40, seed=9)
    known = [learned(drawn(count)) for count in (0, 1, 4, 64)]
    mape = [float(np.mean(off(each, tested))) for each in known]
    told = [float(np.mean([each.error(s.parts_s) for s in tested])) for each in known]
    assert mape[0] > 0.5 > 0.25 > mape[1] > mape[3]
    assert mape[3] < 0.07
    assert told[0] > 2 > 0.5 > max(told[1:]) >= min(told[1:]) == told[3]
    for each in known:
        inside = [
            o <= each.error(s.parts_s) * 1.3 for o, s in zip(off(each, tested), tested, strict=True)
        ]
        assert np.mean(inside) > 0.85
    assert known[3].factors == pytest.approx(FACTORS, rel=0.15)


def test_factors_are_the_closed_form_of_the_normal_prior():
    """Where no bound is met: (A'A / s^2 + P)^-1 (A'1 / s^2 + P 1), P the prior's inverse."""
    samples = drawn(5, noise=0.01)
    a = np.array([np.array(each.parts_s) / each.seconds for each in samples])
    prior = np.linalg.inv(1.5**2 * np.ones((7, 7)) + 0.5**2 * np.eye(7))
    precision = a.T @ a / 0.1**2 + prior
    expected = np.linalg.solve(precision, a.T @ np.ones(5) / 0.1**2 + prior @ np.ones(7))
    known = learned(samples)
    assert known.factors == pytest.approx(expected, rel=1e-6)
    parts = np.array(samples[0].parts_s)
    variance = parts @ np.linalg.inv(precision) @ parts / float(parts @ expected) ** 2
    assert known.error(samples[0].parts_s) == pytest.approx(2 * math.sqrt(variance + 0.01))


def test_one_segment_moves_the_classes_that_it_does_not_have():
    parts = [0.0] * NUM_PARTS
    parts[CLASSES.index("product")] = 1.0
    known = learned([TimedSegment(tuple(parts), 3.0)])
    assert known.factors[CLASSES.index("product")] == pytest.approx(
        1 + 2 * 2.5 / (2.5 + 0.01 * 9), rel=1e-6
    )
    assert 2.5 < known.factors[CLASSES.index("convolution")] < 3.0


def test_estimate_with_the_learned_shares_takes_what_the_factors_say():
    graph = chain([5, 6], [70, 80])
    known = learned([TimedSegment(parts_of(graph, range(len(graph.nodes)), DEVICE), 1e-3)])
    parts = parts_of(graph, range(len(graph.nodes)), DEVICE)
    assert sum(parts) == pytest.approx(sum(op_seconds(graph, DEVICE, DEFAULT)))
    profile = estimated(graph, DEVICE, 0.0, known.efficiency)
    assert sum(profile.op_s) == pytest.approx(known.seconds(parts))
    assert learned([]).efficiency == DEFAULT
    with pytest.raises(ClusterError, match="no FLOP/s for int8"):
        parts_of(graph, range(len(graph.nodes)), replace(DEVICE, flop_per_s=()))


def test_what_runs_tell_is_kept_by_device_and_its_peaks(tmp_path, caplog):
    first, second = drawn(2), drawn(300, seed=1)
    assert samples_of(tmp_path, DEVICE) == samples_of(None, DEVICE) == ()
    keep_samples(tmp_path, DEVICE, first)
    assert samples_of(tmp_path, DEVICE) == tuple(first)
    assert samples_of(tmp_path, replace(DEVICE, memory_bytes_per_s=2e9)) == ()
    keep_samples(tmp_path, DEVICE, second)
    assert samples_of(tmp_path, DEVICE) == tuple(second[-256:])
    (file,) = tmp_path.iterdir()
    file.write_text('{"penstock": "samples", "samples": [{"parts_s": [1]}]}')
    assert samples_of(tmp_path, DEVICE) == ()
    assert "cannot be used" in caplog.text
