"""Live: a page of a run that is under way, served on this host alone and redrawn by polling."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import final

from penstock.errors import PenstockError, ReportError
from penstock.report.figure_words import (
    ABSENT,
    bytes_text,
    count_text,
    error_of,
    number_text,
    percent_text,
    seconds_text,
)
from penstock.report.headline import card
from penstock.report.inputs import Pair
from penstock.report.markup import Markup, figure_cell, join, number_head, section, table, tag
from penstock.report.page import document
from penstock.report.ranks import ranks
from penstock.report.sections import training
from penstock.report.wanted import wanted_section
from penstock.report.watched import Watched

HERE = "127.0.0.1"
_PATIENCE_S = 10.0  # for a browser that has connected and asks for nothing


def state_words(told: Watched) -> str:
    """Return in a sentence how a run stands."""
    of = "" if told.num_steps is None else f" of {told.num_steps:,}"
    words = f"{told.state.capitalize()} after step {told.step:,}{of}"
    if told.state == "running":
        words = f"Running: step {told.step:,}{of}"
        left = told.left_s
        words += f", about {seconds_text(left)} left" if left is not None else ""
    if told.state == "stopped":
        words += f", nothing was written for {seconds_text(told.silent_s)}"
    working = sum(rank.works for rank in told.ranks)
    gone = len(told.ranks) - working
    if told.ranks and told.state == "running":
        words += f"; {count_text(working, 'rank')} at work"
        words += f", {gone} gone" if gone else ""
    return f"{words}."


def page(told: Watched) -> str:
    """Return the document of a run, which asks for what has changed since."""
    title = f"{told.inputs.title} - Penstock"
    return document(title, state_words(told), [parts(told)], script="live.js", asks="'self'")


def parts(told: Watched) -> Markup:
    """Return all that the page shows below its head."""
    machines = wanted_section(told.inputs.changes.machines)
    sections = (*machines, *ranks(told.inputs), *training(told.inputs), *_checkpoints(told))
    cards = tag("dl", *_cards(told), class_="cards")
    return tag("div", cards, *sections, data_sentence=state_words(told))


def _cards(told: Watched) -> Iterator[Markup]:
    of = () if told.num_steps is None else (f"of {told.num_steps:,}",)
    yield card("Step", f"{told.step:,}", *of)
    yield card("Loss", number_text(told.loss))
    for name, pair in (("Tokens", told.tokens_per_s), ("Samples", told.samples_per_s)):
        if pair.measured is not None:
            yield card(f"{name} per second", *_beside(pair, _rate))
            break
    yield card("Step time", *_beside(told.step_s, seconds_text))
    generations = told.inputs.changes.generations
    working = sum(rank.works for rank in told.ranks)
    gone = [f"{rank.member} {rank.how} at step {rank.step:,}" for rank in told.ranks if rank.how]
    yield card("Ranks", f"{working:,}" if told.ranks else ABSENT, *gone[-3:])
    if generations:
        took_s = sum(each.cost_s for each in told.changes)
        under = f"{count_text(len(told.changes), 'change')}, {seconds_text(took_s)} in all"
        yield card("Generation", str(generations[-1].generation), under)
    kept = told.checkpoints
    under = (bytes_text(kept[-1].size_bytes),) if kept else ()
    yield card("Newest checkpoint", f"step {kept[-1].step:,}" if kept else "none yet", *under)


def _beside(pair: Pair, words: Callable[[float | None], str]) -> tuple[str, ...]:
    """Return a measured figure, and under it the predicted one."""
    if pair.predicted is None:
        return words(pair.measured), "not predicted"
    under = [f"predicted {words(pair.predicted)}"]
    if pair.measured is not None:
        under.append(f"error {percent_text(error_of(*pair))}")
    return (words(pair.measured), *under)


def _rate(rate: float | None) -> str:
    return ABSENT if rate is None else number_text(float(f"{rate:.3g}"))


def _checkpoints(told: Watched) -> Iterator[Markup]:
    if not told.checkpoints:
        return
    newest_s = told.checkpoints[-1].time_s
    rows = (
        tag(
            "tr",
            tag("td", f"{each.step:,}"),
            figure_cell(bytes_text(each.size_bytes)),
            figure_cell(seconds_text(newest_s - each.time_s)),
        )
        for each in reversed(told.checkpoints)
    )
    head = ("After step", number_head("Size"), number_head("Before the newest"))
    yield section("Checkpoints", table("Checkpoints", head, rows))


@final
class LivePage(ThreadingHTTPServer):
    """Serves the page of a run on this host; `serve_forever` returns after `shutdown`.

    look:     returns how the run stands; one thread at a time asks.
    """

    daemon_threads = True

    def __init__(self, port: int, look: Callable[[], Watched]) -> None:
        self._look, self._lock = look, threading.Lock()
        try:
            super().__init__((HERE, port), _PageRequest)
        except OSError as problem:
            message = f"cannot serve a page on port {port} of {HERE}: {problem.strerror}"
            raise ReportError(message, hint="leave out the port: a free one is taken") from problem

    @property
    def address(self) -> str:
        """Return where the page is."""
        return f"http://{HERE}:{self.server_port}/"

    def answer(self, path: str, host: str) -> tuple[int, str]:
        """Return the status and the text for who asks for `path`.

        Pages of other places, whose names somebody lets stand for this host, are refused.
        """
        if host not in (f"{HERE}:{self.server_port}", f"localhost:{self.server_port}"):
            return 403, "this page is for this host alone"
        if path not in ("/", "/live"):
            return 404, f"no such page: {path}"
        try:
            with self._lock:
                told = self._look()
        except PenstockError as problem:
            return 500, f"{problem.message}; {problem.hint}"
        return 200, page(told) if path == "/" else join([parts(told)])


class _PageRequest(BaseHTTPRequestHandler):
    """One request: only pages are given, nothing is taken."""

    timeout = _PATIENCE_S
    server: LivePage  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Give a page."""
        status, text = self.server.answer(self.path, self.headers.get("Host", ""))
        kind = "html" if status == 200 else "plain"
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: it is asked for once a second."""
