"""Planners: what published planners would run, simulated exactly, beside the best of that kind.

    python -m bench.planners [--json] [--samples 50]

Each planner is a few settings of one search (published.py); what it plans is run
as one synchronous step, whose seconds and bytes are simulated exactly.

uniform   equal blocks, an embedding and a head; alike devices, four to a host
uneven    layers of random sizes; alike devices, two hosts of unequal size
mixed     layers of random sizes; fast and slow devices, in hosts of their own
regions   alike devices in two regions with a slow link, in an order that does not show them
memory    as mixed, with little memory

ratio     seconds of the planner's step / the reference's, where its plan fits: least, median, worst
ratio_1f1b_least  the least against the reference where 1F1B is the only schedule
out_of_memory     part of the samples in which its plan does not fit, or it finds none; samples for
                  which the reference finds none are left out
seconds           CPU of one search, the median
"reference" is the search of assign.py, "reference, 1F1B" the same with no other schedule.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from bench.machine import machine
from bench.planners.assign import assign
from bench.planners.problem import Problem
from bench.planners.published import PLANNERS, plan_as
from bench.planners.simulated import Outcome
from penstock.errors import PlanError
from penstock.search.transformer.partition import Chain, Kind

Row = dict[str, object]
Draw = np.random.Generator

SEED = 0
PARAMETERS, BLOCK_S = 200e6, 0.025  # of a block of width 4,096 and 2,048 tokens on one device
SENT, KEPT = 2 * 2048 * 4096, 34 * 2048 * 4096
INSIDE, BETWEEN, ACROSS = 100e9, 10e9, 1e9  # bytes/s: in a host, between hosts, between regions


# -- cases


def uniform(draw: Draw) -> Problem:
    blocks = int(draw.integers(6, 23))
    sizes = np.array([0.3, *[1.0] * blocks, 0.6])
    hosts = _hosts([4] * int(draw.integers(1, 3)))
    return _problem(draw, _chain(sizes, sizes), [_kind(len(hosts), sizes)], hosts)


def uneven(draw: Draw) -> Problem:
    chain, seconds = _random_layers(draw)
    hosts = _hosts([int(draw.integers(1, 5)), int(draw.integers(1, 5))])
    return _problem(draw, chain, [_kind(len(hosts), seconds)], hosts)


def mixed(draw: Draw, room: float = np.inf) -> Problem:
    chain, seconds = _random_layers(draw)
    counts = [int(draw.integers(1, 5)), int(draw.integers(1, 5))]
    slower = draw.uniform(1.5, 4.0) * draw.uniform(0.9, 1.1, len(chain))
    speeds = (seconds, seconds * slower)
    kinds = [_kind(n, each, room) for n, each in zip(counts, speeds, strict=True)]
    return _problem(draw, chain, kinds, _hosts(counts))


def regions(draw: Draw) -> Problem:
    chain, seconds = _random_layers(draw)
    hosts = _hosts([int(draw.integers(1, 4)) for _ in range(int(draw.integers(2, 5)))])
    order = draw.permutation(max(hosts) + 1)
    region = [int(order[host]) % 2 for host in hosts]
    return _problem(draw, chain, [_kind(len(hosts), seconds)], hosts, region)


def memory(draw: Draw) -> Problem:
    problem = mixed(draw)
    chain = problem.chain
    rest = min(problem.num_devices, problem.num_micro_batches) * sum(chain.kept_bytes) / 2
    share = (sum(chain.state_bytes) + rest) / problem.num_devices
    kinds = [
        Kind(kind.count, kind.layer_s, draw.uniform(1.0, 2.0) * share) for kind in problem.kinds
    ]
    return Problem(
        chain, tuple(kinds), problem.bytes_per_s, problem.num_micro_batches, problem.hosts
    )


CASES: tuple[Callable[[Draw], Problem], ...] = (uniform, uneven, mixed, regions, memory)


def _random_layers(draw: Draw) -> tuple[Chain, np.ndarray]:
    layers = int(draw.integers(6, 21))
    sizes = draw.lognormal(0.0, 0.6, layers)
    seconds = sizes * draw.uniform(0.5, 1.5, layers)
    return _chain(sizes, draw.uniform(0.3, 2.0, layers)), seconds


def _chain(sizes: np.ndarray, activations: np.ndarray) -> Chain:
    def of(scale: float, by: np.ndarray) -> tuple[float, ...]:
        return tuple((scale * by).tolist())

    weights, states = of(2 * PARAMETERS, sizes), of(16 * PARAMETERS, sizes)
    return Chain(weights, of(SENT, activations), states, of(KEPT, activations))


def _kind(count: int, seconds: np.ndarray, room: float = np.inf) -> Kind:
    return Kind(count, tuple((BLOCK_S * seconds).tolist()), room)


def _hosts(sizes: list[int]) -> tuple[int, ...]:
    return tuple(host for host, size in enumerate(sizes) for _ in range(size))


def _problem(
    draw: Draw,
    chain: Chain,
    kinds: list[Kind],
    hosts: tuple[int, ...],
    region: list[int] | None = None,
) -> Problem:
    places = region or [0] * len(hosts)
    count = int(draw.choice([4, 8, 16, 32]))
    scale = draw.uniform(0.3, 3.0)

    def link(a: int, b: int) -> float:
        if places[a] != places[b]:
            return ACROSS * scale
        return INSIDE if hosts[a] == hosts[b] else BETWEEN * scale

    devices = range(len(hosts))
    links = tuple(tuple(link(a, b) for b in devices) for a in devices)
    return Problem(chain, tuple(kinds), links, count, hosts)


# -- rows


class Sample(NamedTuple):
    """One planner in one sample: its outcome, the reference's, that by 1F1B; seconds to find it."""

    outcome: Outcome | None
    reference: Outcome
    plain: Outcome | None
    seconds: float


def rows_of(samples: int) -> list[Row]:
    """Return a row for every case and planner; the same at every call, but for `seconds`."""
    rows: list[Row] = []
    for number, case in enumerate(CASES):
        found: dict[str, list[Sample]] = {}
        for sample in range(samples):
            problem = case(np.random.default_rng((SEED, number, sample)))
            for name, one in _sample(problem):
                found.setdefault(name, []).append(one)
        rows += [_row(name, case.__name__, own) for name, own in found.items()]
    return rows


def _sample(problem: Problem) -> Iterator[tuple[str, Sample]]:
    reference, own_s = _timed(lambda: assign(problem))
    if reference is None:
        return
    plain, plain_s = _timed(lambda: assign(problem, schedules=("one_f_one_b",)))
    yield "reference", Sample(reference, reference, plain, own_s)
    yield "reference, 1F1B", Sample(plain, reference, plain, plain_s)
    for planner in PLANNERS:
        outcome, seconds = _timed(lambda planner=planner: plan_as(planner, problem))
        yield planner.name, Sample(outcome, reference, plain, seconds)


def _timed(search: Callable[[], Outcome]) -> tuple[Outcome | None, float]:
    start = time.process_time()
    try:
        found = search()
    except PlanError:
        found = None
    return found, time.process_time() - start


def _row(planner: str, case: str, samples: list[Sample]) -> Row:
    fit = [(one.outcome.step_s, one) for one in samples if one.outcome and one.outcome.fits]
    ratios = [step_s / one.reference.step_s for step_s, one in fit]
    plain = [step_s / one.plain.step_s for step_s, one in fit if one.plain]
    return {
        "planner": planner,
        "case": case,
        "samples": len(samples),
        "ratio_least": min(ratios, default=None),
        "ratio_median": float(np.median(ratios)) if ratios else None,
        "ratio_worst": max(ratios, default=None),
        "ratio_1f1b_least": min(plain, default=None),
        "out_of_memory": 1 - len(fit) / len(samples),
        "seconds": float(np.median([one.seconds for one in samples])),
    }


def show(rows: list[Row]) -> None:
    """Print a line per planner and case."""
    print("case     planner      samples   least  median   worst  1F1B least   no fit    cpu s")
    for row in rows:
        ratios = [row[f"ratio_{what}"] for what in ("least", "median", "worst", "1f1b_least")]
        least, median, worst, plain = (f"{r:.3f}" if r else "-" for r in ratios)
        print(
            f"{row['case']:8} {row['planner']:12} {row['samples']:7} {least:>7} {median:>7}"
            f" {worst:>7} {plain:>11} {row['out_of_memory']:8.0%} {row['seconds']:8.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--samples", type=int, default=50, help="random samples of each case")
    options = parser.parse_args()
    rows = rows_of(options.samples)
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}))
    else:
        show(rows)
