"""Penstock: plan, predict and run the training of an unmodified PyTorch model."""
