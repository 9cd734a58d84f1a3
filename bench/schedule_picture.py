"""Picture: step time against peak memory, one panel for each kind of links, as one SVG."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from penstock.report.markup import Markup, tag

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 600, 600, 46, 16, 84, 48
FONT = "font: 12px system-ui, sans-serif"
INK, FAINT, FRONT, DOT = "#222", "#d8d8d8", "#c2410c", "#1d4ed8"
LINE = 14  # pixels, the height of a label
LOWEST = 0.25  # activations, where the axis begins


class Point(NamedTuple):
    name: str
    step_s: float
    activations: float
    twice: bool  # whether a rank holds weights of twice its share


class Place(NamedTuple):
    """Schedules with the same figures, and where they are in the picture."""

    names: tuple[str, ...]
    x: float
    y: float
    best: bool
    twice: bool


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    def meets(self, other: "Box") -> bool:
        return (
            abs(2 * self.x + self.width - 2 * other.x - other.width) < self.width + other.width
            and abs(2 * self.y + self.height - 2 * other.y - other.height)
            < self.height + other.height
        )


def picture(title: str, panels: Sequence[tuple[str, Sequence[Point]]], *, ideal_s: float) -> str:
    """Return the SVG; the line joins the schedules that none beats in both time and memory."""
    every = [point for _, some in panels for point in some]
    most_s = max(point.step_s for point in every)
    most = max(point.activations for point in every)
    drawn = [
        tag("g", *_panel(name, some, (ideal_s, most_s, most)), transform=f"translate({at})")
        for at, (name, some) in zip(range(0, WIDTH * len(panels), WIDTH), panels, strict=True)
    ]
    title += ".  Hollow: weights are held twice.  The line: none is better in both"
    head = tag("text", title, x=LEFT, y=24, style="font: 600 15px system-ui, sans-serif", fill=INK)
    return tag(
        "svg",
        tag("title", f"Schedules: step time against memory. {title}"),
        tag("rect", width="100%", height="100%", fill="white"),
        head,
        *drawn,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH * len(panels)} {HEIGHT}",
        style=FONT,
    )


def _panel(name: str, points: Sequence[Point], most: tuple[float, float, float]) -> list[Markup]:
    ideal_s, most_s, most_held = most
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x_of(seconds: float) -> float:
        return LEFT + (seconds / ideal_s - 1) / (most_s / ideal_s - 1) * (right - LEFT - 130)

    def y_of(held: float) -> float:
        return bottom - (held - LOWEST) / (most_held * 1.05 - LOWEST) * (bottom - TOP)

    marks = [tag("text", name, x=LEFT, y=52, fill=INK, style="font-weight: 600")]
    for percent in range(0, int(100 * (most_s / ideal_s - 1)) + 1, 10):
        x = x_of(ideal_s * (1 + percent / 100))
        marks += [_line(x, TOP, x, bottom), _text(f"+{percent} %", x, bottom + 18, "middle")]
    for quarters in range(1, int(4 * most_held) + 1):
        y = y_of(quarters / 4)
        marks += [_line(LEFT, y, right, y), _text(f"{quarters / 4:g}", LEFT - 8, y + 4, "end")]
    marks.append(_text("step time above the ideal, all ranks always busy", LEFT, bottom + 38))
    marks.append(_text("activations held, in whole models for one micro-batch", LEFT, TOP - 10))
    places = _places(points, x_of, y_of)
    front = [place for place in places if place.best]
    corners = " ".join(f"{place.x:.1f},{place.y:.1f}" for place in front)
    marks.append(tag("polyline", points=corners, fill="none", stroke=FRONT, stroke_width=1.5))
    return marks + _labelled(places)


def _places(
    points: Sequence[Point], x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> list[Place]:
    """Return the points joined where they coincide, from left to right."""
    keyed = sorted(points, key=_figures)
    places: list[Place] = []
    least = float("inf")
    for (seconds, held), some in groupby(keyed, key=_figures):
        here = list(some)
        names = tuple(point.name for point in here)
        twice = all(point.twice for point in here)
        places.append(Place(names, x_of(seconds), y_of(held), held < least, twice))
        least = min(least, held)
    return places


def _figures(point: Point) -> tuple[float, float]:
    return round(point.step_s, 6), round(point.activations, 6)


def _labelled(places: Sequence[Place]) -> list[Markup]:
    """Return dots, each with its label at the first place beside it where nothing else is."""
    taken = [Box(place.x - 6, place.y - 6, 12, 12) for place in places]
    marks: list[Markup] = []
    for place in places:
        words, colour = ", ".join(place.names), FRONT if place.best else DOT
        width = 6.7 * len(words) + 2
        box = next(box for box in _around(place, width) if not any(map(box.meets, taken)))
        taken.append(box)
        if abs(box.y + LINE / 2 - place.y) > LINE:
            end = box.x if box.x > place.x else box.x + width
            marks.append(_line(place.x, place.y, end, box.y + LINE / 2, colour))
        marks.append(_text(words, box.x, box.y + LINE - 4))
    for place in places:
        inside = "white" if place.twice else FRONT if place.best else DOT
        colour = FRONT if place.best else DOT
        at = {"cx": f"{place.x:.1f}", "cy": f"{place.y:.1f}"}
        marks.append(tag("circle", r=4, fill=inside, stroke=colour, stroke_width=2, **at))
    return marks


def _around(place: Place, width: float) -> Iterator[Box]:
    """Yield boxes for a label, the nearest first: on the right, on the left, then farther off."""
    for far in (*range(0, 12), *range(12, 400, 4)):
        for side in (-1, 1):
            y = place.y - LINE / 2 + side * far * 2
            yield from (
                box
                for box in (
                    Box(place.x + 9, y, width, LINE),
                    Box(place.x - 9 - width, y, width, LINE),
                )
                if box.x > LEFT and box.x + width < WIDTH
            )


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str = FAINT) -> Markup:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    return tag("line", stroke=stroke, **ends)


def _text(words: str, x: float, y: float, anchor: str = "start") -> Markup:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, fill=INK)
