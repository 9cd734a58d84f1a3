"""The shortest step of one stage per rank, found by trying every order of every rank."""

import functools
import itertools
from collections.abc import Sequence

Times = Sequence[Sequence[float]]  # of F, I and W, per stage
Order = tuple[tuple[str, int], ...]


def shortest(num_stages: int, m: int, times: Times, *, limit: int, split: bool) -> float:
    """Return the least seconds of a step with at most `limit` activations on each rank."""
    every = itertools.product(_orders(m, limit, split), repeat=num_stages)
    return min(seconds_of(orders, times) for orders in every)


@functools.cache
def _orders(m: int, limit: int, split: bool) -> list[Order]:
    """Return every order of F and I and W (or B) that keeps the micro-batches in order."""
    kinds = "FIW" if split else "FB"
    found: list[Order] = []

    def extend(order: Order, counts: tuple[int, ...]) -> None:
        if len(order) == len(kinds) * m:
            found.append(order)
        for place, kind in enumerate(kinds):
            allowed = m if place == 0 else counts[place - 1]
            if place == 0:
                allowed = min(allowed, counts[-1] + limit)
            if counts[place] < allowed:
                more = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
                extend((*order, (kind, counts[place])), more)

    extend((), (0,) * len(kinds))
    return found


def seconds_of(orders: Sequence[Order], times: Times) -> float:
    """Return when the last action ends, infinity if one never starts; links are free."""
    forward_s: dict[tuple[int, int], float] = {}
    gradient_s: dict[tuple[int, int], float] = {}
    at, clock_s = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, m = order[at[stage]]
                ready_s: float | None = 0.0
                if kind == "F" and stage > 0:
                    ready_s = forward_s.get((stage - 1, m))
                elif kind in "IB":
                    last = stage + 1 == len(orders)
                    ready_s = forward_s[stage, m] if last else gradient_s.get((stage + 1, m))
                if ready_s is None:
                    break
                f, i, w = (row[stage] for row in times)
                took_s = {"F": f, "I": i, "W": w, "B": i + w}[kind]
                clock_s[stage] = max(clock_s[stage], ready_s) + took_s
                if kind == "F":
                    forward_s[stage, m] = clock_s[stage]
                elif kind in "IB":
                    gradient_s[stage, m] = clock_s[stage]
                at[stage] += 1
                moved = True
    done = all(place == len(order) for place, order in zip(at, orders, strict=True))
    return max(clock_s) if done else float("inf")
