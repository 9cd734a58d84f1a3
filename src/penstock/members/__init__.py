"""Elastic: a run whose ranks may die, hang, leave and join: it goes on without losing a step."""
