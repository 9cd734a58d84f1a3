"""Transports: one interface, four ways for ranks to exchange tensors.

threads.py            many ranks in one process, nothing copied
shared_memory.py      processes of one host
torch_distributed.py  gloo or NCCL, any hosts

Each is imported from its own file: a run needs one of them.
"""

from penstock.transport.transport import TensorSpec, Transport, TransportError

__all__ = ["TensorSpec", "Transport", "TransportError"]
