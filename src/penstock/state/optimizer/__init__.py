"""Optimizer: the job's own, divided over stages and ranks."""
