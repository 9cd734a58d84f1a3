"""Charts: curves over time or steps, with levels to compare them with."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.report.markup import Markup, tag
from penstock.report.scale import SECONDS, Floats, Format, Scale, ticks, time_labels
from penstock.report.thin import envelope

LEFT, RIGHT, TOP, BOTTOM = 68, 14, 10, 24
_LETTER = 6.8  # pixels of a character of a name
LARGEST = 1e100  # what is beyond is not drawn: its squares would leave the range of floats


class Curve(NamedTuple):
    """A named line; `stepped` if a value holds until the next one."""

    name: str
    class_: str
    xs: Floats
    ys: Floats
    stepped: bool = False


class Level(NamedTuple):
    """A named horizontal line."""

    name: str
    class_: str
    y: float


class Axis(NamedTuple):
    """What an axis shows, how its values are written, and the range it must cover.

    unit   stands behind each number on it
    """

    name: str
    format: Format
    low: float = np.inf
    high: float = -np.inf
    unit: str = ""


class Frame(NamedTuple):
    """The scales of a chart."""

    x: Scale
    y: Scale


def drawable(ys: Floats) -> NDArray[np.bool_]:
    """Return a mask of the values that can be drawn: numbers up to 1e100."""
    return np.abs(ys) <= LARGEST  # false for what is no number


def chart(
    title: str,
    curves: Sequence[Curve],
    levels: Sequence[Level],
    *,
    x: Axis,
    y: Axis,
    size: tuple[int, int] = (540, 256),
) -> Markup:
    """Return an SVG of curves and levels, thinned to its pixels; no peak is lost.

    A value that is not a number breaks its curve.  Values above a given `y.high` are not drawn.
    """
    frame = _frame(curves, levels, (x, y), size)
    return tag(
        "svg",
        tag("title", title),
        *_axes(frame, x, y),
        *(_curve(curve, frame) for curve in curves),
        *_levels(levels, curves, frame, y),
        viewBox=f"0 0 {size[0]} {size[1]}",
        class_="chart",
        role="img",
        aria_label=title,
        data_points=_points(curves, levels, frame, (x, y)),
    )


def _frame(
    curves: Sequence[Curve], levels: Sequence[Level], axes: tuple[Axis, Axis], size: tuple[int, int]
) -> Frame:
    x, y = axes
    drawn = [drawable(curve.ys) for curve in curves]
    xs = [curve.xs[keep] for curve, keep in zip(curves, drawn, strict=True)]
    ys = [curve.ys[keep] for curve, keep in zip(curves, drawn, strict=True)]
    ys.append(np.array([level.y for level in levels if abs(level.y) <= LARGEST]))
    low, high = _range(np.concatenate([*xs, np.zeros(0)]), x)
    bottom, top = _range(np.concatenate(ys), y)
    if np.isinf(y.high):  # room above and below what is drawn
        top += 0.06 * (top - bottom)
    if np.isinf(y.low):
        bottom -= 0.04 * (top - bottom)
    if bottom == top:
        bottom, top = bottom - (abs(bottom) or 1) / 2, top + (abs(top) or 1) / 2
    end, base = size[0] - RIGHT, size[1] - BOTTOM
    return Frame(Scale(low, high, LEFT, end), Scale(bottom, top, base, TOP))


def _range(values: Floats, axis: Axis) -> tuple[float, float]:
    """Return the range of an axis: `axis.high` cuts, `axis.low` widens."""
    low = min(float(values.min(initial=np.inf)), axis.low)
    high = float(values.max(initial=-np.inf))
    high = high if np.isinf(axis.high) else axis.high
    return (low, high) if np.isfinite(low) and np.isfinite(high) else (0.0, 1.0)


def _axes(frame: Frame, x: Axis, y: Axis) -> Iterator[Markup]:
    rows = ticks(frame.y.low, frame.y.high, binary=y.format.binary)
    columns = ticks(frame.x.low, frame.x.high)
    if x.format is not SECONDS:
        columns = tuple(value for value in columns if value == int(value))
    base, end = frame.y.start, frame.x.end
    lines = (f"M{LEFT} {py:.1f}H{end}" for py in frame.y(np.array(rows)).tolist())
    yield tag("path", d="".join(lines), class_="grid")
    yield tag("path", d=f"M{LEFT} {base}H{end}", class_="axis")
    for py, text in zip(frame.y(np.array(rows)).tolist(), _texts(rows, y), strict=True):
        yield tag("text", text, x=LEFT - 7, y=f"{py + 4:.1f}", text_anchor="end")
    for px, text in zip(frame.x(np.array(columns)).tolist(), _texts(columns, x), strict=True):
        yield tag("text", text, x=f"{px:.1f}", y=base + 17, text_anchor="middle")


def _texts(values: Sequence[float], axis: Axis) -> tuple[str, ...]:
    if axis.format is SECONDS:
        return time_labels(values)
    unit = f" {axis.unit}" if axis.unit else ""
    return tuple(f"{axis.format.text(value)}{unit}" for value in values)


def _curve(curve: Curve, frame: Frame) -> Markup:
    at, broken = _kept(curve, frame)
    pxs = frame.x(curve.xs[at]).tolist()
    pys = np.maximum(frame.y(curve.ys[at]), -TOP).tolist()
    path = list[str]()
    for px, py, apart in zip(pxs, pys, broken.tolist(), strict=True):
        if apart:
            path.append(f"M{px:.1f} {py:.1f}h0")
        else:
            path.append(f"H{px:.1f}V{py:.1f}" if curve.stepped else f"L{px:.1f} {py:.1f}")
    title = tag("title", curve.name)
    return tag("path", title, d="".join(path), class_=f"curve {curve.class_}")


def _kept(curve: Curve, frame: Frame) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the indices of the drawn points, and which of them begin a new piece of the curve."""
    fit = drawable(curve.ys)
    finite = np.flatnonzero(fit)
    columns = int(frame.x.end - frame.x.start)
    at = finite[envelope(curve.xs[finite], curve.ys[finite], columns=columns)]
    holes = np.cumsum(~fit)[at]
    return at, np.diff(holes, prepend=-1) > 0


def _levels(
    levels: Sequence[Level], curves: Sequence[Curve], frame: Frame, y: Axis
) -> Iterator[Markup]:
    """Yield the levels; the name of each stands where it hides least of the curves."""
    drawn = [level for level in levels if frame.y.low <= level.y <= frame.y.high]
    lines, taken = [_line(curve, frame) for curve in curves], list[Box]()
    for level in sorted(drawn, key=lambda level: -level.y):
        py, text = frame.y.of(level.y), f"{level.name} {y.format.text(level.y)}"
        place = min(_places(frame, py, text), key=lambda place: _hidden(place.box, lines, taken))
        taken.append(place.box)
        yield tag("path", d=f"M{LEFT} {py:.1f}H{frame.x.end}", class_=f"level {level.class_}")
        yield tag(
            "text",
            text,
            x=f"{place.x:g}",
            y=f"{place.y:.1f}",
            text_anchor=place.anchor,
            class_=f"level {level.class_}",
        )


class Box(NamedTuple):
    """Pixels from left to right and from the top down."""

    left: float
    right: float
    top: float
    bottom: float


class LabelPlace(NamedTuple):
    """Where the name of a level may stand."""

    x: float
    y: float
    anchor: str
    box: Box


def _places(frame: Frame, py: float, text: str) -> Iterator[LabelPlace]:
    """Yield the places of a level's name, the one that is preferred first."""
    long, middle = _LETTER * len(text), (LEFT + frame.x.end) / 2
    across = (
        (frame.x.end - 4, "end", frame.x.end - 4 - long),
        (LEFT + 4, "start", LEFT + 4),
        (middle, "middle", middle - long / 2),
    )
    above, below = py - 5, py + 14
    rows = [row for row in (above, below) if TOP + 9 <= row <= frame.y.start - 2] or [below]
    for x, anchor, left in across:
        for row in rows:
            yield LabelPlace(x, row, anchor, Box(left, left + long, row - 11, row + 3))


def _line(curve: Curve, frame: Frame) -> tuple[Floats, Floats]:
    """Return the pixels of a curve, one for each column that it crosses."""
    fit = drawable(curve.ys)
    if not fit.any():
        return np.zeros(0), np.zeros(0)
    xs: Floats = curve.xs[fit]
    ys: Floats = curve.ys[fit]
    pxs, pys = frame.x(xs), frame.y(ys)
    first, last = math.ceil(float(pxs.min())), math.floor(float(pxs.max()))
    columns = np.arange(first, last + 1, dtype=np.float64)
    return np.append(columns, pxs), np.append(np.interp(columns, pxs, pys), pys)


def _hidden(box: Box, lines: Sequence[tuple[Floats, Floats]], taken: Sequence[Box]) -> int:
    """Return the pixels of curves that a name would hide; another name weighs more than all."""
    count = sum(
        box.left < each.right
        and each.left < box.right
        and box.top < each.bottom
        and each.top < box.bottom
        for each in taken
    )
    hidden = 100_000 * count
    for pxs, pys in lines:
        inside = (pxs >= box.left) & (pxs <= box.right) & (pys >= box.top) & (pys <= box.bottom)
        hidden += int(inside.sum())
    return hidden


def _points(
    curves: Sequence[Curve], levels: Sequence[Level], frame: Frame, axes: tuple[Axis, Axis]
) -> str:
    """Return the data from which page.js shows the point nearest to the pointer."""
    drawn = list[dict[str, object]]()
    for curve in curves:
        at, _ = _kept(curve, frame)
        values = [float(f"{value:.7g}") for value in curve.ys[at].tolist()]
        xs = [float(f"{value:.9g}") for value in curve.xs[at].tolist()]
        drawn.append({"name": curve.name, "x": xs, "y": values})
    about = {
        "x": [axes[0].name, axes[0].format.name],
        "y": axes[1].format.name,
        "scales": [[s.low, s.high, s.start, s.end] for s in frame],
        "curves": drawn,
        "levels": [[level.name, level.y] for level in levels if abs(level.y) <= LARGEST],
    }
    return json.dumps(about, separators=(",", ":"))
