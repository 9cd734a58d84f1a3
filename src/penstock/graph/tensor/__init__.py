"""Tensor: a traced step divided among ranks inside its ops, as in tensor parallelism."""
