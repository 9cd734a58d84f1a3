"""Store: profiles kept in a folder, so that nothing is measured twice and a stale one is noticed.

A profile is found again by what it describes: the graph, the optimizer and the ranks beside.  It is
stale if another device or other versions made it.  A folder that cannot be used costs the time
of measuring, never the run.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cluster.cluster import Cluster, DeviceKind, Link
from penstock.cluster.machine import cpu_name
from penstock.errors import ClusterError, ProfileError
from penstock.files import read_json, write_text
from penstock.profile.latency import TimedSegment
from penstock.profile.profile import Profile
from penstock.profile.roofline import DEFAULT
from penstock.profile.sampled import StepFiles, step_files
from penstock.typed import damage, typed

if TYPE_CHECKING:
    from penstock.graph.trace import Capture
    from penstock.job import Job

log = logging.getLogger(__name__)

_MOST_SAMPLES = 256  # of a kind of device
_FORMAT = 3  # one more where other things are measured than before


class ProfileKey(NamedTuple):
    """The step, device and versions that a profile must be of.

    optimizer:  its class and settings as text; the graph does not know it.
    """

    graph: str
    optimizer: str
    beside: int
    device: str
    versions: str

    def path_in(self, folder: Path) -> Path:
        """Return the file of such a profile, of any device and versions."""
        optimizer = hashlib.sha256(self.optimizer.encode()).hexdigest()[:8]
        return folder / f"{self.graph}-{optimizer}-{self.beside}.json"


def find(folder: Path, wanted: ProfileKey) -> Profile | None:
    """Return the profile that was kept; None, with a warning if it is stale or damaged."""
    path = wanted.path_in(folder)
    try:
        if not path.exists():
            return None
        found = Profile.load(path)
    except (ProfileError, OSError) as problem:
        log.warning("the kept profile cannot be used, so it is measured again: %s", problem)
        return None
    basis = found.basis
    made_by, wanted_by = (basis.device, basis.versions), (wanted.device, wanted.versions)
    if (found.graph, basis.beside) != (wanted.graph, wanted.beside) or made_by != wanted_by:
        old, new = (", ".join(parts) for parts in (made_by, wanted_by))
        log.warning("the profile kept in %s is of %s, not of %s: measured again", path, old, new)
        return None
    return found


def keep(folder: Path, wanted: ProfileKey, profile: Profile) -> None:
    """Write `profile` where `find` looks; where that fails, only warn."""
    try:
        profile.save(wanted.path_in(folder))
    except OSError as problem:
        log.warning("the profile could not be kept in %s: %s", folder, problem)


def samples_of(folder: Path | None, device: DeviceKind) -> tuple[TimedSegment, ...]:
    """Return the samples of runs on devices of this kind, oldest first; none without a folder.

    Those of a kind of the same name with other peaks do not count.
    """
    if folder is None or not (path := _samples_path(folder, device)).exists():
        return ()
    try:
        content = read_json(path, ProfileError, "samples")
        with damage(f"samples {path}", ProfileError, hint="delete it"):
            return typed(tuple[TimedSegment, ...], content.get("samples"))
    except (ProfileError, OSError) as problem:
        log.warning("what runs have told of %s cannot be used: %s", device.name, problem)
        return ()


def keep_samples(folder: Path, device: DeviceKind, samples: Sequence[TimedSegment]) -> None:
    """Add what a run has told of devices of a kind; the newest are kept.  Failing, only warn."""
    rows = (*samples_of(folder, device), *samples)[-_MOST_SAMPLES:]
    content = {"penstock": "samples", "device": device.name, "samples": list(map(asdict, rows))}
    try:
        write_text(_samples_path(folder, device), json.dumps(content))
    except OSError as problem:
        log.warning("what the run told of %s could not be kept: %s", device.name, problem)


def _samples_path(folder: Path, device: DeviceKind) -> Path:
    """Return the file of a kind of device with these peaks, and of this way to estimate."""
    peaks = device.name, device.flop_per_s, device.memory_bytes_per_s, DEFAULT
    return folder / f"samples-{hashlib.sha256(repr(peaks).encode()).hexdigest()[:16]}.json"


def link_of(folder: Path | None, measure: Callable[[], Link], tell: Callable[[Path], None]) -> Link:
    """Return the link between two ranks of this host: the one kept in `folder`, or a new one.

    tell:     called with the file of a kept one.
    """
    known = kept_link(folder, tell)
    return keep_link(folder, measure()) if known is None else known


def kept_link(folder: Path | None, tell: Callable[[Path], None]) -> Link | None:
    """Return the link that was kept in `folder`; None: there is none that can be used."""
    if folder is None:
        return None
    path = _link_path(folder)
    try:
        found = Cluster.load(path).inside if path.exists() else None
    except ClusterError as problem:
        log.warning("the kept link cannot be used, so it is measured again: %s", problem)
        return None
    if found is not None:
        tell(path)
    return found


def keep_link(folder: Path | None, link: Link) -> Link:
    """Keep a link that was measured in `folder`; return it."""
    if folder is not None:
        try:
            replace(Cluster.here(2), inside=link).save(_link_path(folder))
        except OSError as problem:
            log.warning("the link could not be kept in %s: %s", folder, problem)
    return link


def _link_path(folder: Path) -> Path:
    return folder / f"link-{hashlib.sha256(' '.join(_here()).encode()).hexdigest()[:16]}.toml"


def measured(
    capture: "Capture",
    job: "Job",
    *,
    beside: int,
    folder: Path | None = None,
    tell: Callable[[Path], None] = lambda path: None,
    apart: Callable[[Callable[[], Any]], Any] = lambda call: call(),
) -> Profile:
    """Return the profile of `capture` on this machine: the one kept in `folder`, or a new one.

    tell:     called with the file of a kept one.
    apart:    as in `measure`.
    Raises:   what `measure` raises.
    """
    from penstock.profile.measure import measure

    wanted = ProfileKey(capture.graph.digest, optimizer_text(capture, job), beside, *_here())
    found = None if folder is None else find(folder, wanted)
    if found is not None and folder is not None:
        tell(wanted.path_in(folder))
        return found
    profile = measure(capture, job, beside=beside, apart=apart)
    basis = replace(profile.basis, device=wanted.device, versions=wanted.versions)
    profile = replace(profile, basis=basis)
    if folder is not None:
        keep(folder, wanted, profile)
    return profile


def keep_fused(folder: Path, capture: "Capture", job: "Job", profile: Profile) -> None:
    """Keep with the profile that `measured` gave the segments that were compiled since.

    Its seconds stay those that were measured, whatever runs have told of them since.
    """
    made_by = _here()
    wanted = ProfileKey(profile.graph, optimizer_text(capture, job), profile.basis.beside, *made_by)
    if profile.basis.steps:
        kept = find(folder, wanted)
        if kept is None:
            return
        profile = replace(kept, fused=profile.fused)
    basis = replace(profile.basis, device=made_by[0], versions=made_by[1])
    keep(folder, wanted, replace(profile, kind="", basis=basis))


def files_of_step(
    folder: Path | None, capture: "Capture", job: "Job", beside: int
) -> StepFiles | None:
    """Return the files of a step's samples from runs (sampled.py).

    job:      its micro-batches joined as in `capture`, or not.
    """
    if folder is None:
        return None
    samples = capture.graph.samples * job.micro_batches
    return step_files(folder, capture.graph, samples, optimizer_text(capture, job), beside)


def optimizer_text(capture: "Capture", job: "Job") -> str:
    """Return class and settings of the job's optimizer, without the rate, which costs no time.

    And whether it clips, and packs messages.
    """
    from penstock.graph.whole_optimizer import whole_optimizer

    optimizer = whole_optimizer(job, capture.model).optimizer
    settings = {key: value for key, value in optimizer.defaults.items() if key != "lr"}
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    clips = "" if job.clip_norm is None else ", clips"
    packs = "" if job.wire_bits is None else f", packs {job.fewest_bits}"
    return f"{name} {sorted(settings.items())}{clips}{packs}"


def _here() -> tuple[str, str]:
    """Return the device on which `measure` runs here, and the versions of what runs it."""
    torch = sys.modules["torch"]  # whoever has a capture has imported it
    from penstock.device import here

    device = cpu_name() if here().is_cpu else here().name
    try:
        own = version("penstock")
    except PackageNotFoundError:  # run from its source
        own = "of the source"
    return device, f"torch {torch.__version__}, penstock {own}, format {_FORMAT}"
