"""Device: what a process computes on.  The one file that knows what kind of accelerator there is.

An accelerator queues what it is told to do, so that a call's return says nothing of its end; it
copies beside its computing; it is looked at by a process that no fork of it can use it after; ranks
on it have a process each, which enters its own before all else.  What else of it is needed stands
here, filled by torch's module of its kind; another kind needs a row in KINDS.
"""

import importlib
import mmap
import os
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

KINDS = ("cuda",)  # on which Penstock computes; what else there is stays idle (`idle_kind`)
CPU = "cpu"
_MOST_OF_PCIE = 64e9  # bytes/s one way of 16 lanes of its fifth generation
_GAPS = 0.03  # of an accelerator's memory, which lie between blocks or hold messages
_PROBED = 64  # rows of a product that makes the library of products take what it needs


_fork_rng: Any = torch.random.fork_rng  # pyright: ignore


class QueuedMark(NamedTuple):
    """A moment of what is queued on an accelerator, and when the host queued it."""

    event: Any
    queued_s: float


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this host; `index` is the CPU's 0 or the number of an accelerator."""

    kind: str
    index: int = 0

    @property
    def place(self) -> torch.device:
        """Return it as torch names it."""
        return torch.device(CPU) if self.is_cpu else torch.device(self.kind, self.index)

    @property
    def is_cpu(self) -> bool:
        """Return whether it is the host itself: memory, files and other processes are at hand."""
        return self.kind == CPU

    @property
    def is_queued(self) -> bool:
        """Return whether ops are queued: seconds between two calls say nothing of them."""
        return not self.is_cpu

    @property
    def has_copy_engine(self) -> bool:
        """Return whether copies to the host go on beside its computing, on a stream."""
        return not self.is_cpu

    @property
    def can_fork(self) -> bool:
        """Return whether a forked process can compute on it.

        Not on an accelerator: who asks whether there is one has used it already, for forks.
        """
        return self.is_cpu

    @property
    def backend(self) -> str:
        """Return torch's name of what carries messages between ranks on it."""
        return dist.get_default_backend_for_device(self.kind)

    @property
    def name(self) -> str:
        """Return the accelerator's own name; that of a CPU is in `cluster/machine.py`."""
        return CPU if self.is_cpu else self._of_kind.get_device_name(self.index)

    @property
    def total_bytes(self) -> int:
        """Return the memory of an accelerator."""
        return self._of_kind.get_device_properties(self.index).total_memory

    @property
    def usable_bytes(self) -> int:
        """Return how much of an accelerator's memory a plan may count on.

        What its context and the workspace of a product take, and other processes, is measured once,
        on the accelerator of this process; gaps between blocks are a guess of 3 %.
        """
        total = self.total_bytes
        usable = max(0, total - _taken_bytes(here()) - int(_GAPS * total))
        return min([usable, *_limits])

    def beside_bytes(self, held_bytes: int) -> int:
        """Return how much of an accelerator another process may hold beside one that holds so much.

        It takes as much again for its context and its libraries.
        """
        return max(0, self.usable_bytes - held_bytes - _taken_bytes(here()))

    def limit(self, size_bytes: int) -> None:
        """Let tensors of this process hold no more of it: then they are out of memory."""
        _limits[:] = [size_bytes]
        part = min(1.0, size_bytes / self.total_bytes)
        self._of_kind.set_per_process_memory_fraction(part, self.index)

    @property
    def free_bytes(self) -> int:
        """Return how much of an accelerator's memory nobody holds."""
        return self._of_kind.mem_get_info(self.index)[0]

    def joules(self) -> float | None:
        """Return what an accelerator has taken since its driver was loaded.

        None where its library (nvidia-ml-py) is not installed, or it does not tell, as a slice of
        one does not.
        """
        nvml = None if self.is_cpu else _nvml()
        if nvml is None:
            return None
        uuid = getattr(self._of_kind.get_device_properties(self.index), "uuid", None)
        try:
            board = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return 1e-3 * nvml.nvmlDeviceGetTotalEnergyConsumption(board)
        except nvml.NVMLError:
            return None

    @property
    def _of_kind(self) -> Any:
        return torch.get_device_module(self.kind)

    def enter(self) -> None:
        """Make it the one that is meant where none is named; first of all in a rank's thread."""
        if not self.is_cpu:
            self._of_kind.set_device(self.index)

    def synchronize(self) -> None:
        """Return once all is done that was queued."""
        if self.is_queued:
            self._of_kind.synchronize(self.index)

    def taken(self, given: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor that is elsewhere; whoever has given it may write into it.

        From the host to an accelerator it is queued, from pinned memory of its own, and the host
        does not wait.
        """
        is_plain = type(given) is torch.Tensor and given.layout == torch.strided
        if not (given.is_cpu and self.is_queued and is_plain):
            return given.to(self.place)
        pinned = torch.empty_like(given, pin_memory=True).copy_(given)
        return pinned.to(self.place, non_blocking=True)

    def read(self, numbers: torch.Tensor) -> list[float]:
        """Return the numbers of a vector of this device; the host waits for them, once."""
        return [float(number) for number in self.on_host(numbers).unbind()]

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this device as one of the host, which waits for it, once."""
        if not self.is_queued:
            return tensor
        found = torch.empty_like(tensor, device=CPU, pin_memory=True)
        found.copy_(tensor, non_blocking=True)
        self.current_stream().synchronize()
        return found

    # -- a clock ----------------------------------------------------------------------------------

    def mark(self) -> Any:
        """Return this moment of what is done here: of the clock, or of the current stream."""
        if not self.is_queued:
            return time.perf_counter()
        event = self._of_kind.Event(enable_timing=True)
        event.record()
        return QueuedMark(event, time.perf_counter())

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds from one mark to a later one; the host waits for that.

        Where events of a kind tell no time, those between the moments at which both were queued.
        """
        if not self.is_queued:
            return end - start
        end.event.synchronize()
        if not hasattr(end.event, "elapsed_time"):
            return end.queued_s - start.queued_s
        return 1e-3 * start.event.elapsed_time(end.event)

    @property
    def cache_bytes(self) -> int:
        """Return the cache that an accelerator's kernels share; 0 where nobody says."""
        about = None if self.is_cpu else self._of_kind.get_device_properties(self.index)
        return int(getattr(about, "L2_cache_size", 0))

    def way_to(self, other: "Device", bytes_per_s: float) -> str:
        """Return in words what connects two accelerators, as what was measured lets guess."""
        asks = getattr(self._of_kind, "can_device_access_peer", None)
        if asks is None or not asks(self.index, other.index):
            return "through the host's memory"
        return "NVLink or the like" if bytes_per_s > _MOST_OF_PCIE else "PCIe, from peer to peer"

    # -- streams of an accelerator --------------------------------------------------------------

    def stream(self) -> Any:
        """Return a new stream."""
        return self._of_kind.Stream(self.index)

    def event(self) -> Any:
        """Return a new event."""
        return self._of_kind.Event()

    def current_stream(self) -> Any:
        """Return the stream on which calls are queued."""
        return self._of_kind.current_stream(self.index)

    def queueing_on(self, stream: Any) -> AbstractContextManager[Any]:
        """While active, calls are queued on `stream`."""
        return self._of_kind.stream(stream)

    def used_on(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a tensor that another stream has made until `stream` is done with it.

        That is: with all that is queued on it when the tensor is dropped.
        """
        tensor.record_stream(stream)

    # -- memory -----------------------------------------------------------------------------------

    def pin(self, memory: torch.Tensor) -> Callable[[], None] | None:
        """Fix memory of the host in its place, so that copies of it go on beside computing.

        Return what lets go of it once no copy is under way; None where it cannot be fixed.
        """
        asked = getattr(self._of_kind, "cudart", None)
        runtime: Any = None if asked is None else asked()
        size_bytes, place = memory.nbytes, memory.data_ptr()
        if runtime is None or not size_bytes or int(runtime.cudaHostRegister(place, size_bytes, 0)):
            return None

        def let_go() -> None:
            self.synchronize()
            runtime.cudaHostUnregister(place)

        return let_go

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Return memory of the host, uint8 [size], that is fixed in its place.

        torch's own takes the next power of two.
        """
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        let_go = self.pin(whole)
        if let_go is None:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        weakref.finalize(memory, let_go).atexit = False
        return whole

    def reset_peak(self) -> int:
        """Begin to watch an accelerator's memory; return the bytes that are held."""
        self._of_kind.reset_peak_memory_stats(self.index)
        return self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Return the bytes that this process's tensors hold of an accelerator."""
        return self._of_kind.memory_allocated(self.index)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes held since `reset_peak`."""
        return self._of_kind.max_memory_allocated(self.index)

    # -- chance -----------------------------------------------------------------------------------

    def seed(self, value: int) -> None:
        """Seed the accelerator's own generator; a CPU's is torch's default one."""
        if not self.is_cpu:
            self._of_kind.manual_seed(value)

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the accelerator's own generator; None on a CPU."""
        return None if self.is_cpu else self._of_kind.get_rng_state(self.index)

    def set_random_state(self, state: torch.Tensor | None) -> None:
        """Put back what `random_state` gave."""
        if state is not None:
            self._of_kind.set_rng_state(state, self.index)

    def random_kept(self) -> AbstractContextManager[None]:
        """While active, whatever is drawn moves no generator of this process for good."""
        return _fork_rng([]) if self.is_cpu else _fork_rng([self.index], device_type=self.kind)


_limits: list[int] = []  # of what this process's tensors may hold of its accelerator, if any
_HOST = Device(CPU)  # asked for at every op that draws


@cache
def _nvml() -> Any:
    """Return the library that asks NVIDIA's boards, ready for use; None where it cannot be used."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver
        return None
    return nvml


@cache
def _kind() -> str:
    """Return the kind of device on which this process and its children compute."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type not in KINDS:
        return CPU
    return found.type if torch.get_device_module(found.type).is_available() else CPU


def here() -> Device:
    """Return the device of this process: the accelerator of its local rank, or the CPU."""
    kind = _kind()
    return _HOST if kind == CPU else Device(kind, int(os.environ.get("LOCAL_RANK", "0")))


@cache
def _taken_bytes(device: Device) -> int:
    """Return what is taken of an accelerator's memory beside the tensors of this process."""
    held = device._of_kind.memory_allocated(device.index)  # pyright: ignore[reportPrivateUsage]
    probe = torch.ones(_PROBED, _PROBED, device=device.place)
    torch.mm(probe, probe)
    del probe
    device.synchronize()
    return max(0, device.total_bytes - device.free_bytes - held)


def of(place: torch.device) -> Device:
    """Return the device on which a tensor is."""
    return Device(place.type, place.index or 0)


def all_here() -> tuple[Device, ...]:
    """Return the accelerators of this host that this process may use."""
    kind = _kind()
    count = 0 if kind == CPU else torch.get_device_module(kind).device_count()
    return tuple(Device(kind, index) for index in range(count))


def idle_kind() -> str:
    """Return the kind of an accelerator that is here and that Penstock does not use; else ""."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None or found.type in KINDS else found.type


def idle_words() -> str:
    """Return in words that an accelerator is here and stays idle; else ""."""
    kind = idle_kind()
    words = f"there is an accelerator of kind {kind}, on which Penstock does not compute"
    return f"{words}: ranks compute on CPU cores" if kind else ""


def why_none() -> str:
    """Return why there is no accelerator."""
    return "built for CPU" if torch.version.cuda is None else "no driver or no device"
