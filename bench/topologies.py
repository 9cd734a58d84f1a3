"""Topologies: seconds of sums along the rounds of each, beside the clock's, here and over lines.

    python -m bench.topologies [--json] [--ranks 2 4] [--rounds 7] [--sizes 4096 262144 4194304]
    python -m bench.topologies FOLDER      what torchrun starts for each rank

Free: ranks of this host, through shared memory.  Else half of the ranks are in each of two places
with a real line between them (bench/network.py), all over gloo.  Ways and sizes take turns in one
process a rank; "own" is how the transport sums by itself.

seconds         of one of several sums in a row on the slowest rank, median of the rounds
predicted_s     by Cluster.sum_s, of the machines that the ranks seem to have
sent_bytes      of the rank that sends most, by penstock/routes.py; of "own" as in a ring
measured_bytes  that left the first place in a sum, headers and all; null: links are free
formula_bytes   that leave it by the routes; null: links are free, or it is the transport's own
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from bench.agree import sent_so_far
from bench.beside import DELAY_S, RATES, cluster_of, link_of
from bench.line import at_both_ends
from bench.machine import machine
from bench.measure import in_ranks
from bench.network import can_throttle, line
from penstock.cli import face
from penstock.routes import routes_of
from penstock.runtime.launch import join_torchrun, torchrun_store
from penstock.transport import Transport
from penstock.transport.routed_sums import sum_along
from penstock.transport.shared_memory import SharedMemoryTransport

OWN = "own"
WORDS = (*(OWN, "ring", "tree", "halving", "doubling", "direct", "server", "hierarchical:2"),)
SIZES = 2**12, 2**18, 2**22  # bytes
LONG_BYTES, MOST = 2**20, 10  # so many bytes are summed in a turn, in at most so many sums
Row = dict[str, float | int | str | None]
Told = dict[str, list[float]]  # by way and size: median seconds, and bytes that left the place


def by_turns(end: Transport, sizes: Sequence[int], rounds: int) -> Told:
    torch.set_num_threads(1)
    everyone = tuple(range(end.num_ranks))
    times: dict[str, list[float]] = {}
    sent: dict[str, float] = {}
    turns = [(word, size) for word in WORDS for size in sizes]
    for number in range(-1, rounds):  # the first one is not counted
        random.Random(number).shuffle(turns)
        for word, size in turns:
            own = torch.ones(size // 4)
            count = max(1, min(MOST, LONG_BYTES // size))
            end.barrier()
            began, before = time.perf_counter(), sent_so_far()
            for _ in range(count):
                sum_along(end, own, everyone, "" if word == OWN else word)
            took = json.dumps(time.perf_counter() - began).encode()
            slowest = max(map(json.loads, end.all_gather_bytes(took, everyone))) / count
            if number >= 0:
                times.setdefault(f"{word} {size}", []).append(slowest)
                sent[f"{word} {size}"] = (sent_so_far() - before) / count
    return {key: [statistics.median(row), sent[key]] for key, row in times.items()}


def hold(folder: Path) -> None:
    """Be one rank that torchrun has started."""
    ranks, sizes, rounds = json.loads((folder / "what.json").read_text())

    def work(end: Transport) -> Told:
        return by_turns(end, sizes, rounds)

    found = join_torchrun(work, torchrun_store(), groups=[tuple(range(ranks))])
    if os.environ["RANK"] == "0":
        (folder / "told.json").write_text(json.dumps(found))


def played(ranks: int, rate: float, sizes: Sequence[int], rounds: int) -> Told:
    """Start the ranks, and return what `by_turns` gave."""
    if rate == float("inf"):

        def here(rank: int, folder: Path) -> Told:
            store = PrefixStore("own", FileStore(str(folder / "store"), ranks))
            end = SharedMemoryTransport(rank, ranks, store)
            told = by_turns(end, sizes, rounds)
            end.barrier()
            end.close()
            return told

        return in_ranks(here, ranks)[0]
    with tempfile.TemporaryDirectory() as given, line(rate, DELAY_S) as places:
        folder = Path(given)
        (folder / "what.json").write_text(json.dumps([ranks, sizes, rounds]))
        at_both_ends(places, ["bench.topologies", given], ranks // 2)
        return json.loads((folder / "told.json").read_text())


def leaving(word: str, ranks: int, numbers: int) -> int:
    """Return the bytes that leave the first half of the ranks, in one piece."""
    routes, half = routes_of(word, ranks), ranks // 2
    hops = (hop for each in routes.rounds for hop in each.hops)
    cuts = [(hop.first, hop.end) for hop in hops if hop.source < half <= hop.target]
    return 4 * sum(routes.place(end, numbers) - routes.place(at, numbers) for at, end in cuts)


def rows(ranks: int, rate: float, sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    told, cluster = played(ranks, rate, sizes, rounds), cluster_of(ranks, rate)
    is_free = rate == float("inf")
    for size in sizes:
        for word in WORDS:
            seconds, sent = told[f"{word} {size}"]
            topology, routes = (
                "" if word == OWN else word,
                routes_of(word.replace(OWN, "ring"), ranks),
            )
            is_counted = not is_free and topology
            yield {
                **{"link": link_of(rate), "ranks": ranks, "bytes": size, "topology": word},
                "rounds": len(routes.rounds) if topology else None,
                "seconds": seconds,
                "predicted_s": cluster.sum_s(size, range(ranks), topology),
                "sent_bytes": 4 * max(routes.sent(at, size // 4) for at in range(ranks)),
                "measured_bytes": None if is_free else sent,
                "formula_bytes": leaving(topology, ranks, size // 4) if is_counted else None,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of a sum")
    given = parser.parse_args()
    can, why = can_throttle()
    if not can:
        print(f"only free links: {why}", file=sys.stderr)
    rates = RATES if can else RATES[:1]
    asked = [(ranks, rate) for ranks in given.ranks for rate in rates]
    found = [row for each in asked for row in rows(*each, given.sizes, given.rounds)]
    if given.json:
        print(json.dumps({"machine": machine(), "rows": found}))
        return
    shown = [[_shown(value) for value in row.values()] for row in found]
    print(face.table(list(found[0]), shown))


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    if len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        hold(Path(sys.argv[1]))
    else:
        main()
