"""What tests of the report share: timelines, plans, metrics, and reading a page."""

import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

from penstock.plan import Decision, Plan, Prediction
from penstock.report import Report, report
from penstock.timeline import (
    PARTS,
    Breakdown,
    Held,
    Span,
    Timeline,
    breakdown_of,
)

HOSTILE = "</script><script>alert(1)</script><b>\"'&\x00\ud800"
RECTANGLE = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z")


def pipeline(num_ranks: int = 2, micro_batches: int = 4, *, slow: float = 1.0) -> Timeline:
    """Return 1F1B by hand: F 10 ms, B 20 ms, messages 1 ms, U 5 ms, times `slow`."""
    done: dict[tuple[str, int, int], float] = {}
    spans, held, now = list[Span](), list[Held](), [0.0] * num_ranks
    todo = [_order(num_ranks - rank, micro_batches) for rank in range(num_ranks)]
    while any(todo):
        for rank in range(num_ranks):
            while todo[rank]:
                kind, m = todo[rank][0]
                other = rank - 1 if kind == "F" else rank + 1
                ready = done.get((kind, other, m)) if 0 <= other < num_ranks else 0.0
                if ready is None:
                    break
                if 0 <= other < num_ranks:
                    where = (kind, other, m, ready, ready + 0.001 * slow)
                    spans += [Span(other, "send", *where), Span(rank, "receive", *where)]
                    ready += 0.001 * slow
                start = max(now[rank], ready)
                now[rank] = start + (0.01 if kind == "F" else 0.02) * slow
                spans.append(Span(rank, "compute", kind, rank, m, start, now[rank]))
                held.append(Held(rank, now[rank], (100 + m) * 2**20))
                done[kind, rank, m] = now[rank]
                todo[rank].pop(0)
    for rank in range(num_ranks):
        spans.append(Span(rank, "update", "U", rank, 0, now[rank], now[rank] + 0.005 * slow))
    return Timeline.of(num_ranks, spans, held, meta=(("made by", "hand"),))


def _order(warm_up: int, micro_batches: int) -> list[tuple[str, int]]:
    order = [("F", m) for m in range(min(warm_up, micro_batches))]
    for m in range(micro_batches):
        order.append(("B", m))
        if m + warm_up < micro_batches:
            order.append(("F", m + warm_up))
    return order


def a_plan(num_ranks: int = 2, name: str = "blocks.1") -> Plan:
    return Plan.of(
        graph="9f31c2aa",
        cuts=tuple(range(1, num_ranks)),
        cut_names=tuple(f"{name}.{k}" for k in range(1, num_ranks)),
        schedule="one_f_one_b",
        num_micro_batches=4,
        num_ranks=num_ranks,
        decisions=(Decision("schedule", "one_f_one_b", "search", "saves 31 ms over gpipe"),),
        predicted=Prediction(0.1, (2**20,) * num_ranks),
    )


def some_metrics(count: int = 20) -> list[dict[str, object]]:
    lines = []
    for step in range(count):
        rates = {"samples_per_second": 10.0, "tokens_per_second": 2560.0}
        lines.append({"step": step, "loss": 5 - step / 10, "seconds": 0.2, **rates})
    return lines


SUMMARY = {
    "val_loss": 2.25,
    "unigram_entropy_nats": 3.5,
    "step_s_predicted": 0.18,
    "step_s_measured": 0.2,
    "peak_bytes_predicted": [90 * 2**20, 80 * 2**20],
    "peak_bytes_measured": [100 * 2**20, 95 * 2**20],
    "cap_bytes": 2**28,
    "corpus": "stdlib",
}


def a_report(**changes: object) -> Report:
    parts = {"metrics": some_metrics(), "summary": SUMMARY, "title": "runs/gpt", **changes}
    return report(a_plan(), pipeline(), pipeline(slow=1.1), **parts)  # type: ignore[arg-type]


class Tree(HTMLParser):
    """The elements of a page: (tag, attributes, text); fails where they are not nested."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, dict(attrs), list[str]())
        assert len(dict(attrs)) == len(attrs)
        self.elements.append(element)
        if tag not in ("meta", "link", "br"):
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def all(self, tag: str, class_: str = "") -> list[SimpleNamespace]:
        return [
            SimpleNamespace(attributes=attributes, text="".join(text))
            for name, attributes, text in self.elements
            if name == tag and set(class_.split()) <= set((attributes.get("class") or "").split())
        ]

    @property
    def text(self) -> str:
        return "".join(self.elements[0][2])


def data_of(page: str) -> dict[str, object]:
    data = [one for one in Tree(page).all("script") if one.attributes.get("id") == "data"]
    return json.loads(data[0].text)


def spent(num_ranks: int = 2, **more: float) -> Breakdown:
    """Return ten steps of `pipeline(slow=1.1)`, with more seconds in parts of rank 0."""
    once = breakdown_of(pipeline(num_ranks, slow=1.1))
    assert once is not None
    rows = [[10 * seconds for seconds in row] for row in once.seconds]
    for part, seconds in {"once": 3.0, **more}.items():
        rows[0][PARTS.index(part)] += seconds  # type: ignore[arg-type]
    return Breakdown(10, tuple(map(sum, rows)), tuple(map(tuple, rows)))


def walled(one: Breakdown, **changes: object) -> Report:
    return a_report(summary={**SUMMARY, "breakdown": one.to_json()}, **changes)


def rectangles(page: str, clock: int, kind: str) -> list[tuple[float, float, float, float]]:
    """Return x, y, width, height of what is drawn of a kind by a clock."""
    paths = Tree(page).all("path", f"span {kind}")
    return [
        tuple(map(float, numbers))  # type: ignore[misc]
        for numbers in RECTANGLE.findall(paths[clock].attributes["d"] or "")
    ]
