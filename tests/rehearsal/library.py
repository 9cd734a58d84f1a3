"""Library: the rehearsal device, compiled once for each version of its source and of torch.

As CUDA, or as a kind that torch does not know of itself: the environment's REHEARSAL_KIND names it.
Finds torch without importing it: the library has to be loaded before torch looks for CUDA.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE, CUDA = Path(__file__).parent, "cuda"
KIND = os.environ.get("REHEARSAL_KIND", CUDA)
_SOURCES = ("clocks.h", "memory.h", "ops.h", "device.cpp")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
_INTS = (
    "device",
    "stream",
    "new_stream",
    "new_event",
    "state",
    "live",
    "peak",
    "ops",
    "syncs",
    "beside",
)


def why_not() -> str:
    """Return why there is no rehearsal device here; empty where there is one, or can be."""
    if built_path().exists() or shutil.which("g++"):
        return ""
    return "no compiler: the rehearsal device needs g++ (apt-get install g++)"


def built_path(kind: str = KIND) -> Path:
    """Return where the library is kept: outside the tree, by all that it is made from."""
    digest = hashlib.sha256(" ".join((version("torch"), *_FLAGS)).encode())
    for name in _SOURCES:
        digest.update((HERE / name).read_bytes())
    return cache_folder() / f"{_key_of(kind)}-{digest.hexdigest()[:16]}.so"


def _key_of(kind: str) -> str:
    """Return what torch calls the device before it is given a name."""
    return CUDA if kind == CUDA else "privateuseone"


def cache_folder() -> Path:
    """Return the folder for libraries: REHEARSAL_CACHE, else this user's for all that is cached."""
    if given := os.environ.get("REHEARSAL_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-rehearsal"


def built(kind: str = KIND) -> Path:
    """Return the library, compiled if it is not there yet: 15 s of a processor."""
    path = built_path(kind)
    if path.exists():
        return path
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is installed"
    torch = Path(found.origin or "").parent
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # two may compile at once
        made = Path(folder) / path.name
        includes = (f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include")
        libraries = (f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib")
        named = ("-DAS_CUDA",) if kind == CUDA else ()
        source = (*named, str(HERE / "device.cpp"), "-o", str(made))
        subprocess.run(["g++", *_FLAGS, *source, *includes, *libraries], check=True)
        made.replace(path)
    return path


def loaded(devices: int, bytes_of_each: int) -> ctypes.CDLL:
    """Return the library in this process, with so many devices."""
    library = ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
    for name in (*_INTS, "pageable", "races", "is_behind", "pinned"):
        getattr(library, f"rehearsal_{name}").restype = ctypes.c_int64
    library.rehearsal_race.restype = ctypes.c_char_p
    whole, place = ctypes.c_int64, ctypes.c_void_p
    library.rehearsal_begin.argtypes = [ctypes.c_int, whole]
    for name in ("set_stream", "sync_event", "sync_stream", "sums_on", "settle_work", "settle"):
        getattr(library, f"rehearsal_{name}").argtypes = [whole]
    for name in ("record", "wait", "begin_work", "await", "is_behind"):
        getattr(library, f"rehearsal_{name}").argtypes = [whole, whole]
    library.rehearsal_end_work.argtypes = [whole, ctypes.c_char_p]
    library.rehearsal_pin.argtypes, library.rehearsal_unpin.argtypes = [place, whole], [place]
    library.rehearsal_record_stream.argtypes = [place, whole]
    library.rehearsal_use.argtypes = [place, ctypes.c_int, whole, ctypes.c_char_p]
    library.rehearsal_resize.argtypes = [place, whole]
    library.rehearsal_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
    library.rehearsal_state.argtypes = [ctypes.c_int, place, whole]
    library.rehearsal_set_state.argtypes = [ctypes.c_int, place, whole]
    library.rehearsal_begin(devices, bytes_of_each)
    return library
