"""Examine: what a job is found to be, before it is planned."""
