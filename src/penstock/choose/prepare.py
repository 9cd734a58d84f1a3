"""Prepare: from a job to all that a search or a simulation is given."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cluster.cluster import Cluster
from penstock.errors import ClusterError
from penstock.job import Job
from penstock.listener import Listener
from penstock.rules.rule import Rule
from penstock.rules.ruled import slices_asked
from penstock.schedule.grid import InnerAxis
from penstock.taken import Taken

if TYPE_CHECKING:
    from penstock.choose.loading import Loaded
    from penstock.graph.trace import Capture
    from penstock.profile.profile import Profile

Slices = Sequence[tuple[str, int]]  # (name, slices) of parameters


def loaded(
    text: str, rules: Sequence[Rule], listener: Listener, sums: str | None = None
) -> "Loaded":
    """Return the job that `text` names, as written and with modules replaced by rules, verified.

    sums:     in place of the job's, if any.
    Raises:   JobError: there is no such job; a module is replaced by one that computes another.
    """
    from penstock.choose import loading

    found = loading.loaded(text, loading.JobTerms(rules=tuple(rules), sums=sums or ""))
    loading.check_replaced(found, rules, listener)
    return found


def traced(
    job: Job, listener: Listener, slices: Slices = (), *, rules: Sequence[Rule] = ()
) -> "Capture":
    """Return the job's step, traced, with parameters in slices: by name, or as rules say.

    Raises:   GraphError: it cannot be traced, or not cut so.  PlanError: a rule matches nothing.
    """
    import torch

    from penstock.examine.late_values import LateValues
    from penstock.graph.split import split
    from penstock.graph.trace import capture

    torch.set_num_threads(1)  # a rank has one core
    with listener.busy("tracing the step"):
        found = capture(job)
        found = replace(found, late=LateValues(job, found.model))
        return split(found, dict(slices) or slices_asked(rules, found.graph))


def joined_step(
    job: Job,
    captured: "Capture",
    count: Taken,
    slices: Slices,
    listener: Listener,
    axis: InnerAxis = InnerAxis(),  # noqa: B008 - a frozen record
) -> "tuple[Job, Capture]":
    """Return the job with so many micro-batches joined into one, and its step made of `captured`.

    captured: the step of one micro-batch; it is traced again if it has other slices.
    count:    below 1, each micro-batch is divided among so many.
    slices:   of the parameters of the joined step.
    axis:     ranks that divide its ops, or its tokens.
    Raises:   GraphError: they cannot be joined or divided, or the step not be cut so.
    """
    from penstock.graph.joined.divided_batch import divided
    from penstock.graph.joined.joined import joined
    from penstock.graph.merge import merged
    from penstock.graph.split import split

    own = captured.graph.tensor, captured.graph.context
    if axis.ranks > 1 and axis != own:
        job, made = joined_step(job, captured, count, slices, listener)
        return job, divided_step(made, axis, listener)
    if count == 1 and tuple(slices) == captured.graph.slices and axis == own:
        return job, captured
    is_changed = captured.graph.slices or captured.graph.tensor > 1
    whole = traced(job, listener) if is_changed else captured
    if count < 1:
        with listener.busy(f"dividing micro-batches by {1 / count}"):
            made = split(divided(whole, int(1 / count)), dict(slices))
            return merged(job, count, made.batch.division), made
    with listener.busy(f"joining {count} micro-batches"):
        return merged(job, count), split(joined(whole, int(count)), dict(slices))


def divided_step(captured: "Capture", axis: InnerAxis, listener: Listener) -> "Capture":
    """Return the step whose ops, or tokens, so many ranks divide.

    Raises:   GraphError: none of them can be.
    """
    from penstock.graph.tensor.by_tokens import by_tokens
    from penstock.graph.tensor.choose_slices import by_tensor

    ranks = axis.ranks
    if ranks == 1 or axis == (captured.graph.tensor, captured.graph.context):
        return captured
    if axis.context:
        with listener.busy(f"dividing tokens among {ranks} ranks"):
            return by_tokens(captured, ranks)
    with listener.busy(f"dividing the ops among {ranks} ranks"):
        return by_tensor(captured, ranks)


def machines(path: Path | None, ranks: int | None, listener: Listener) -> Cluster:
    """Return the cluster in `path`; without one this machine, its link measured.

    Between accelerators it is what the first run on several of them has measured.

    Raises:   ClusterError: damaged, or fewer ranks than asked for.
    """
    if path is not None:
        cluster = Cluster.load(path)
        if ranks is not None and ranks > cluster.num_ranks:
            hint = f"take at most {cluster.num_ranks}, or describe more hosts"
            raise ClusterError(f"{ranks} ranks of a cluster of {cluster.num_ranks}", hint=hint)
        return cluster
    cluster = Cluster.here(ranks)
    if cluster.num_ranks < 2:
        return cluster
    from penstock.device import here
    from penstock.files import cache_folder
    from penstock.gauge.links import measure_link
    from penstock.profile.kept_profiles import kept_link, link_of

    folder, tell = cache_folder("profiles"), partial(tell_day, "link", listener)
    if not here().can_fork:
        link = kept_link(folder, tell)
        if link is None:
            words = "the link between accelerators is assumed, as no run on several has measured it"
            listener.say(f"{words}: `penstock doctor --links` does")
            return cluster
        return replace(cluster, inside=link)
    with listener.busy("measuring the link between two ranks"):
        return replace(cluster, inside=link_of(folder, measure_link, tell))


def tell_day(what: str, listener: Listener, path: Path) -> None:
    """Say on which day a kept measurement was made."""
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    listener.say(f"{what} measured on {day} (delete {path} to measure again)")


def started_on(given: Cluster | Path | str) -> Cluster:
    """Return the cluster, which must be this host, or the hosts that torchrun runs on.

    given:    the cluster, or the file that describes it.
    Raises:   ClusterError: damaged; other hosts than these, or with other numbers of ranks.
    """
    from penstock.processes.started import under_torchrun

    cluster = given if isinstance(given, Cluster) else Cluster.load(given)
    path = "the cluster" if isinstance(given, Cluster) else given
    if not under_torchrun():
        if len(cluster.hosts) == 1:
            return cluster
        hint = "start it with torchrun on each of them; `penstock plan --cluster` only plans"
        raise ClusterError(f"{path} has {len(cluster.hosts)} hosts; here is one", hint=hint)
    hint = "start as many ranks on each host as it has devices, host by host in the file's order"
    rank, local, own, world = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    )
    if cluster.num_ranks != world:
        message = f"{path} has {cluster.num_ranks} devices; torchrun started {world} ranks"
        raise ClusterError(message, hint=hint)
    host, here = cluster.host_of(rank), range(rank - local, rank - local + own)
    if (there := cluster.ranks_on(host)) != here:
        message = f"{path} puts the ranks {there[0]} to {there[-1]} on {host.name}"
        raise ClusterError(f"{message}; here are {here[0]} to {here[-1]}", hint=hint)
    return cluster


def profiled_here(
    captured: "Capture", job: Job, cluster: Cluster, listener: Listener
) -> "tuple[Profile, ...]":
    """Return the profile of the step on the only host of `cluster`, which is this machine."""
    (host,) = cluster.hosts
    return (measured_as(host.device, captured, job, cluster, listener),)


def measured_as(
    kind: str, captured: "Capture", job: Job, cluster: Cluster, listener: Listener
) -> "Profile":
    """Return the profile of the step on this machine, as that of the device `kind` of a cluster.

    Its seconds are those that sampled steps of earlier runs had here, where there were any.
    """
    from penstock.cluster.machine import detect
    from penstock.device import here
    from penstock.files import cache_folder
    from penstock.processes.child import apart
    from penstock.profile.kept_profiles import files_of_step, measured
    from penstock.profile.sampled import resting_on, sampled_in

    busiest = max(host.num_devices for host in cluster.hosts if host.device == kind)
    shares_cores = here().can_fork  # on accelerators ranks are not companions of one processor
    beside = max(0, min(busiest, detect().cores) - 1) if shares_cores else 0

    tell = partial(tell_day, "profile", listener)
    with listener.busy("measuring every op"):
        folder = cache_folder("profiles")
        profile = measured(captured, job, beside=beside, folder=folder, tell=tell, apart=apart)
    files = files_of_step(cache_folder("profiles"), captured, job, beside)
    known = None if files is None else sampled_in(files, profile)
    if known is not None and files is not None:
        runs = "a run" if known.runs == 1 else f"{known.runs:,} runs"
        words = f"{known.steps:,} measured steps of {runs}"
        listener.say(f"seconds rest on {words} (delete {files.every} to forget them)")
    return replace(resting_on(profile, known), kind=kind)
