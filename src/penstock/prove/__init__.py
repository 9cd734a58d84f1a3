"""Prove: real steps compared with the plain loop, before a run and all through it."""
