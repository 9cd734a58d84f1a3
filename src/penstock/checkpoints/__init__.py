"""Checkpoints: the state of a run as files, written beside it, whole or not at all."""
