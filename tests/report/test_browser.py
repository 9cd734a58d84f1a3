"""A real browser shows the page, and its script."""

import html
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.report import lanes, report
from penstock.timeline import (
    step_s,
)
from tests.report.samples import RECTANGLE, Tree, a_report, pipeline, rectangles, spent, walled

# --- a real browser ----------------------------------------------------------------------------

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"),
)

PROBE = """<script>addEventListener("load", () => setTimeout(async () => {
  const byId = (id) => document.getElementById(id), svg = byId("lanes"), tipBox = byId("tip");
  const all = (selector) => [...document.querySelectorAll(selector)];
  const rest = () => new Promise((done) => setTimeout(done, 30));
  const spans = () => all("g.spans path").map((path) => path.getAttribute("d"));
  const point = (type, x, y) => {
    const box = svg.getBoundingClientRect();
    const where = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
    svg.dispatchEvent(new PointerEvent(type, where));
  };
  const key = (name) => svg.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
  const tip = () => (tipBox.hidden ? null : tipBox.textContent);
  if (svg) svg.setPointerCapture = () => {}; // there is no such pointer
  const out = {};
  try { await (async () => { COMMANDS })(); } catch (problem) { out.problem = String(problem); }
  const result = document.createElement("pre");
  result.id = "probe";
  result.textContent = JSON.stringify(out);
  document.body.append(result);
}, 200));</script></body>"""


def browse(chromium: str, page: str, folder: Path, *flags: str) -> str:
    """Return the DOM of a page after its scripts have run; fails on any message of the console.

    page:  a document, or the address of one.
    """
    path = folder / "page.html"
    path.write_text(page, "utf-8")
    place = page if page.startswith("http://") else path.as_uri()
    command = [chromium, *FLAGS, f"--user-data-dir={folder / 'user'}", *flags, place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


def probe(chromium: str, page: str, folder: Path, commands: str, width: int = 1120) -> dict:
    """Return what `commands` leave in `out`, run in the page, its body `width` pixels wide.

    The content policy is taken out: it would forbid the probe.  Frames come at once, because a
    browser without a screen draws none.
    """
    page = re.sub(r"<meta http-equiv=[^>]*>", "", page)
    shim = "<script>window.requestAnimationFrame = (f) => setTimeout(f, 0)</script>"
    style = f"<style>body {{ max-width: none; width: {width}px; padding: 0; }}</style>"
    page = page.replace("</title>", f"</title>{shim}", 1).replace("</head>", f"{style}</head>", 1)
    page = page.replace("</body>", PROBE.replace("COMMANDS", commands))
    dom = browse(chromium, page, folder, "--window-size=1240,900")
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None
    out = json.loads(html.unescape(found[1]))
    assert "problem" not in out, out["problem"]
    return out


def test_browser_shows_the_page_without_a_message(chromium, tmp_path):
    dom = browse(chromium, walled(spent(data=0.5)).html, tmp_path)
    assert "One step took 200 ms" in dom
    assert '<svg viewBox="0 0 ' in dom
    assert 'class="live"' in dom  # the content policy lets the script run
    assert not re.search(r'<div class="buttons" hidden', dom)


def test_page_without_its_script_has_pictures_and_tables(chromium, tmp_path):
    script = Tree(a_report().html).all("script")[-1].text
    commands = """
      const width = (e) => Math.round(e.getBoundingClientRect().width);
      out.spans = all("path.span.F").map(width);
      out.curves = all("path.curve").map(width);
      out.rows = all("tr").length;
      out.buttons = width(document.querySelector(".buttons"));"""
    out = probe(chromium, a_report().html.replace(script, ""), tmp_path, commands)
    assert len(out["spans"]) == 2
    assert min(out["spans"]) > 300
    assert min(out["curves"]) > 15
    assert out["rows"] > 20
    assert out["buttons"] == 0


def numbers(paths: list[str]) -> Iterator[list[float]]:
    for path in paths:
        yield sorted(float(text) for text in re.findall(r"-?[\d.]+", path))


@pytest.mark.parametrize("micro_batches", [4, 200, 1500])
def test_script_draws_at_rest_what_the_static_picture_shows(chromium, tmp_path, micro_batches):
    page = report(None, pipeline(2, micro_batches), pipeline(2, micro_batches, slow=1.2)).html
    static = [p.attributes["d"] for p in Tree(page).all("path", "span")]
    commands = """
      out.paths = spans();
      out.labels = all("#names text").map((text) => text.textContent);
      out.grid = all("#grid text").map((text) => text.textContent);
      out.width = svg.viewBox.baseVal.width;"""
    out = probe(chromium, page, tmp_path, commands)
    assert out["width"] == 1120
    assert out["labels"] == [t.text for t in Tree(page).all("text", "on")]
    grid = re.search(r'<g id="grid">(.*?)</g>', page)
    assert out["grid"] == re.findall(r">([^<]*)</text>", grid[1] if grid else "")
    for ours, theirs in zip(numbers(static), numbers(out["paths"]), strict=True):
        assert len(ours) == len(theirs)
        assert np.allclose(ours, theirs, atol=0.11)


def test_hover_names_the_action_and_its_counterpart(chromium, tmp_path):
    page = report(None, pipeline(), pipeline(slow=1.25)).html
    x, y, width, height = rectangles(page, 0, "F")[1]
    commands = f"""
      point("pointermove", {x + width / 2}, {y + height / 2}); out.tip = tip();
      out.marks = all(".mark").map((mark) => Number(mark.getAttribute("width")));
      point("pointermove", 600, {y + height / 2 - 40}); out.nothing = tip();"""
    out = probe(chromium, page, tmp_path, commands)
    assert out["tip"].splitlines() == [
        "F0.1 (forward)",
        "rank 0, stage 0, micro-batch 1",
        "predicted: start 10.0 ms, length 10.0 ms",
        "measured: start 12.5 ms, length 12.5 ms, error \u221220.0 %",
    ]
    assert out["marks"][1] == pytest.approx(1.25 * out["marks"][0], abs=2)
    assert out["nothing"] is None


def test_drag_zooms_and_reset_returns(chromium, tmp_path):
    page = report(None, pipeline(), pipeline(slow=1.25)).html
    commands = """
      const before = String(spans()), shown = byId("shown");
      point("pointerdown", 76, 50); point("pointermove", 212, 50);
      out.selected = Number(byId("selection").getAttribute("width"));
      point("pointerup", 323, 50); await rest();
      out.zoomed = shown.textContent; out.first = spans()[0];
      document.querySelector("[data-do=out]").click(); await rest();
      out.wider = shown.textContent;
      key("0"); await rest();
      out.reset = shown.textContent; out.same = String(spans()) === before;"""
    out = probe(chromium, page, tmp_path, commands)
    assert out["selected"] == pytest.approx(136, abs=1)
    whole_ms = 1000 * step_s(pipeline(slow=1.25))
    per_px = whole_ms / (lanes.WIDTH - lanes.LEFT - lanes.RIGHT)
    low, high = (float(t) for t in re.findall(r"[\d.]+", out["zoomed"]))
    assert (low, high) == pytest.approx((0, 136 * per_px), abs=1)
    first = [float(t) for t in RECTANGLE.findall(out["first"])[0]]
    assert first[2] == pytest.approx(1024 * 10 / (136 * per_px) - 1, rel=0.02)
    assert out["wider"] != out["zoomed"]
    assert (out["reset"], out["same"]) == ("", True)


def test_keys_go_from_span_to_span(chromium, tmp_path):
    page = report(None, pipeline(), pipeline(slow=1.25)).html
    commands = """
      const after = (name) => { key(name); return (tip() || "").split("\\n")[0]; };
      out.focusable = svg.tabIndex;
      out.path = ["Right", "Right", "Left", "Down", "Down"].map((way) => after("Arrow" + way));
      key("Escape"); out.gone = tip();"""
    out = probe(chromium, page, tmp_path, commands)
    assert out["focusable"] == 0
    names = ["F0.0 (forward)", "F0.1 (forward)", "F0.0 (forward)", "sent: result of F0.0 (forward)"]
    assert out["path"] == [*names, "received: result of B1.0 (backward)"]
    assert out["gone"] is None


def test_chart_tells_the_value_under_the_pointer(chromium, tmp_path):
    commands = """
      const chart = all(".chart").find((one) => one.ariaLabel.startsWith("Loss"));
      const box = chart.getBoundingClientRect();
      const where = { clientX: box.right - 15, clientY: box.top + 40 };
      chart.dispatchEvent(new PointerEvent("pointermove", where));
      out.tip = tip(); chart.dispatchEvent(new PointerEvent("pointerleave")); out.gone = tip();"""
    out = probe(chromium, a_report().html, tmp_path, commands)
    assert out["tip"].splitlines() == [
        "step 19",
        "loss 3.1",
        "validation 2.25",
    ]
    assert out["gone"] is None


def test_narrow_page_is_drawn_to_its_width_and_does_not_scroll_sideways(chromium, tmp_path):
    commands = """
      out.view = svg.viewBox.baseVal.width;
      out.overflow = all("main > *, main p, .charts, figure")
        .filter((part) => part.scrollWidth > 481).map((part) => part.tagName + part.className);"""
    out = probe(chromium, a_report().html, tmp_path, commands, width=480)
    assert out == {"view": 480, "overflow": []}
