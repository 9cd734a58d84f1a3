"""Data that people keep in odd places, and read in odd ways."""

import array
import asyncio
import io
import itertools
import json
import mmap
import os
import struct
import tarfile
import tempfile
from multiprocessing import get_context

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


def net(inputs=8, outputs=4):
    return nn.Sequential(
        nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, outputs)
    )


def adam(w):
    return torch.optim.Adam(w, 1e-2)


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def rows(n=48):
    r = np.random.default_rng(5)
    x = r.standard_normal((n, 8)).astype("f4")
    return x, (x[:, :4].argmax(1)).astype("i8")


def asked_by_send() -> ps.Job:
    """A coroutine-like generator gets the index by send and gives the sample."""
    x, y = rows()

    def reader():
        index = yield None
        while True:
            index = yield torch.from_numpy(x[index]), int(y[index])

    def data(start):
        source = reader()
        next(source)
        for k in itertools.count(start):
            got = [source.send((4 * k + j) % 48) for j in range(4)]
            yield torch.stack([a for a, _ in got]), torch.tensor([b for _, b in got])

    return ps.Job(model=net, loss=ce, data=data, optimizer=adam, micro_batches=4)


def fetched_by_asyncio() -> ps.Job:
    """Each sample is awaited; an event loop gathers a batch."""
    x, y = rows()

    async def fetch(index):
        await asyncio.sleep(0)
        return torch.from_numpy(x[index].copy()), torch.tensor(y[index])

    async def batch(k):
        got = await asyncio.gather(*(fetch((4 * k + j) % 48) for j in range(4)))
        return torch.stack([a for a, _ in got]), torch.stack([b for _, b in got])

    def data(start):
        loop = asyncio.new_event_loop()
        try:
            for k in itertools.count(start):
                yield loop.run_until_complete(batch(k))
        finally:
            loop.close()

    return ps.Job(model=net, loss=ce, data=data, optimizer=adam, micro_batches=4)


def tar_of_samples() -> ps.Job:
    """A tar of npy and json members, gone through again and again as a stream."""
    x, y = rows()
    path = os.path.join(tempfile.mkdtemp(), "shard.tar")
    with tarfile.open(path, "w") as out:
        for i in range(len(x)):
            for name, body in (
                (f"{i:04}.npy", _npy(x[i])),
                (f"{i:04}.json", json.dumps({"y": int(y[i])}).encode()),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(body)
                out.addfile(info, io.BytesIO(body))

    def samples():
        while True:
            with tarfile.open(path, "r|") as tar:
                x = None
                for member in tar:
                    body = tar.extractfile(member).read()
                    if member.name.endswith("npy"):
                        x = np.load(io.BytesIO(body))
                    else:
                        yield x, json.loads(body)["y"]

    def data(start):
        stream = itertools.islice(samples(), 4 * start, None)
        while True:
            got = list(itertools.islice(stream, 4))
            yield torch.tensor(np.stack([a for a, _ in got])), torch.tensor([b for _, b in got])

    return ps.Job(model=net, loss=ce, data=data, optimizer=adam, micro_batches=4)


def _npy(a):
    out = io.BytesIO()
    np.save(out, a)
    return out.getvalue()


def mapped_file_read_on() -> ps.Job:
    """The same, but the map itself is read on from where it stands: the map's own position."""
    x, y = rows()
    path = os.path.join(tempfile.mkdtemp(), "records.bin")
    record = struct.Struct("<8fq")
    with open(path, "wb") as out:
        for a, b in zip(x, y, strict=True):
            out.write(record.pack(*a.tolist(), int(b)))

    def data(start):
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            mapped.seek(((4 * start) % 48) * record.size)
            while True:
                got = []
                for _ in range(4):
                    body = mapped.read(record.size)
                    if not body:
                        mapped.seek(0)
                        body = mapped.read(record.size)
                    got.append(record.unpack(body))
                yield torch.tensor([g[:8] for g in got]), torch.tensor([g[8] for g in got])

    return ps.Job(model=net, loss=ce, data=data, optimizer=adam, micro_batches=4)


def arrays_and_memoryviews() -> ps.Job:
    """array.array holds the numbers; torch.frombuffer looks at a slice of its memoryview."""
    x, y = rows()
    flat = array.array("f", x.reshape(-1).tolist())
    labels = array.array("q", y.tolist())

    def data(start):
        view, lab = memoryview(flat), memoryview(labels)
        for k in itertools.count(start):
            at = (4 * k) % 48
            yield (
                torch.frombuffer(view[at * 8 : at * 8 + 32], dtype=torch.float32).view(4, 8),
                torch.frombuffer(lab[at : at + 4], dtype=torch.int64),
            )

    return ps.Job(model=net, loss=ce, data=data, optimizer=adam, micro_batches=4)


def _produce(start, out):
    e = itertools.count(start)
    for k in e:
        g = np.random.default_rng(k)
        out.put((g.standard_normal((4, 8)).astype("f4"), g.integers(0, 4, 4)))


def another_process_makes_it() -> ps.Job:
    """A process of one's own fills a queue; data reads it, and ends it in finally."""

    def data(start):
        context = get_context("fork")
        out = context.Queue(3)
        process = context.Process(target=_produce, args=(start, out), daemon=True)
        process.start()
        try:
            while True:
                a, b = out.get()
                yield torch.from_numpy(a), torch.from_numpy(b)
        finally:
            process.terminate()
            process.join()

    return ps.Job(model=net, loss=ce, data=data, optimizer=adam, micro_batches=4)


def reservoir_of_the_past() -> ps.Job:
    """Continual learning: a reservoir sample of what has been seen is replayed beside the new."""
    import random

    class Stream:
        def __init__(self):
            self.random, self.kept, self.seen = random.Random(1), [], 0

        def batch(self, k):
            e = torch.Generator().manual_seed(k)
            x = torch.randn(2, 8, generator=e) + k // 16
            y = x[:, :4].argmax(1)
            old = (
                [self.random.choice(self.kept) for _ in range(2)]
                if self.kept
                else list(zip(x, y, strict=True))
            )
            for a, b in zip(x, y, strict=True):
                self.seen += 1
                if len(self.kept) < 6:
                    self.kept.append((a, b))
                elif (j := self.random.randrange(self.seen)) < 6:
                    self.kept[j] = (a, b)
            return torch.cat([x, torch.stack([a for a, _ in old])]), torch.cat(
                [y, torch.stack([b for _, b in old])]
            )

    def data(start):
        stream = Stream()
        for k in itertools.count():
            batch = stream.batch(k)
            if k >= start:
                yield batch

    return ps.Job(model=net, loss=ce, data=data, optimizer=adam, micro_batches=4)
