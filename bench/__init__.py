"""Measurements behind the figures of the README and docs: `python -m bench.NAME [--json]`."""
