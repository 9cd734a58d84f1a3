"""Penstock: plan, predict and run the training of an unmodified PyTorch model."""

from penstock.job import Job, load_job

__all__ = ["Job", "load_job"]
