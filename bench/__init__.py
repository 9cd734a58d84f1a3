"""Measurements behind docs/figures.md and the other pages: `python -m bench.NAME [--json]`."""
