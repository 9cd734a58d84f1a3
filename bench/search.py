"""Search: how long it takes to find the best configuration of all there are, beside others.

    python -m bench.search [--json] [--quick]

gpt3 1024      GPT-3 175B on 1,024 A100: every tensor, pipe and data degree, micro-batch,
               interleaving, recompute, sharding and sequence parallel; the best simulated
mixed          OPT-350M on 32 A100 and 96 V100 in two zones, 100 Gb/s between them
mixed slow     the same with 10 Gb/s
flat           98 layers on 64 alike devices, and 200 layers on 1,024

seconds        best of some runs, wall time; `cpu_s` the least CPU time.  What the first run
               compiles or reads from the disk is not counted
candidates     that were considered; 0: the search does not list them
peer_seconds   published or measured elsewhere for `peer` (docs/search.md); ratio is ours / peer's
aim, reached   seconds that the case should take at most, by wall time
"""

import argparse
import json
import time
from collections.abc import Callable

from bench.machine import machine
from penstock.estimate import MODELS, Constants, Transformer, load
from penstock.estimate.datasheet import find_device
from penstock.estimate.transformer import gpt
from penstock.search.transformer.configurations import configurations
from penstock.search.transformer.found import Configurations, Pool, Pools
from penstock.search.transformer.mixed import mixed_configurations
from penstock.search.transformer.partition import Chain, Kind, Partition, partition
from penstock.units import GiB

Row = dict[str, object]

GPT3 = gpt(12288, 96, 96, sequence=2048, vocabulary=51200)
BATCH = 1536
A100_FLOP_PER_S = 312e12 / 2  # of products, half the peak
POWERS = tuple(2**k for k in range(11))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works")
    options = parser.parse_args()
    rows = rows_of(quick=options.quick)
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}))
    else:
        show(rows)


def rows_of(*, quick: bool) -> list[Row]:
    """Return a row for every case."""
    runs = 1 if quick else 5
    scale = 16 if quick else 1
    rows = [_row("gpt3 1024", lambda: gpt3(1024 // scale), runs, peer=("Calculon", 92_126.0, 5.0))]
    for name, gbit_s in (("mixed", 100), ("mixed slow", 10)):

        def search(gbit_s: int = gbit_s) -> Configurations:
            return mixed(scale=scale, between_bytes_per_s=gbit_s * 1e9 / 8)

        rows.append(_row(name, search, runs, peer=("Sailor", 0.80, 1.0)))
    flat = _row("flat 98 x 64", lambda: on_one_link(98, 64), runs, peer=("PipeDream", 9.0, None))
    rows.append(flat)
    if not quick:
        rows.append(_row("flat 200 x 1024", lambda: on_one_link(200, 1024), runs))
    return rows


def _row(
    case: str,
    search: Callable[[], Configurations | Partition],
    runs: int,
    *,
    peer: tuple[str, float, float | None] = ("", 0.0, None),
) -> Row:
    """Return a row; `peer` is a name, its seconds, and what ours should be at most."""
    name, peer_s, aim_s = peer
    found = search()  # compiles
    walls, cpus = zip(*(_timed(search) for _ in range(runs)), strict=True)
    seconds = min(walls)
    row: Row = {
        "case": case,
        "seconds": seconds,
        "peer_seconds": peer_s or None,
        "ratio": seconds / peer_s if peer_s else None,
        "cpu_s": min(cpus),
        "peer": name,
        "aim_s": aim_s,
        "reached": seconds < aim_s if aim_s else None,
    }
    if isinstance(found, Configurations):
        row |= {"candidates": found.candidates, "rejected": dict(found.rejected)}
        return row | {"value_s": found.best.seconds, "found": str(found.best)}
    stages = f"{len(found.stages)} stages"
    return row | {"candidates": 0, "rejected": {}, "value_s": found.value_s, "found": stages}


def _timed(function: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


# -- cases


def fitted(memory: str) -> tuple[Constants, Constants]:
    """Return the constants of time fitted on large A100 runs, and of memory on another cluster."""
    time, sizes = load()
    return time.of("vtrain"), sizes.of(memory)


def gpt3(devices: int) -> Configurations:
    """Return the best configurations of GPT-3 175B, of fewer blocks on fewer than 1,024 devices."""
    pool = Pool(find_device("a100-80"), devices, 80 * GiB, usd_per_hour=2.0)
    model = GPT3 if devices == 1024 else gpt(4096, 24, 32, sequence=2048, vocabulary=51200)
    return configurations(model, pool, batch=BATCH, constants=fitted("simumax"))


def mixed(*, scale: int, between_bytes_per_s: float) -> Configurations:
    """Return the best configurations of OPT-350M on 32 A100 and 96 V100, or part of them."""
    pools = (
        Pool(find_device("a100-40"), 32 // scale, 40 * GiB, usd_per_hour=3.0),
        Pool(find_device("v100"), 96 // scale, 16 * GiB, usd_per_hour=1.0),
    )
    model = MODELS["opt-350"]
    batch = 2048 // scale
    constants = fitted("clariden")
    return mixed_configurations(
        model, Pools(pools, between_bytes_per_s), batch=batch, constants=constants
    )


def layers(count: int, model: Transformer = GPT3) -> tuple[Chain, tuple[float, ...]]:
    """Return embedding, blocks and head of a GPT, one sample at a time: bytes, and seconds."""
    h, s, v = model.hidden, model.sequence, model.vocabulary
    blocks = count - 2
    block_s = s * (72 * h * h + 12 * s * h) / A100_FLOP_PER_S
    seconds = (s * h * 1e-9, *(block_s,) * blocks, 6 * s * h * v / A100_FLOP_PER_S)
    weights = (2.0 * h * v, *(24.0 * h * h,) * blocks, 2.0 * h * v)
    return Chain(weights, (2.0 * s * h,) * count), seconds


def on_one_link(count: int, devices: int) -> Partition:
    """Return the best stages on alike devices, replicas in powers of two."""
    chain, seconds = layers(count)
    return partition(chain, (Kind(devices, seconds),), 25e9, replicas=POWERS)


def show(rows: list[Row]) -> None:
    """Print the rows, then what was found."""
    print("case             candidates  seconds    cpu s      peer s  ours / peer  aim")
    for row in rows:
        peer = f"{row['peer_seconds']:10,.2f} {row['ratio']:12.2g}" if row["peer"] else 23 * " "
        aim = (
            f"{row['aim_s']:g} {'reached' if row['reached'] else 'MISSED'}" if row["aim_s"] else "-"
        )
        print(
            f"{row['case']:16} {row['candidates']:10,} {row['seconds']:8.3f} {row['cpu_s']:8.3f}"
            f"  {peer}  {aim}"
        )
    for row in rows:
        print(f"\n{row['case']}: {row['value_s']:.4g} s, {row['found']}")
        for reason, count in dict(row["rejected"]).items():
            print(f"  {count:,} {reason}")


if __name__ == "__main__":
    main()
