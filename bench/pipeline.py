"""Penstock beside torch.distributed.pipelining: the same model, cuts, micro-batches and ranks.

    python -m bench.pipeline [--json] [--quick] [--models gpt tiny]
                             [--schedules gpipe one_f_one_b interleaved zb_h1] [--micro-batches 8]

Two processes of one thread hold a rank of ours and a rank of the peer (gloo) each, and take
turns: a block of our steps, a block of the peer's, a block of bare computes, and back.  A step
is forward, backward and the sum of the gradients over the micro-batches, without an optimizer.
Before anything is timed the gradients of both are compared.

ours_s, peer_s    seconds of a step, median; from the first rank's start to the last one's end
ratio             ours_s / peer_s
bound_s           our own segments alone - one rank computes, the other one waits - in the order
                  of the rank, and the bubble that the schedule then has with free links
over_bound        ours_s / bound_s
*_peak_bytes      of the rank that holds most, weights and buffers at rest included; in a run of
                  its own under the memory profiler
*_us_per_action   (step - bound) / actions of a rank, in microseconds, step by step, where the
                  bound is of what the computes of that very step took inside it (bench/inside.py)
*_cpu_s           CPU seconds of a step, all threads of both ranks
kept              quiet blocks of all blocks, of the one that has fewer: docs/bench.md
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.compute import Segments, seconds_of
from bench.inside import Inside, Seconds, bound_s
from bench.machine import machine
from bench.measure import Figure, Side, Turns, chosen_of, figure, in_ranks, take_turns
from bench.models import SIZES, Size
from bench.ours import Ours, gradients_of, lowered, rank_of
from bench.peer import PEERS, Peer, Stepper, schedule_of
from penstock import _compat
from penstock.graph.trace import Capture, capture
from penstock.program.lower import lower
from penstock.program.program import Program
from penstock.schedule import Schedule
from penstock.schedule.schedule import Action
from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.units import format_bytes, format_seconds

RANKS = 2
MICRO_BATCHES = (8, 16, 32)
LARGEST_DIFFERENCE = 1e-6  # of gradients, relative to the largest element of each parameter
Row = dict[str, Any]


class Case(NamedTuple):
    """What is compared: one of our schedules and those of the peer that belong to it."""

    size: Size
    schedule: str
    num_micro_batches: int
    ours: Ours

    @property
    def peers(self) -> tuple[Peer, ...]:
        return PEERS[self.schedule]


def rows_of(case: Case, turns: Turns) -> list[Row]:
    """Return one row for each of the peer's schedules.

    Raises:   SystemExit: gradients differ, or a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        save = Path(folder)
        ours_bytes = max(in_ranks(partial(hold_ours, case, save)))
        peers_bytes = [max(in_ranks(partial(hold_peer, case, peer, save))) for peer in case.peers]
        differences = [difference(save, "ours", peer.name) for peer in case.peers]
    worst = max(differences)
    if worst > LARGEST_DIFFERENCE:
        raise SystemExit(f"error: gradients of {case[:3]} differ by {worst:.1e} of the largest")
    told = [Told.of(content) for content in in_ranks(partial(play, case, turns))]
    ours = {"ours_peak_bytes": ours_bytes, **ours_columns(case, told)}
    return [
        {
            "model": case.size.name,
            "schedule": case.schedule,
            "micro_batches": case.num_micro_batches,
            "peer": peer.name,
            **ours,
            **peer_columns(peer, told, ours["ours_s"]),
            "peer_peak_bytes": peer_bytes,
            "gradients_difference": how_far,
        }
        for peer, peer_bytes, how_far in zip(case.peers, peers_bytes, differences, strict=True)
    ]


# -- in a rank: memory and gradients ---------------------------------------------------------------


def join(rank: int, folder: Path, *, gloo: bool) -> SharedMemoryTransport:
    """Return this rank's end of our transport, and make the peer's process group."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    end = SharedMemoryTransport(rank, RANKS, dist.PrefixStore("ours", store))
    if gloo:
        theirs = dist.PrefixStore("peer", store)
        dist.init_process_group("gloo", store=theirs, rank=rank, world_size=RANKS)
    end.barrier()
    return end


def hold_ours(case: Case, save: Path, rank: int, folder: Path) -> int:
    """Return the peak of our rank in bytes; its gradients go to a file."""
    end, before = join(rank, folder, gloo=False), storages()
    own, window = rank_of(case.ours, end)
    peak_bytes = peak_of(window, before)
    torch.save(gradients_of(own), save / f"ours.{rank}")
    end.barrier()
    return peak_bytes


def hold_peer(case: Case, peer: Peer, save: Path, rank: int, folder: Path) -> int:
    """Return the peak of the peer's rank in bytes; its gradients go to a file."""
    end, before = join(rank, folder, gloo=True), storages()
    stepper = Stepper(peer, case.size, case.num_micro_batches, rank)
    peak_bytes = peak_of(stepper.step, before)
    torch.save(stepper.gradients(), save / f"{peer.name}.{rank}")
    end.barrier()
    return peak_bytes


def peak_of(step: Side, before: dict[int, int]) -> int:
    """Return the most bytes held during a step, beyond the storages that were there before."""
    for _ in range(2):
        step()
    gc.collect()
    at_rest = sum(size for place, size in storages().items() if place not in before)
    with _compat.memory_profile() as memory:
        step()
    held = itertools.accumulate((event.size_bytes for event in memory()), initial=at_rest)
    return max(held)


def storages() -> dict[int, int]:
    """Return the bytes of every storage of a tensor that Python knows, by address."""
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter)]
    parts = (tensor.untyped_storage() for tensor in tensors)
    return {part.data_ptr(): part.nbytes() for part in parts}


def difference(save: Path, one: str, other: str) -> float:
    """Return the difference of gradients, relative to the largest element of each parameter."""
    found: list[dict[str, Tensor]] = []
    for name in (one, other):
        parts = [torch.load(save / f"{name}.{rank}") for rank in range(RANKS)]
        found.append({key: value for part in parts for key, value in part.items()})
    if found[0].keys() != found[1].keys():
        raise SystemExit(f"error: {one} and {other} have gradients of other parameters")
    pairs = ((a, found[1][name]) for name, a in found[0].items())
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


# -- in a rank: time ------------------------------------------------------------------------------


class Told(NamedTuple):
    """What one rank tells of the steps that count."""

    figures: dict[str, Figure]
    steps: dict[str, list[float]]  # seconds of every step of each side
    inside: dict[str, list[list[float]]]  # seconds of this rank's computes in each of them
    orders: dict[str, list[Action]]  # whose they are
    alone: Seconds  # of our computes
    schedules: dict[str, str]  # of the peer

    @classmethod
    def of(cls, content: Any) -> "Told":
        figures, steps, inside, orders, alone, schedules = content
        return cls(
            {name: Figure(*row) for name, row in figures.items()},
            steps,
            inside,
            {name: [Action.parse(text) for text in order] for name, order in orders.items()},
            {Action.parse(text): seconds for text, seconds in alone.items()},
            schedules,
        )


def play(case: Case, turns: Turns, rank: int, folder: Path) -> Any:
    """Let ours, the peer and the bare computes take turns; return what `Told.of` reads."""
    end = join(rank, folder, gloo=True)
    steppers = {p.name: Stepper(p, case.size, case.num_micro_batches, rank) for p in case.peers}
    inside = {"ours": Inside()} | {name: stepper.inside for name, stepper in steppers.items()}
    _, window = rank_of(case.ours, end, inside=inside["ours"])
    schedules = {
        peer.name: schedule_of(peer, steppers[peer.name].schedule, case.num_micro_batches)
        for peer in case.peers
    }
    orders = {"ours": case.ours.orders()[rank]}
    orders |= {name: list(schedule.orders[rank]) for name, schedule in schedules.items()}
    steps: dict[str, Side] = {"ours": window}
    steps |= {name: stepper.step for name, stepper in steppers.items()}
    sides = {name: noted(step, inside[name], orders[name]) for name, step in steps.items()}
    segments = Segments(case.ours, rank)
    alone = [f"alone {turn}" for turn in range(RANKS)]
    sides |= {name: segments.step if name == alone[rank] else list for name in alone}
    blocks = take_turns(sides, end, turns, seldom=alone)
    chosen = {name: chosen_of(blocks[name], turns) for name in (*steps, alone[rank])}
    notes = {
        name: [note for block in kept for note in block.notes] for name, kept in chosen.items()
    }
    bare = seconds_of(segments.order, notes.pop(alone[rank]))
    end.barrier()
    dist.destroy_process_group()
    end.close()
    return [
        {name: list(figure(blocks[name], turns)) for name in steps},
        {name: [s for block in chosen[name] for s in block.step_s] for name in steps},
        notes,
        {name: list(map(str, order)) for name, order in orders.items()},
        {str(action): seconds for action, seconds in bare.items()},
        {name: str(schedule) for name, schedule in schedules.items()},
    ]


def noted(step: Side, inside: Inside, order: Sequence[Action]) -> Side:
    """Return a step that returns the seconds of its computes, in `order`."""

    def call() -> list[float]:
        step()
        return inside.take(order)

    return call


# -- columns --------------------------------------------------------------------------------------


def us_per_action(program: Program, told: Sequence[Told], name: str) -> float:
    """Return microseconds beyond computes and bubble for each action of a rank: a median."""
    actions = [action for one in told for action in one.orders[name]]
    rows = zip(*(one.inside[name] for one in told), strict=True)
    beyond = [
        step_s - bound_s(program, dict(zip(actions, itertools.chain(*row), strict=True)))
        for step_s, row in zip(told[0].steps[name], rows, strict=True)
    ]
    return 1e6 * statistics.median(beyond) / max(len(one.orders[name]) for one in told)


def inside_s(told: Sequence[Told], name: str) -> float:
    """Return the seconds of all computes of all ranks inside a step: a median."""
    rows = zip(*(one.inside[name] for one in told), strict=True)
    return statistics.median(sum(map(sum, row)) for row in rows)


def ours_columns(case: Case, told: Sequence[Told]) -> Row:
    own, program = told[0].figures["ours"], case.ours.program
    bound = bound_s(program, {a: s for one in told for a, s in one.alone.items()})
    return {
        "ours_s": own.step_s,
        "ours_spread_s": [own.low_s, own.high_s],
        "ours_cpu_s": own.cpu_s,
        "ours_kept": [own.kept, own.blocks],
        "bound_s": bound,
        "over_bound": own.step_s / bound,
        "ours_us_per_action": us_per_action(program, told, "ours"),
    }


def peer_columns(peer: Peer, told: Sequence[Told], ours_s: float) -> Row:
    own, name = told[0].figures[peer.name], peer.name
    program = lower(Schedule.parse(told[0].schedules[name]))
    return {
        "peer_s": own.step_s,
        "peer_spread_s": [own.low_s, own.high_s],
        "peer_cpu_s": own.cpu_s,
        "peer_kept": [own.kept, own.blocks],
        "ratio": ours_s / own.step_s,
        "peer_us_per_action": us_per_action(program, told, name),
        "compute_ratio": inside_s(told, "ours") / inside_s(told, name),
    }


def cases(
    sizes: Sequence[Size], schedules: Sequence[str], micro_batches: Sequence[int]
) -> list[Case]:
    """Return the cases to compare; each model is traced once."""
    captured: dict[str, Capture] = {size.name: capture(size.job()) for size in sizes}
    return [
        Case(size, schedule, count, lowered(captured[size.name], size, schedule, count))
        for size in sizes
        for schedule in schedules
        for count in micro_batches
    ]


COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("model", "<5", lambda r: r["model"]),
    ("schedule", "<12", lambda r: r["schedule"]),
    ("M", ">3", lambda r: str(r["micro_batches"])),
    ("peer", "<21", lambda r: r["peer"]),
    ("ours", ">9", lambda r: format_seconds(r["ours_s"])),
    ("peer", ">9", lambda r: format_seconds(r["peer_s"])),
    ("ratio", ">6", lambda r: f"{r['ratio']:.3f}"),
    ("bound", ">9", lambda r: format_seconds(r["bound_s"])),
    ("over", ">6", lambda r: f"{r['over_bound']:.3f}"),
    ("us/action", ">11", lambda r: _two(r["ours_us_per_action"], r["peer_us_per_action"])),
    ("CPU, ours", ">9", lambda r: format_seconds(r["ours_cpu_s"])),
    ("peer", ">9", lambda r: format_seconds(r["peer_cpu_s"])),
    ("peak, ours", ">10", lambda r: format_bytes(r["ours_peak_bytes"])),
    ("peer", ">10", lambda r: format_bytes(r["peer_peak_bytes"])),
    ("kept", ">11", lambda r: " ".join("/".join(map(str, r[f"{w}_kept"])) for w in WHO)),
)
WHO = ("ours", "peer")


def _two(ours: float, peer: float) -> str:
    return f"{ours:.0f} / {peer:.0f}"


def show_head() -> None:
    print("  ".join(f"{title:{width}}" for title, width, _ in COLUMNS), flush=True)


def show(row: Row) -> None:
    print("  ".join(f"{text(row):{width}}" for _, width, text in COLUMNS), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="M = 8 only, and few blocks")
    parser.add_argument("--models", nargs="+", choices=[s.name for s in SIZES], default=None)
    parser.add_argument("--schedules", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--micro-batches", nargs="+", type=int, default=None, metavar="M")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    sizes = [s for s in SIZES if options.models is None or s.name in options.models]
    counts = options.micro_batches or (MICRO_BATCHES[:1] if options.quick else MICRO_BATCHES)
    turns = Turns(wanted=3, limit=6, block_s=0.3) if options.quick else Turns()
    rows: list[Row] = []
    if not options.json:
        show_head()
    for case in cases(sizes, options.schedules, counts):
        rows += (added := rows_of(case, turns))
        for row in added:
            if options.json:
                print(f"{len(rows)} rows", file=sys.stderr)
            else:
                show(row)
    if options.json:
        print(json.dumps({"rows": rows, "machine": about}, indent=1))
    else:
        print(", ".join(f"{key} {value}" for key, value in about.items()))


if __name__ == "__main__":
    main()
