"""Processes: those that this one forks, what they inherit, and that none outlives it."""
