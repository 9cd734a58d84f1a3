"""What a run's summary tells of the store that its data came from."""

import json
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch.utils.data import Subset

import penstock as ps
from penstock.stores.predicted import StoreSpeed
from penstock.stores.store_use import StoreUse
from penstock.timeline.breakdown import PARTS, Breakdown
from penstock.training.read_store import in_summary, of_summary, read_store, with_wait
from tests.stores.slow_store import SlowStore, filled

USE = StoreUse("s3://bucket", 0.03, 1e8, 4, 10**7, 32, 100_000, 0.08)


def job_of(**told) -> ps.Job:
    """Return a job whose data is 40 objects of a store."""
    url = filled({f"{number:02}": bytes(100 + number) for number in range(40)})
    dataset = Subset(ps.stored(url, decode=lambda content, _: torch.ones(4), requests=5), range(40))
    return ps.Job(
        model=lambda: torch.nn.Linear(4, 4),
        loss=lambda model, batch: model(batch).square().mean(),
        data=ps.batches(dataset, 6),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        **told,
    )


def parts_of(**seconds: float) -> list[float]:
    return [seconds.get(part, 0.0) for part in PARTS]


def breakdown(*ranks: list[float]) -> Breakdown:
    """Return a breakdown of two steps."""
    return Breakdown(2, tuple(map(sum, ranks)), tuple(map(tuple, ranks)))


MEASURED = breakdown(parts_of(data=3.0, F=1.0), parts_of(F=2.0, waiting=1.5))


def test_a_run_tells_how_it_read_its_store_and_waits_as_predicted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = job_of(num_steps=4, weight=lambda batch: batch.sum())
    trained = ps.train(job, out=tmp_path / "run", stages=1, ranks=1, schedule="gpipe")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    use = of_summary(summary)
    assert use is not None
    assert (use.url.partition("/")[0], use.requests, use.parts) == ("slow:", 5, 6)
    assert summary["store"]["wait_s_predicted"] == use.wait_s
    assert trained.predicted is not None
    assert trained.predicted.of("data") == pytest.approx((use.wait_s,))


def test_readers_share_a_step_and_the_link():
    job = job_of(micro_batches=4)
    use = read_store(job, MEASURED, None)
    assert use is not None
    assert (use.parts, use.part_bytes) == (6 * 4 // 2, 120)
    assert use.compute_s == (4.0 - 3.0) / 2
    alone = read_store(job, breakdown(parts_of(data=3.0, F=1.0)), None)
    assert alone is not None
    assert alone.parts == 2 * use.parts


def test_replicas_divide_the_bandwidth(monkeypatch):
    module = import_module("penstock.stores.measured_speed")
    monkeypatch.setattr(module, "measured_speed", lambda dataset: StoreSpeed(0.03, 1e8))
    use = read_store(job_of(), MEASURED, None)
    assert use is not None
    assert (use.latency_s, use.bytes_per_s) == (0.03, 5e7)


def test_of_other_data_or_a_store_that_is_gone_nothing_is_told():
    job = job_of()
    assert read_store(job, None, None) is None
    assert read_store(replace(job, data=ps.batches([torch.ones(4)] * 9, 2)), MEASURED, None) is None

    def refuses(_: str) -> None:
        raise PermissionError("no key")

    SlowStore.before = refuses
    dataset = job.data.dataset.dataset
    quick = replace(dataset, store=replace(dataset.store, again_s=()), _of_process={})
    assert read_store(replace(job, data=ps.batches(quick, 2)), MEASURED, None) is None


def test_a_summary_gives_back_what_was_told():
    written = json.loads(json.dumps(in_summary(USE)))
    assert of_summary(written) == USE
    assert in_summary(None) == {}
    for other in ({}, {"store": 3}, {"store": {"url": "s3://bucket"}}):
        assert of_summary(other) is None


def test_ranks_that_read_wait_in_the_prediction():
    expected = breakdown(parts_of(F=1.0), parts_of(F=1.0))
    found = with_wait(expected, MEASURED, USE)
    assert found is not None
    assert found.of("data") == pytest.approx((USE.wait_s, 0.0))
    assert found.of("F") == expected.of("F")
    assert with_wait(expected, MEASURED, None) == expected


def test_what_might_be_otherwise_is_each_no_slower():
    waits = {words: other.wait_s for words, other in USE.otherwise()}
    assert USE.wait_s == pytest.approx(32 * 0.031 / 4 - 0.08)
    assert waits["8 requests at a time"] == pytest.approx(32 * 0.031 / 8 - 0.08)
    assert max(waits.values()) <= USE.wait_s
