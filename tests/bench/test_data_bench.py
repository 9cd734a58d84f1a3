"""bench.data: the ways read the same objects, from a server that is a store."""

import fsspec
import torch

import penstock as ps
from bench import data as bench


def test_ways_give_the_samples_of_the_objects_and_the_server_gives_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "LATENCY_S", 0.0)
    fsspec.register_implementation("bench", bench.BenchStore, clobber=True)
    objects = tmp_path / "served" / "objects"
    objects.mkdir(parents=True)
    bench.written(objects, 40)
    expected = {bytes(path.read_bytes()[:32768]) for path in objects.iterdir()}
    with bench.served(tmp_path) as port:
        url = f"bench://127.0.0.1:{port}/served/objects"
        dataset = ps.stored(url, decode=bench.sample)
        (batch,) = [next(bench.one_by_one(dataset))]
        assert {bytes(row.tolist()) for row in batch} <= expected
        ahead = next(ps.batches(dataset, 40)(0))
        assert {bytes(row.tolist()) for row in ahead} == expected
        part = dataset.parts(3)[0]._replace(start=10, size_bytes=20)
        whole = (objects / dataset.objects[3].path.rpartition("/")[2]).read_bytes()
        assert dataset.store.read(part) == whole[10:30]
        one = bench.Objects(url, [dataset.objects[5].path])[0]
        assert torch.equal(one, dataset[5])
