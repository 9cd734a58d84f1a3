"""Data from wherever people have it: files, archives, tables, databases, pipelines, arrays."""

import csv
import io
import itertools
import json
import os
import random
import sqlite3
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from small import WIDTH, deep, pair, sgd, squares
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import penstock as ps


def _job(data, loss=squares, model=deep, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _table() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((512, 12)).astype(np.float32)


def _file(name: str, content: bytes) -> Path:
    """Write a file where all of this user's files for scripts are, once."""
    path = Path(tempfile.gettempdir()) / f"scripts-of-{os.getuid()}-{name}"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        part.rename(path)
    return path


def _split(rows):
    rows = torch.as_tensor(rows)
    return rows[:, :WIDTH], rows[:, WIDTH:]


def arrays_of_numpy() -> ps.Job:
    """A dict of numpy arrays; the loss uses the tensors that it is given (nothing is wrong)."""

    def data(start):
        for index in itertools.count(start):
            source = np.random.default_rng(index)
            x = source.standard_normal((4, WIDTH), dtype=np.float32)
            yield {"x": x, "y": x[:, :4] * np.float32(0.5), "label": source.integers(0, 4, 4)}

    def loss(model, batch):
        out = model(batch["x"])
        return F.mse_loss(out, batch["y"]) + F.cross_entropy(out, batch["label"])

    return _job(data, loss)


def odd_offsets_of_numpy() -> ps.Job:
    """Slices of one array whose rows have an odd length, so each begins elsewhere in memory."""
    rows = np.random.default_rng(0).standard_normal((99, 13)).astype(np.float32)

    def data(start):
        for index in itertools.count(start):
            first = index * 3 % 90
            yield (
                torch.from_numpy(rows[first : first + 4, 1:9]),
                torch.from_numpy(rows[first : first + 4, 9:]),
            )

    return _job(data)


def bytes_of_a_frame() -> ps.Job:
    """torch.frombuffer over bytes, with an offset behind a header of six bytes."""

    def data(start):
        for index in itertools.count(start):
            body = np.random.default_rng(index).integers(0, 255, 4 * 12, dtype=np.uint8).tobytes()
            frame = bytearray(b"HEADER" + body)
            rows = torch.frombuffer(frame, dtype=torch.uint8, offset=6).view(4, 12) / 255
            yield rows[:, :8], rows[:, 8:]

    return _job(data)


def map_opened_at_the_top() -> ps.Job:
    """A read-only memory map made with the job; batches are copies of its rows."""
    path = _file("rows.bin", _table().tobytes())
    rows = np.memmap(path, np.float32, "r", shape=(512, 12))

    def data(start):
        for index in itertools.count(start):
            yield _split(np.array(rows[4 * index % 508 : 4 * index % 508 + 4]))

    return _job(data)


def _archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number, rows in enumerate(_table().reshape(128, 4, 12)):
            archive.writestr(f"{number}.bin", rows.tobytes())
    return buffer.getvalue()


def archive_opened_in_data() -> ps.Job:
    """A zip archive that each call of data opens for itself (nothing is wrong)."""
    path = _file("rows.zip", _archive())

    def data(start):
        with zipfile.ZipFile(path) as archive:
            for index in itertools.count(start):
                raw = bytearray(archive.read(f"{index % 128}.bin"))
                yield _split(torch.frombuffer(raw, dtype=torch.float32).view(4, 12))

    return _job(data)


def archive_opened_once() -> ps.Job:
    """A zip archive opened with the job: ranks inherit one file and its position."""
    archive = zipfile.ZipFile(_file("rows.zip", _archive()))

    def data(start):
        for index in itertools.count(start):
            raw = bytearray(archive.read(f"{index % 128}.bin"))
            yield _split(torch.frombuffer(raw, dtype=torch.float32).view(4, 12))

    return _job(data)


def file_read_at_offsets() -> ps.Job:
    """One descriptor for all, read by os.pread, which has no position (nothing is wrong)."""
    handle = os.open(_file("rows.bin", _table().tobytes()), os.O_RDONLY)

    def data(start):
        for index in itertools.count(start):
            raw = bytearray(os.pread(handle, 4 * 48, index % 128 * 4 * 48))
            yield _split(torch.frombuffer(raw, dtype=torch.float32).view(4, 12))

    return _job(data)


def _lines() -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(_table().round(4).tolist())
    return text.getvalue().encode()


def table_read_line_by_line() -> ps.Job:
    """csv.reader over a file that data opens, and goes through again (nothing is wrong)."""
    path = _file("rows.csv", _lines())

    def endless():
        while True:
            with path.open() as lines:
                for row in csv.reader(lines):
                    yield [float(value) for value in row]

    def data(start):
        rows = itertools.islice(endless(), 4 * start, None)
        while True:
            yield _split(torch.tensor(list(itertools.islice(rows, 4))))

    return _job(data)


def table_whose_reader_goes_on() -> ps.Job:
    """One csv.reader for the whole job: data takes its next rows, whatever start says."""
    rows = csv.reader(io.StringIO(_lines().decode()))

    def data(start):
        while True:
            taken = [[float(v) for v in row] for row in itertools.islice(rows, 4)]
            yield _split(torch.tensor(taken))

    return _job(data)


def database_opened_in_data() -> ps.Job:
    """Rows of a table in SQLite, by their numbers (nothing is wrong)."""
    path = Path(tempfile.gettempdir()) / f"scripts-of-{os.getuid()}-rows.db"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        with sqlite3.connect(part) as made:
            made.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, body BLOB)")
            bodies = [(n, row.tobytes()) for n, row in enumerate(_table())]
            made.executemany("INSERT INTO rows VALUES (?, ?)", bodies)
        part.rename(path)

    def data(start):
        rows = sqlite3.connect(path)
        for index in itertools.count(start):
            first = index * 4 % 512
            asked = "SELECT body FROM rows WHERE number >= ? ORDER BY number LIMIT 4"
            found = rows.execute(asked, (first,)).fetchall()
            raw = bytearray(b"".join(body for (body,) in found))
            yield _split(torch.frombuffer(raw, dtype=torch.float32).view(-1, 12))

    return _job(data)


def sizes_in_a_configuration() -> ps.Job:
    """Width and rate are read from a JSON file beside the data (nothing is wrong)."""
    path = _file("sizes.json", json.dumps({"depth": 3, "lr": 0.05}).encode())
    sizes = json.loads(path.read_text())

    def data(start):
        return (pair(index) for index in itertools.count(start))

    return _job(
        data,
        model=lambda: deep(sizes["depth"]),
        optimizer=lambda w: torch.optim.SGD(w, json.loads(path.read_text())["lr"]),
    )


def noise_by_an_environment_variable() -> ps.Job:
    """data asks os.environ for a level of noise that is not set (nothing is wrong)."""

    def data(start):
        for index in itertools.count(start):
            x, y = pair(index)
            yield x, y + float(os.environ.get("LEVEL_OF_NOISE", "0.1")) * x[:, 4:]

    return _job(data)


def pipeline_of_generators() -> ps.Job:
    """Three generators in a row: read, filter, batch; start skips what was filtered."""

    def read():
        for index in itertools.count():
            yield pair(index, rows=1)

    def data(start):
        kept = (row for row in read() if row[0][0, 0] > -0.5)
        batches = (list(itertools.islice(kept, 4)) for _ in itertools.count())
        for rows in itertools.islice(batches, start, None):
            yield tuple(torch.cat(part) for part in zip(*rows, strict=True))

    return _job(data)


def shuffle_buffer() -> ps.Job:
    """A buffer of 16 rows from which a seeded Random takes one each time; start skips."""

    def shuffled():
        source, buffer = random.Random(1), []
        for index in itertools.count():
            buffer.append(pair(index, rows=1))
            if len(buffer) == 16:
                yield buffer.pop(source.randrange(16))

    def data(start):
        rows = itertools.islice(shuffled(), 4 * start, None)
        while True:
            four = list(itertools.islice(rows, 4))
            yield tuple(torch.cat(part) for part in zip(*four, strict=True))

    return _job(data)


def threads_that_decode_in_order() -> ps.Job:
    """A pool of threads decodes eight batches ahead, in order (nothing is wrong)."""

    def data(start):
        with ThreadPoolExecutor(2) as pool:
            numbers = itertools.count(start)
            while True:
                yield from pool.map(pair, itertools.islice(numbers, 8))

    return _job(data)


def sampler_with_weights() -> ps.Job:
    """A WeightedRandomSampler whose generator is seeded by the epoch (nothing is wrong)."""
    rows = TensorDataset(*(torch.cat(part) for part in zip(*map(pair, range(16)), strict=True)))

    def endless():
        for epoch in itertools.count():
            source = torch.Generator().manual_seed(epoch)
            sampler = WeightedRandomSampler(torch.arange(1.0, 65), 64, generator=source)
            yield from DataLoader(rows, 4, sampler=sampler)

    return _job(lambda start: itertools.islice(endless(), start, None))


def sampler_whose_generator_goes_on() -> ps.Job:
    """The same with one generator for the whole job, which every pass moves on."""
    rows = TensorDataset(*(torch.cat(part) for part in zip(*map(pair, range(16)), strict=True)))
    source = torch.Generator().manual_seed(0)
    loader = DataLoader(
        rows, 4, sampler=WeightedRandomSampler(torch.arange(1.0, 65), 64, generator=source)
    )

    def data(start):
        while True:
            yield from loader

    return _job(data)


class _Stream(IterableDataset):
    def __iter__(self):
        return (pair(index) for index in range(24))


def stream_through_a_worker() -> ps.Job:
    """An IterableDataset behind a DataLoader with one worker, cycled up to the start."""
    loader = DataLoader(_Stream(), batch_size=None, num_workers=1)

    def data(start):
        endless = itertools.chain.from_iterable(itertools.repeat(loader))
        return itertools.islice(endless, start, None)

    return _job(data)


def loader_with_numpy_collation() -> ps.Job:
    """ps.from_loader of a loader that collates to numpy (nothing is wrong)."""
    rows = list(_table())

    def collate(samples):
        both = np.stack(samples)
        return both[:, :WIDTH], both[:, WIDTH:]

    return _job(ps.from_loader(DataLoader(rows, 4, collate_fn=collate)))
