"""Published: figures of papers, and of their authors' public code, beside ours.

    python -m bench.schedules --published [--json]

schedule    the built-in schedule
case        model or sizes
what        the figure; lower is better
source      paper: as printed there; code: what the authors' public code gives for the same sizes
published   theirs
ours        what is computed here, to as many digits

bubble      1 - work / seconds per step of a long run without a barrier, which is the least that the
            longest rank's own span can be
step        these seconds
"""

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bench.machine import machine
from penstock.schedule import (
    Schedule,
    Seconds,
    found,
    one_f_one_b,
    peak_activations,
    steady_bubble_fraction,
    steady_s,
    v_half,
    v_min,
    zb_greedy,
    zb_h1,
    zb_h2,
    zb_v,
)
from penstock.schedule.exact_waves import drained_s


class Row(NamedTuple):
    schedule: str
    case: str
    what: str
    source: str
    published: float
    ours: float


class Model(NamedTuple):
    """A row of Zero Bubble's tables: milliseconds on so many stages."""

    stages: int
    seconds: Seconds


MODELS = {
    "1.5B": Model(8, Seconds(18.522, 18.086, 9.337, 0.601)),
    "6.2B": Model(8, Seconds(29.718, 29.444, 19.927, 0.527)),
    "14.6B": Model(16, Seconds(11.347, 11.248, 8.132, 0.377)),
    "28.3B": Model(32, Seconds(10.419, 10.207, 7.715, 0.408)),
}
PLAIN = (  # 3 micro-batches a stage, from the paper: 1F1B, ZB-H1, ZB-H2, and ZB-1p and ZB-2p
    ("1.5B", 0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    ("6.2B", 0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    ("14.6B", 0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
    ("28.3B", 0.2646, 0.1421, 0.0641, 0.1421, 0.0038),
)
MORE = (("1.5B", 32, 0.0039), ("1.5B", 64, 0.0026))  # ZB-2p, from the paper
CODE = (  # micro-batches; ZB-1p; ZB-2p where half of an activation is left for W, and where all is
    ("1.5B", 24, 0.1585, 0.0433, 0.1015),
    ("1.5B", 32, 0.1238, 0.0036, 0.0781),
    ("1.5B", 64, 0.0660, 0.0018, 0.0407),
    ("6.2B", 24, 0.1323, 0.0029, 0.0607),
    ("6.2B", 32, 0.1026, 0.0022, 0.0462),
    ("6.2B", 64, 0.0541, 0.0011, 0.0236),
    ("14.6B", 48, 0.1397, 0.0066, 0.0624),
    ("14.6B", 64, 0.1086, 0.0050, 0.0475),
    ("14.6B", 128, 0.0574, 0.0025, 0.0243),
    ("28.3B", 96, 0.1421, 0.0038, 0.0616),
    ("28.3B", 128, 0.1105, 0.0028, 0.0469),
    ("28.3B", 256, 0.0585, 0.0014, 0.0240),
)
V = (  # ranks, micro-batches, seconds of a stage, of a step
    (4, 8, Seconds(), 48.0),
    (4, 8, Seconds(message_s=0.2), 51.2),
    (4, 8, Seconds(1.0, 1.2, 0.8, 0.1), 51.4),
    (8, 16, Seconds(), 96.0),
    (8, 16, Seconds(message_s=0.2), 103.4),
    (8, 16, Seconds(1.0, 1.2, 0.8, 0.1), 105.0),
    (8, 24, MODELS["1.5B"].seconds, 2346.803),
    (8, 24, MODELS["6.2B"].seconds, 3933.635),
)
V_CODE = {  # ranks; the most activations that one holds; drained step; without a barrier
    3: {4: (41, 41), 5: (39, 39), 6: (38, 36)},
    4: {4: (59, 59), 5: (56, 56), 6: (53, 53), 7: (52, 51), 8: (51, 48)},
    5: {6: (71, 71), 7: (68, 68), 8: (66, 65), 9: (65, 63), 10: (64, 60)},
    6: {
        6: (89, 89),
        7: (86, 86),
        8: (83, 83),
        9: (80, 80),
        10: (79, 77),
        11: (78, 75),
        12: (77, 72),
    },
    8: {
        **{8: (119, 119), 9: (116, 116), 10: (113, 113), 11: (110, 110), 12: (107, 107)},
        **{13: (106, 104), 14: (105, 101), 15: (104, 99), 16: (103, 96)},
    },
    16: {12: (251, 251), 15: (242, 242), 18: (233, 233), 25: (214, 212), 32: (207, 192)},
}
FORMS = ((1, 1.0), (2, 0.5), (2, 1.0))  # activations, in S, and what W needs of each


def zero_bubble() -> Iterator[Row]:
    """Yield the rows of 1F1B, ZB-H1, ZB-H2 and the automatic scheduler, ZB-1p and ZB-2p."""
    for name, *figures in PLAIN:
        stages, seconds = MODELS[name]
        for builder, published in zip((one_f_one_b, zb_h1, zb_h2), figures[:3], strict=True):
            found = bubble_of(builder(stages, 3 * stages), seconds)
            yield Row(
                builder.__name__, _case(name, 3 * stages), "bubble", "paper", published, found
            )
        for form, published in zip(FORMS, figures[3:], strict=False):
            yield automatic(name, 3 * stages, form, "paper", published)
    for name, micro_batches, published in MORE:
        yield automatic(name, micro_batches, FORMS[1], "paper", published)
    for name, micro_batches, *figures in CODE:
        for form, published in zip(FORMS, figures, strict=True):
            yield automatic(name, micro_batches, form, "code", published)


def automatic(
    name: str, micro_batches: int, form: tuple[int, float], source: str, published: float
) -> Row:
    """Return the row of a schedule made for a model, in so much memory."""
    stages, seconds = MODELS[name]
    times, share = form
    made = zb_greedy(
        stages, micro_batches, seconds=seconds, limit=times * stages, weight_share=share
    )
    case = f"{_case(name, micro_batches)}, limit {times * stages}, weight share {share:g}"
    return Row(made.name, case, "bubble", source, published, bubble_of(made, seconds))


def bubble_of(schedule: Schedule, seconds: Seconds) -> float:
    """Return the idle part of all ranks' time in a long run, to four digits."""
    return round(steady_bubble_fraction(schedule, seconds), 4)


def _case(name: str, micro_batches: int) -> str:
    return f"{name} on {MODELS[name].stages} stages, {micro_batches} micro-batches"


def zero_bubble_v() -> Iterator[Row]:
    """Yield the rows of ZB-V, two stages a rank: what a step takes without a barrier."""
    for ranks, micro_batches, seconds, published in V:
        made = zb_v(2 * ranks, micro_batches, seconds=seconds)
        took = " ".join(f"{each:g}" for each in seconds[:4])
        case = f"{ranks} ranks, {micro_batches} micro-batches, F I W and messages {took}"
        yield Row("zb_v", case, "step", "code", published, round(steady_s(made, seconds), 3))


def v_shaped() -> Iterator[Row]:
    """Yield the rows of V-Half and V-Min, and of what is found with their activations and others:
    F, I and W of half of a rank's layers take a second; M = 2 R."""
    for builder, sizes in ((v_half, (4, 6, 8, 16)), (v_min, (3, 4, 5, 6, 8, 16))):
        for ranks in sizes:
            made = builder(2 * ranks, 2 * ranks)
            held = max(peak_activations(made))
            figures = drained_s(made), steady_s(made)
            yield from _v_rows(made.name, ranks, held, (2, figures))
    for ranks, of_limit in V_CODE.items():
        for limit in of_limit:
            sizes, most = (4 * ranks, 2 * ranks), 2 * limit
            one, other = (
                found(*sizes, num_ranks=ranks, limit=most, objective=each)
                for each in ("drained", "steady")
            )
            figures = drained_s(one) / 2, steady_s(other) / 2
            yield from _v_rows(found.__name__, ranks, limit, (4, figures))


def _v_rows(
    name: str, ranks: int, limit: int, found: tuple[int, tuple[float, float]]
) -> Iterator[Row]:
    per_rank, figures = found
    case = (
        f"{ranks} ranks, {2 * ranks} micro-batches, limit {limit} halves, {per_rank} stages a rank"
    )
    what = "seconds of a drained step", "seconds per step without a barrier"
    for each, published, ours in zip(what, V_CODE[ranks][limit], figures, strict=True):
        yield Row(name, case, each, "code", published, ours)


TABLES: tuple[Callable[[], Iterator[Row]], ...] = (zero_bubble, zero_bubble_v, v_shaped)


def rows() -> Iterator[Row]:
    """Yield every row of every table."""
    for table in TABLES:
        yield from table()


def show(*, as_json: bool) -> None:
    """Print the rows, as a table or as one JSON document."""
    found = list(rows())
    if as_json:
        print(json.dumps({"rows": [row._asdict() for row in found], "machine": machine()}))
        return
    width = max(len(row.case) for row in found)
    print(f"{'schedule':12} {'case':{width}}  {'source':6}  published    ours  what")
    for row in found:
        figures = f"{row.published:9g} {row.ours:7g}"
        print(f"{row.schedule:12} {row.case:{width}}  {row.source:6}  {figures}  {row.what}")
