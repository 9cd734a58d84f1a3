"""penstock doctor: what this machine has, and what is missing."""

import importlib.metadata
import multiprocessing
import os
import platform
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

import penstock
from penstock.cli import face
from penstock.cli.calibrate import calibrate
from penstock.cli.links import links
from penstock.cli.sums_beside import overlap
from penstock.cluster.machine import HERE, cpu_name, detect
from penstock.errors import ClusterError
from penstock.extras import has, hint_of
from penstock.files import cache_folder
from penstock.units import GiB, format_bytes

State = Literal["ok", "missing", "note"]  # without what is missing, nothing trains here
LIBRARIES = ("numpy", "typer", "rich", "safetensors", "fsspec", "msgspec")
EXTRAS = {  # what is done without a package, and the extra that brings it
    "numba": ("loops of a search run as Python", "fast"),
    "scipy": ("no exact schedules, no repeats of parts of a stage", "solvers"),
    "scikit-learn": ("no predictions by a regression on features", "solvers"),
}
_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 11)


class Finding(NamedTuple):
    """One thing that was checked: what it is, its state, and what to do about it."""

    what: str
    state: State
    value: str
    hint: str = ""


def doctor(
    measure_links: Annotated[
        bool, typer.Option("--links", help="Measure links instead; also under torchrun.")
    ] = False,
    calibrated: Annotated[
        bool, typer.Option("--calibrate", help="Measure ops and the link instead, for a minute.")
    ] = False,
    overlapped: Annotated[
        bool, typer.Option("--overlap", help="Measure sums beside computes instead.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write machines and links here (TOML).")] = None,
    region: Annotated[str | None, typer.Option(help="Region of this host.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what this machine has, and what is missing; or measure links, sums beside computes, or
    all that it reaches.

    Exits 1 if training cannot work here.

    Example: penstock doctor --links --out cluster.toml
    """
    if _measured((measure_links, calibrated, overlapped), out, region, as_json=as_json):
        return
    if out is not None or region is not None:
        name = "--out" if out is not None else "--region"
        raise ClusterError(f"{name} is for links", hint=f"add --links, or leave {name} out")
    with face.busy("looking at this machine"):
        findings = examine()
    fine = all(finding.state != "missing" for finding in findings)
    if as_json:
        face.show_json({"ok": fine, "findings": [dict(f._asdict()) for f in findings]})
    else:
        face.show(face.table(("", "", ""), [f[:3] for f in findings]).lstrip())
        hints = [f"{f.what}: {f.hint}" for f in findings if f.hint]
        face.show("\n".join(["", *hints, ""] if hints else [""]))
        face.show("Training works here." if fine else "Training cannot work here.")
    if not fine:
        raise typer.Exit(face.FAILED)


def _measured(
    asked: tuple[bool, bool, bool], out: Path | None, region: str | None, *, as_json: bool
) -> bool:
    """Measure links, all that this machine reaches, or sums beside computes, if that is asked for.

    Raises:   ClusterError: two of these at once.
    """
    measures_links, calibrated, overlapped = asked
    if measures_links and calibrated:
        raise ClusterError("--links and --calibrate", hint="--calibrate measures the link, too")
    if overlapped and (measures_links or calibrated):
        other = "--links" if measures_links else "--calibrate"
        raise ClusterError(f"--overlap and {other}", hint="measure one after the other")
    if not (measures_links or ((calibrated or overlapped) and region is None)):
        return False
    if out is not None:
        face.check_place(out)
    if measures_links:
        links(out, region or HERE, as_json=as_json)
    else:
        (calibrate if calibrated else overlap)(out, as_json=as_json)
    return True


def examine() -> list[Finding]:
    """Return the findings; whatever stops one check is its finding."""
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions,
        _torch,
        _machine,
        _energy,
        _compiler,
        _transports,
        _places,
    )
    findings: list[Finding] = []
    for look in looks:
        try:
            findings += look()
        except Exception as problem:  # noqa: BLE001 - a broken library must not hide the others
            value = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
            name = look.__name__.strip("_")
            findings.append(Finding(name, "missing", value, "install Penstock again: make setup"))
    return findings


def _versions() -> Iterator[Finding]:
    found = platform.python_version()
    old = sys.version_info < _OLDEST_PYTHON
    hint = "install Python 3.11 or later" if old else ""
    yield Finding("python", "missing" if old else "ok", f"{found} ({sys.executable})", hint)
    yield Finding("penstock", "ok", f"{penstock.__version__} ({Path(penstock.__file__).parent})")
    for name in LIBRARIES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed", f"pip install {name}")
    for name, (without, extra) in EXTRAS.items():
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "note", f"not installed: {without}", hint_of(extra))


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as problem:
        found = " ".join(str(problem).split()) or type(problem).__name__
        yield Finding("torch", "missing", found, "pip install torch (or: make setup)")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = version < _OLDEST_TORCH
    hint = "install torch 2.11 or later" if old else ""
    yield Finding("torch", "missing" if old else "ok", torch.__version__, hint)
    yield from _accelerators()


def _accelerators() -> Iterator[Finding]:
    from penstock.device import all_here, idle_kind, idle_words, why_none

    if not (found := all_here()):
        yield Finding("GPU", "note", f"none ({why_none()}): ranks compute on CPU cores")
    for device in found:
        size = format_bytes(device.total_bytes)
        yield Finding(f"GPU {device.index}", "ok", f"{device.name}, {size}")
    if found:
        words = "nothing of Penstock has run on a real GPU, only on pretend ones (docs/devices.md)"
        yield Finding("run on GPUs", "note", words, "bench/gpu/all.sh FOLDER says what works here")
    if words := idle_words():
        yield Finding(idle_kind(), "note", words)


def _machine() -> Iterator[Finding]:
    machine = detect()
    yield Finding("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Finding("processor", "ok", cpu_name())
    limited = f" of {os.cpu_count()}" if machine.cores != os.cpu_count() else ""
    hint = "with one core ranks take turns: several are slower than one"
    alone = machine.cores == 1
    yield Finding("cores", "note" if alone else "ok", f"{machine.cores}{limited}", alone * hint)
    little = machine.memory_bytes < 2 * GiB
    hint = "torch alone takes about 0.3 GiB in each rank" if little else ""
    size = format_bytes(machine.memory_bytes)
    yield Finding("memory", "note" if little else "ok", size, hint)


def _energy() -> Iterator[Finding]:
    if "torch" not in sys.modules:
        return
    from penstock.gauge.joules import meters, why_no_joules

    if found := meters():
        yield Finding("energy", "ok", f"joules of {', '.join(meter.name for meter in found)}")
    else:
        yield Finding("energy", "note", f"nothing tells: {why_no_joules()}")


def _compiler() -> Iterator[Finding]:
    if "torch" not in sys.modules:
        return
    from penstock.choose.fuse import no_compiler

    if why := no_compiler():
        hint = "install g++, or set CXX: a long run of small ops would be compiled, if that pays"
        yield Finding("compiler", "note", f"{why}: ops are run one by one", hint)
    else:
        yield Finding("compiler", "ok", "works: long runs are compiled where that pays")


def _transports() -> Iterator[Finding]:
    if "fork" in multiprocessing.get_all_start_methods():
        yield Finding("processes", "ok", "ranks are forked")
    else:
        hint = "use Linux, or start the ranks with torchrun"
        yield Finding("processes", "missing", f"{sys.platform} cannot fork", hint)
    if "torch" not in sys.modules:
        return
    import torch.distributed as dist

    from penstock.transport.shared_memory import available

    shared, why = available()
    hint = "messages take gloo instead, which costs several times more each"
    yield Finding(
        "shared memory", "ok" if shared else "note", why or "works", "" if shared else hint
    )
    gloo = dist.is_available() and dist.is_gloo_available()
    state: State = "ok" if gloo else "note" if shared else "missing"
    hint = "install a torch with torch.distributed and gloo"
    yield Finding("gloo", state, "works" if gloo else "not in this torch", "" if gloo else hint)
    nccl = dist.is_available() and dist.is_nccl_available()
    yield Finding(
        "NCCL", "ok" if nccl else "note", "there" if nccl else "not there (for GPUs only)"
    )


def _places() -> Iterator[Finding]:
    temporary = Path(tempfile.gettempdir())
    yield _place(
        "temporary files", temporary, "set TMPDIR to a folder where you can write", "missing"
    )
    cache = cache_folder("profiles")
    if cache is None:
        yield Finding("profiles", "note", "no home folder", "set XDG_CACHE_HOME to keep profiles")
    else:
        yield _place("profiles", cache, "set XDG_CACHE_HOME, or each run measures again", "note")
    if has("numba"):
        yield _numba()


def _place(what: str, folder: Path, hint: str, otherwise: State) -> Finding:
    try:
        face.check_place(folder / uuid.uuid4().hex)
    except OSError as problem:
        return Finding(what, otherwise, f"{folder}: {problem.strerror}", hint)
    return Finding(what, "ok", str(folder))


def _numba() -> Finding:
    """Return where compiled loops are kept: beside the source, or in the user's cache."""
    from penstock.schedule import clock

    kept = Path(clock.__file__).parent / "__pycache__"
    given = os.environ.get("NUMBA_CACHE_DIR")
    place = Path(given) if given else kept
    count = sum(1 for _ in place.rglob("*.nbi")) if place.is_dir() else 0
    found = _place(
        "compiled loops", place, "they are compiled each time: set NUMBA_CACHE_DIR", "note"
    )
    full = f"{found.value}, {count} kept" if found.state == "ok" else found.value
    return found._replace(value=full)
