"""CUDA: torch.cuda over the rehearsal device.  Import it before torch, whose hooks are read once.

Where the environment's REHEARSAL_KIND is another word than cuda, the device is of that kind, as a
vendor's own package would have it (torch's PrivateUse1), and torch.cuda stays as it is.
REHEARSAL_GPUS says how many there are, REHEARSAL_BYTES how many bytes each has.  As with torch's, a
process that has asked for a GPU, were it only whether there is one, has forks that cannot use it.
"""

import os
import sys
import types
from typing import Any

from tests.rehearsal.library import CUDA, KIND, loaded

assert "torch" not in sys.modules, "torch looks for CUDA when it is imported"
COUNT = int(os.environ.get("REHEARSAL_GPUS", "1"))
TOTAL_BYTES = int(os.environ.get("REHEARSAL_BYTES", str(8 << 30)))
library = loaded(COUNT, TOTAL_BYTES)

import torch  # noqa: E402
from torch import cuda  # noqa: E402

_STATE_BYTES = 1 << 14  # more than a generator's state takes
NAME = "Rehearsal GPU"


class _Look:
    """Whether this process has looked at CUDA, and whether one has that it was forked from."""

    has_looked = is_started = is_bad = False

    def forked(self) -> None:
        self.is_bad, self.is_started = self.has_looked, False


look = _Look()
os.register_at_fork(after_in_child=look.forked)


def start() -> None:
    """Begin to use the devices.

    Raises:   RuntimeError: in a fork of a process that has looked at them, in torch's words.
    """
    if look.is_bad:
        way = "To use CUDA with multiprocessing, you must use the 'spawn' start method"
        raise RuntimeError(f"Cannot re-initialize CUDA in forked subprocess. {way}")
    look.has_looked = look.is_started = True


def index_of(device: Any = None) -> int:
    """Return the number of a device however it is named; None: of the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return library.rehearsal_device() if index is None else index


def _count() -> int:
    look.has_looked = True
    return 0 if look.is_bad else COUNT


# -- streams and events ---------------------------------------------------------------------------


class Event:
    """An event of one stream; times are the host's, for ops run at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.id, self.at_s = library.rehearsal_new_event(), 0.0

    def record(self, stream: "Stream | None" = None) -> None:
        import time

        self.at_s = time.perf_counter()
        library.rehearsal_record(self.id, (stream or current_stream()).id)

    def wait(self, stream: "Stream | None" = None) -> None:
        library.rehearsal_wait(self.id, (stream or current_stream()).id)

    def synchronize(self) -> None:
        library.rehearsal_sync_event(self.id)

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.at_s - self.at_s)


class Stream:
    """A stream of one device: the library's number of it is also what its key begins with."""

    def __init__(self, device: Any = None, priority: int = 0, id: int | None = None) -> None:
        start()
        self.id = library.rehearsal_new_stream(index_of(device)) if id is None else id
        self.device_index, self.stream_id, self.device_type = self.id >> 32, self.id & 0xFFFFFFFF, 1
        self.device = torch.device(KIND, self.device_index)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        library.rehearsal_sync_stream(self.id)

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        self.before = current_stream(self.device)
        library.rehearsal_set_stream(self.id)
        return self

    def __exit__(self, *problem: object) -> None:
        library.rehearsal_set_stream(self.before.id)


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of a device."""
    return Stream(id=library.rehearsal_stream(index_of(device)))


class use_stream:  # noqa: N801 - torch's `cuda.stream`
    """While active, a stream is the current one of its device."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *problem: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


# -- memory and generators ------------------------------------------------------------------------


def _free(device: Any = None) -> tuple[int, int]:
    start()
    return TOTAL_BYTES - library.rehearsal_live(index_of(device)), TOTAL_BYTES


def _limit(part: float, device: Any = None) -> None:
    library.rehearsal_begin(COUNT, int(part * TOTAL_BYTES))


def _properties(device: Any = None) -> types.SimpleNamespace:
    about = {
        "name": NAME,
        "total_memory": TOTAL_BYTES,
        "L2_cache_size": 1 << 20,
    }  # swept by the host
    return types.SimpleNamespace(**about, major=9, minor=0, multi_processor_count=132)


def _state(device: Any = KIND) -> torch.Tensor:
    place = torch.empty(_STATE_BYTES, dtype=torch.uint8)
    size = library.rehearsal_state(index_of(device), place.data_ptr(), _STATE_BYTES)
    assert size <= _STATE_BYTES, "there is room for a generator's state"
    return place[:size].clone()


def _set_state(state: torch.Tensor, device: Any = KIND) -> None:
    own = state.contiguous()
    library.rehearsal_set_state(index_of(device), own.data_ptr(), own.numel())


def _seed_all(seed: int) -> None:
    for device in range(COUNT):
        library.rehearsal_seed(device, seed % (1 << 64))


def _current() -> int:
    start()
    return library.rehearsal_device()


def _synchronize(device: Any = None) -> None:
    start()
    library.rehearsal_sync_device(index_of(device))


def _resized(storage: Any, size: int) -> Any:
    if storage.device.type != KIND:
        return _resize_of_torch(storage, size)
    library.rehearsal_settle(current_stream(storage.device).id)  # messages know only the place
    library.rehearsal_resize(storage._cdata, size)
    return storage


class _Runtime:
    """What is asked of CUDA's own library."""

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:  # noqa: N802 - its name
        library.rehearsal_pin(place, size)
        return 0

    def cudaHostUnregister(self, place: int) -> int:  # noqa: N802 - its name
        library.rehearsal_unpin(place)
        return 0


_resize_of_torch = torch.UntypedStorage.resize_
torch.UntypedStorage.resize_ = _resized  # type: ignore[method-assign]
torch.Tensor.record_stream = lambda tensor, stream: library.rehearsal_record_stream(  # type: ignore
    tensor.untyped_storage().data_ptr(), stream.id
)

_OURS: dict[str, Any] = {
    "is_available": lambda: _count() > 0,
    "device_count": _count,
    "is_initialized": lambda: look.is_started,
    "_lazy_init": start,
    "init": start,
    "_is_in_bad_fork": lambda: look.is_bad,
    "current_device": _current,
    "set_device": lambda device: (start(), library.rehearsal_enter(index_of(device))),
    "get_device_name": lambda device=None: NAME,
    "get_device_properties": _properties,
    "cudart": _Runtime,
    "can_device_access_peer": lambda one, other: True,
    "get_device_capability": lambda device=None: (9, 0),
    "mem_get_info": _free,
    "synchronize": _synchronize,
    "memory_allocated": lambda device=None: library.rehearsal_live(index_of(device)),
    "max_memory_allocated": lambda device=None: library.rehearsal_peak(index_of(device)),
    "reset_peak_memory_stats": lambda device=None: library.rehearsal_reset_peak(index_of(device)),
    "set_per_process_memory_fraction": _limit,
    "empty_cache": lambda: None,
    "Event": Event,
    "Stream": Stream,
    "current_stream": current_stream,
    "default_stream": lambda device=None: Stream(id=index_of(device) << 32),
    "stream": use_stream,
    "manual_seed": lambda seed: library.rehearsal_seed(index_of(), seed % (1 << 64)),
    "manual_seed_all": _seed_all,
    "get_rng_state": _state,
    "set_rng_state": _set_state,
    "get_rng_state_all": lambda: [_state(device) for device in range(COUNT)],
    "set_rng_state_all": lambda all: [_set_state(state, at) for at, state in enumerate(all)],
}
_ONLY_OF_CUDA = ("cudart", "can_device_access_peer", "get_device_capability")


def _module() -> Any:
    """Return torch's module of the kind: CUDA's own, or one as a vendor's package brings it."""
    if KIND == CUDA:
        return cuda
    made, backends = types.ModuleType(f"torch.{KIND}"), torch.utils.backend_registration
    backends.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, made)
    backends.generate_methods_for_privateuse1_backend()
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore
    return made


_target = _module()
for _name, _own in _OURS.items():
    if KIND == CUDA or _name not in _ONLY_OF_CUDA:
        setattr(_target, _name, _own)
