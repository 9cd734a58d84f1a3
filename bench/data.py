"""Data: what a loop waits for samples, from a disk and from a store, by several ways of reading.

    python -m bench.data [--json] [--quick] [--rounds N] [--mosaic PYTHON]

640 objects of about 100 kB; a step takes 32 of them, shuffled, and computes 80 ms (it sleeps, as a
loop does while a device computes).  The store is a server of this machine (`bench/data_server.py`)
that answers after 30 ms and sends 100 MB/s in all.  Ways take turns.

source          disk: a folder; store: the server
way             one by one: `dataset[i]` in a loop; ahead: `ps.batches(ps.stored(url), 32)`;
                ahead, 4 at a time: with requests=4;
                ahead, cached: a cache that holds all, the first epoch; ahead, kept: the next one;
                loader of 8: torch's DataLoader with 8 workers over a dataset that reads an object
                for each sample; mosaic of 8, mosaic, kept: mosaicml-streaming over S3 in
                shards of 4 MiB, its cache empty and full (--mosaic: a Python that has it)
first_s         seconds until the first batch, with what has to be started
wait_ms         milliseconds that each later step waits: median of the rounds
predicted_ms    by `penstock.stores.waits_s`, from the latency and bandwidth that were measured,
                and what making the same micro-batches takes from bytes in memory
saved           1 - wait / that of one by one from the same source.  DELI's is 0.86 to 0.94
                (arXiv:2108.06322)
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import fsspec
import torch
from fsspec.spec import AbstractFileSystem
from torch.utils.data import DataLoader, Dataset

import penstock as ps
from bench.machine import machine
from penstock.cli import face
from penstock.stores import ONE_BY_ONE, Reach, Stored, StoreSpeed, measured_speed, waits_s

LATENCY_S, RATE, SAMPLES, SIZE, BATCH, COMPUTE_S = 0.03, 1e8, 640, 100_000, 32, 0.08
TRIES, FEW = 5, 4
PUBLISHED = (0.856, 0.935)
Row = dict[str, float | str | None]


class BenchStore(AbstractFileSystem):
    """Objects of the server of this bench: bench://HOST:PORT/PATH."""

    protocol = "bench"

    def __init__(self, host: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.link = http.client.HTTPConnection(host)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return urllib.parse.urlsplit(path).path.strip("/") if "://" in path else path.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"host": urllib.parse.urlsplit(path).netloc}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        sizes = json.loads(self.got("?list", {}))
        root = self._strip_protocol(path)
        return [
            {"name": name, "size": size, "type": "file"}
            for name, size in sizes.items()
            if name.startswith(root)
        ]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        about = {} if start is None else {"Range": f"bytes={start}-{(end or 0) - 1}"}
        return self.got(self._strip_protocol(path), about)

    def got(self, path: str, about: dict[str, str]) -> bytes:
        self.link.request("GET", f"/{path}", headers=about)
        answer = self.link.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise FileNotFoundError(path)
        return content


class Objects(Dataset[torch.Tensor]):
    """What a user writes: each sample is read when it is asked for."""

    def __init__(self, url: str, paths: list[str]) -> None:
        self.url, self.paths = url, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        files, _ = fsspec.url_to_fs(self.url)
        return sample(files.cat_file(self.paths[index]), "")


class Held(Dataset[torch.Tensor]):
    """Samples of bytes in memory."""

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = contents

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(self.contents[index], "")


def sample(content: bytes, name: str) -> torch.Tensor:
    """Return the sample of an object: what decoding leaves of it."""
    return torch.frombuffer(bytearray(content[:32768]), dtype=torch.uint8)


class Waited(NamedTuple):
    """Seconds until the first batch, and those that later steps waited, in the mean."""

    first_s: float
    step_s: float


def epoch(batches: Iterator[Any], steps: int) -> Waited:
    """Return what a loop of so many steps waits for its data."""
    waits: list[float] = []
    for _ in range(steps):
        begun = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - begun)
        time.sleep(COMPUTE_S)
    return Waited(waits[0], sum(waits[1:]) / (steps - 1))


# -- ways -----------------------------------------------------------------------------------------


def one_by_one(dataset: Stored) -> Iterator[Any]:
    order = torch.randperm(len(dataset)).tolist()
    for at in range(0, len(order), BATCH):
        yield torch.stack([dataset[index] for index in order[at : at + BATCH]])


def few(dataset: Stored) -> Stored:
    """Return a dataset of FEW requests at a time."""
    return ps.stored(dataset.store.url, decode=sample, requests=FEW)


def loader_of_8(url: str, dataset: Stored) -> Iterator[Any]:
    objects = Objects(url, [each.path for each in dataset.objects])
    yield from DataLoader(objects, BATCH, shuffle=True, num_workers=8)


def ways(source: str, url: str, folder: Path, steps: int) -> Iterator[tuple[str, Waited]]:
    """Yield what each way waits, once."""
    for way, begin in (
        ("one by one", one_by_one),
        ("ahead", lambda dataset: ps.batches(dataset, BATCH)(0)),
        ("ahead, 4 at a time", lambda dataset: ps.batches(few(dataset), BATCH)(0)),
        ("loader of 8", lambda dataset: loader_of_8(url, dataset)),
    ):
        yield way, epoch(begin(ps.stored(url, decode=sample)), steps)
    if source == "disk":
        return
    with tempfile.TemporaryDirectory(dir=folder) as kept:
        for way in ("ahead, cached", "ahead, kept"):
            dataset = ps.stored(url, decode=sample, cache=ps.DiskCache(kept, 10**9))
            yield way, epoch(ps.batches(dataset, BATCH)(0), steps)


MOSAIC = """
import os, sys, time, json
from streaming import StreamingDataset
from torch.utils.data import DataLoader
remote, local, *numbers = sys.argv[1:]
batch, steps, compute = int(numbers[0]), int(numbers[1]), float(numbers[2])
found = []
for _ in range(2):
    begun = time.perf_counter()
    dataset = StreamingDataset(remote=remote, local=local, shuffle=True, batch_size=batch)
    batches = iter(DataLoader(dataset, batch, num_workers=8, drop_last=True))
    waits = []
    for step in range(steps):
        next(batches)
        waits.append(time.perf_counter() - begun)
        time.sleep(compute)
        begun = time.perf_counter()
    found.append((waits[0], sum(waits[1:]) / (steps - 1)))
    del batches, dataset
print(json.dumps(found))
"""
MOSAIC_WRITE = """
import sys
from pathlib import Path
from streaming import MDSWriter
with MDSWriter(out=sys.argv[2], columns={"x": "bytes"}, size_limit=1 << 22) as out:
    for path in sorted(Path(sys.argv[1]).iterdir()):
        out.write({"x": path.read_bytes()})
"""


def mosaic(python: str, port: int, folder: Path, steps: int) -> Iterator[tuple[str, Waited]]:
    """Yield what mosaicml-streaming waits."""
    about = {"S3_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_EC2_METADATA_DISABLED": "true"}
    about |= {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    for _ in range(TRIES):  # its workers now and then read a shard before it is there
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            asked = ["s3://served/shards", kept, str(BATCH), str(steps), str(COMPUTE_S)]
            command = [python, "-c", MOSAIC, *asked]
            done = subprocess.run(
                command, env={**os.environ, **about}, capture_output=True, text=True, timeout=300
            )
        if not done.returncode:
            break
        face.say(f"mosaicml-streaming failed: {done.stderr.strip().splitlines()[-1]}")
    else:
        return
    cold, warm = json.loads(done.stdout.splitlines()[-1])
    yield "mosaic of 8", Waited(*cold)
    yield "mosaic of 8, kept", Waited(*warm)


# -- all of it -----------------------------------------------------------------------------------


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Serve a folder; give the port."""
    command = [sys.executable, "-m", "bench.data_server", str(folder)]
    command += ["--latency", str(LATENCY_S), "--rate", str(RATE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def predictions(source: str, dataset: Stored, folder: Path, steps: int) -> dict[str, float]:
    """Return what later steps would wait, in seconds, by the speed that is measured here."""
    parts = [[SIZE] * BATCH for _ in range(steps)]
    reach = Reach(*dataset.fetching[:2])
    speeds = {"": measured_speed(dataset)}
    if source == "store":
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            again = ps.stored(dataset.store.url, cache=ps.DiskCache(kept, 10**9))
            for index in range(len(again)):
                again.cache.put(f"{again.store.url} {again.parts(index)[0].key}", bytes(SIZE))
            speeds["kept"] = measured_speed(again)
    named: list[tuple[str, StoreSpeed, Reach]] = [
        ("one by one", speeds[""], ONE_BY_ONE),
        ("ahead", speeds[""], reach),
        ("ahead, 4 at a time", speeds[""], reach._replace(requests=FEW)),
        ("ahead, cached", speeds[""], reach),
        ("ahead, kept", speeds.get("kept", speeds[""]), reach),
    ]
    waits = {way: waits_s(parts, COMPUTE_S, speed, far) for way, speed, far in named}
    made_s = epoch(ps.batches(Held([bytes(SIZE)] * BATCH * steps), BATCH)(0), steps).step_s
    return {way: made_s + sum(each[1:]) / (steps - 1) for way, each in waits.items()}


def rows_of(
    found: dict[tuple[str, str], list[Waited]], told: dict[tuple[str, str], float]
) -> list[Row]:
    rows: list[Row] = []
    for (source, way), each in found.items():
        wait_s = median(one.step_s for one in each)
        slow_s = median(one.step_s for one in found[source, "one by one"])
        known_s = told.get((source, way))
        rows.append(
            {
                "source": source,
                "way": way,
                "first_s": median(one.first_s for one in each),
                "wait_ms": 1e3 * wait_s,
                "predicted_ms": None if known_s is None else 1e3 * known_s,
                "saved": 1 - wait_s / slow_s,
            }
        )
    return rows


def written(folder: Path, samples: int) -> None:
    """Write objects of about SIZE bytes, half of it to three halves."""
    drawn = torch.Generator().manual_seed(0)
    for number in range(samples):
        size = int(SIZE * (0.5 + torch.rand((), generator=drawn).item()))
        content = torch.randint(0, 256, (size,), generator=drawn, dtype=torch.uint8)
        (folder / f"{number:05}.bin").write_bytes(content.numpy().tobytes())


def measured(folder: Path, rounds: int, samples: int, python: str) -> list[Row]:
    """Return a row for each source and way."""
    objects = folder / "served" / "objects"
    objects.mkdir(parents=True)
    written(objects, samples)
    if python:
        command = [python, "-c", MOSAIC_WRITE, str(objects), str(folder / "served" / "shards")]
        subprocess.run(command, check=True, capture_output=True)
    found: dict[tuple[str, str], list[Waited]] = {}
    told: dict[tuple[str, str], float] = {}
    steps = samples // BATCH
    with served(folder) as port:
        urls = {"disk": str(objects), "store": f"bench://127.0.0.1:{port}/served/objects"}
        for source, url in urls.items():
            known = predictions(source, ps.stored(url), folder, steps)
            told |= {(source, way): known_s for way, known_s in known.items()}
        for _ in range(rounds):
            for source, url in urls.items():
                for way, waited in ways(source, url, folder, steps):
                    found.setdefault((source, way), []).append(waited)
            if python:
                for way, waited in mosaic(python, port, folder, steps):
                    found.setdefault(("store", way), []).append(waited)
    return rows_of(found, told)


def main() -> None:
    """Print one line per way, or all as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a quarter of the objects, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mosaic", default="", metavar="PYTHON")
    asked = parser.parse_args()
    fsspec.register_implementation("bench", BenchStore)
    rounds, samples = (1, SAMPLES // 4) if asked.quick else (asked.rounds, SAMPLES)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), rounds, samples, asked.mosaic)
    if not asked.mosaic:
        face.say("mosaicml-streaming: left out, --mosaic names a Python that has it")
    if asked.json:
        about = {"machine": machine(), "published_saved": PUBLISHED, "rows": rows}
        print(json.dumps(about, indent=2))
        return
    names = tuple(rows[0])
    print(face.table(names, [tuple(map(shown, row.values())) for row in rows]))


def shown(value: float | str | None) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value or "-")


if __name__ == "__main__":
    main()
