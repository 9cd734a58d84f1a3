"""Markup: HTML built from tags, where every text is escaped because nothing else can be written."""

import re
from collections.abc import Iterable, Sequence
from html import escape

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class Markup(str):
    """HTML, as opposed to text: `tag` escapes a text and takes Markup as it is."""

    __slots__ = ()


Child = str | int | Markup
Attribute = str | int | float | bool | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return the element `name`; a trailing or inner "_" of an attribute is dropped or a hyphen.

    An attribute that is True stands without a value; one that is None or False is left out.
    Characters that no page can show (control characters, halves of pairs) become U+FFFD.
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    written = "".join(_attribute(key, value) for key, value in pairs)
    if name in ("meta", "link", "br"):
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Return the children one after the other, texts escaped."""
    return Markup("".join(map(_child, children)))


def table(
    label: str, head: Sequence[Child], rows: Iterable[Markup], *, long: bool = False
) -> Markup:
    """Return a table that scrolls by itself when it is wider than the page, or `long`.

    A head that is a text is one of a column of words; one that is Markup stands as it is.
    """
    cells = (cell if isinstance(cell, Markup) else tag("th", cell, scope="col") for cell in head)
    body = join((tag("thead", tag("tr", *cells)), tag("tbody", *rows)))
    class_ = "scroll long" if long else "scroll"
    return tag(
        "div", tag("table", body), class_=class_, tabindex=0, role="region", aria_label=label
    )


def section(title: str, *children: Child) -> Markup:
    """Return a section of the page under its heading."""
    name = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def folded(title: str, *children: Child) -> Markup:
    """Return a section of the page that a reader opens."""
    name = title.lower().replace(" ", "-")
    return tag("details", tag("summary", title, id=name), *children)


def swatch(class_: str) -> Markup:
    """Return a small square in the colour of a kind of action."""
    shape = tag("rect", width=14, height=12, y=1, class_=f"span {class_}")
    return tag("svg", shape, width=14, height=14, aria_hidden="true", class_="swatch")


def number_head(text: str) -> Markup:
    """Return the head of a column of figures, which stand to the right."""
    return tag("th", text, scope="col", class_="n")


def figure_cell(text: str) -> Markup:
    """Return a cell with a figure, to the right."""
    return tag("td", text, class_="n")


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{_text(str(value))}"'


def _child(child: Child) -> str:
    return child if isinstance(child, Markup) else _text(str(child))


def _text(text: str) -> str:
    return escape(_UNPRINTABLE.sub("\ufffd", text))
