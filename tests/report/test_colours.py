"""Colours that everyone can tell apart, on both themes."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from penstock.report import lanes
from penstock.timeline import (
    SPAN_KINDS,
)

# --- colours -----------------------------------------------------------------------------------

CSS = (Path(lanes.__file__).parent / "page.css").read_text()
# Machado, Oliveira, Fernandes 2009: linear RGB as seen without one kind of cone.
VISION = {
    "all cones": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
LMS = np.array(
    [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
)
LAB = np.array(
    [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
)


def colours(theme: str) -> dict[str, np.ndarray]:
    """Return the linear RGB of every colour of a theme, by name."""
    light, dark = CSS.split("prefers-color-scheme: dark")
    blocks = [light] if theme == "light" else [light, dark]
    found = [pair for block in blocks for pair in re.findall(r"--([\w-]+): #(\w{6})\b", block)]
    rgb = {name: np.array([int(h[k : k + 2], 16) / 255 for k in (0, 2, 4)]) for name, h in found}
    return {
        name: np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)
        for name, v in rgb.items()
    }


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    low, high = sorted(float(c @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_any_two_kinds_look_different_to_everyone(theme, vision):
    seen = {}
    for kind in SPAN_KINDS:
        linear = np.clip(np.array(VISION[vision]) @ colours(theme)[kind], 0, 1)
        seen[kind] = LAB @ np.cbrt(LMS @ linear)
    looks = [kind for kind in SPAN_KINDS if kind != "reload"]  # copies look alike, there and back
    for a, b in itertools.combinations(looks, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 0.13, (a, b)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(theme):
    found = colours(theme)
    for kind in "FBIWU":
        assert contrast(found[kind], found[f"on-{kind}"]) > 4.5, kind
    for text in ("ink", "soft", "cap", "given"):
        assert contrast(found[text], found["paper"]) > 4.5, text
