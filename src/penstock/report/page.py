"""Page: the sections of a report, put together into one HTML document that needs nothing else."""

import base64
import hashlib
from collections.abc import Iterable, Iterator
from importlib.resources import files

from penstock.report.headline import headline, sentence
from penstock.report.inputs import Inputs
from penstock.report.markup import Markup, tag
from penstock.report.phase_table import phases_section
from penstock.report.ranks import ranks
from penstock.report.sections import about, memory, plan, timelines, training
from penstock.report.times import times
from penstock.report.wall import wall
from penstock.report.wanted import wanted_section


def phases(inputs: Inputs) -> Iterator[Markup]:
    """Yield the phases of a run to a loss; nothing of any other."""
    return phases_section(inputs.changes.until)


def wanted(inputs: Inputs) -> Iterator[Markup]:
    """Yield the machines that a run's policy wanted; nothing where it follows none."""
    return wanted_section(inputs.changes.machines)


SECTIONS = (
    headline,
    phases,
    wanted,
    ranks,
    timelines,
    wall,
    times,
    memory,
    training,
    plan,
    about,
)  # in reading order


def page(inputs: Inputs) -> str:
    """Return the document of a run."""
    parts = (part for section in SECTIONS for part in section(inputs))
    return document(inputs.title or "Penstock report", sentence(inputs), parts)


def document(
    title: str, summary: str, parts: Iterable[Markup], *, script: str = "page.js", asks: str = ""
) -> str:
    """Return a document with a title, its summary in a few sentences, and its sections.

    It uses no network but for what it `asks` (its content policy forbids it), runs no script but
    its own, and shows pictures and tables without that too.
    script:   the file of it.
    """
    body = (
        tag("header", tag("h1", title), tag("p", summary, class_="sentence")),
        tag("main", *parts),
        tag("div", id="tip", role="status", hidden=True),
    )
    code = _resource(script)
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(code, asks)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(_resource("page.css"))),
    )
    whole = tag(
        "html", tag("head", *head), tag("body", *body, tag("script", Markup(code))), lang="en"
    )
    return f"<!doctype html>\n{whole}\n"


def _policy(script: str, asks: str) -> str:
    connects = f" connect-src {asks};" if asks else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline';"
        f"{connects} img-src data:; base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return (files("penstock.report") / name).read_text("utf-8")
