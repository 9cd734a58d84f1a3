"""Saved: a plan's file, and beside it the graph, the profiles and the cluster it was made with.

A run's folder also keeps the text that named its job, with the arguments of its script, and where
it was given: `job.json`.

With `plan.json` they are `graph.json`, `profile.json` and `cluster.toml`; with another name, like
`fast.json`, they are `fast.graph.json` and so on, so that several plans can share a folder.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.cluster.cluster import Cluster
from penstock.cluster.order import placed
from penstock.errors import JobError, PlanError
from penstock.files import Json, read_json, write_text
from penstock.graph.graph import Graph
from penstock.pilot.wishes import ELSEWHERE, POLICY
from penstock.plan.plan import Plan, check_fits
from penstock.profile.kinds import load_profiles, save_profiles
from penstock.profile.profile import Profile
from penstock.script import script_of
from penstock.training.options import Value
from penstock.training.trust import ask_to_run, is_sealed, seal_of

_NONE: dict[str, Value] = {}


class Basis(NamedTuple):
    """What a plan is simulated with; a profile for each kind of device."""

    graph: Graph
    profiles: tuple[Profile, ...]
    cluster: Cluster


def save_plan(path: Path, plan: Plan, basis: Basis) -> None:
    """Write the plan and what it was made with; the plan last, so that it is never without.

    The hosts of the cluster are written in the order that the plan has.

    Raises:   OSError: no room or no permission; no file is left that was not there.
    """
    files = _files(path)
    new = [file for file in files if not file.exists()]
    try:
        basis.graph.save(files[0])
        save_profiles(basis.profiles, files[1])
        placed(basis.cluster, plan.place.hosts).save(files[2])
        plan.save(path)
    except OSError:
        for file in new:
            file.unlink(missing_ok=True)
        raise


def load_basis(path: Path, plan: Plan) -> Basis:
    """Return what the plan in `path` was made with.

    Raises:   PlanError: there is none beside it, or it is of another plan.
              GraphError, ProfileError, ClusterError: a file is damaged.
    """
    files = _files(path)
    missing = [file for file in files if not file.exists()]
    if missing:
        message = f"{path} alone cannot be simulated: {missing[0]} is missing"
        raise PlanError(message, hint='give job="JOB", and it is traced and measured here')
    graph = Graph.load(files[0])
    try:
        check_fits(plan, graph)
    except PlanError as problem:
        hint = 'give job="JOB", or make the plan again with `penstock plan --out`'
        raise PlanError(f"{files[0]} is of another plan: {problem.message}", hint=hint) from problem
    return Basis(graph, load_profiles(files[1]), Cluster.load(files[2]))


def keep_job(
    folder: Path,
    text: str,
    steps: int,
    micro_batches: int = 0,
    options: Mapping[str, Value] = _NONE,
    late: str = "",
) -> None:
    """Keep what named the job of a run, the folder that it was named in, and its steps in all.

    text:           "": it was given as a record.
    micro_batches:  of a step; 0: that is found by the run.
    options:        that were asked for, as `asked_for` says them.
    late:           what its steps follow from that no checkpoint holds; "": nothing is known.
    """
    place = str(Path.cwd())
    content = {"penstock": "job", "job": text, "from": place, "steps": steps}
    content |= {"seal": seal_of(text, place)}
    content |= {"micro_batches": micro_batches} if micro_batches else {}
    content |= {"options": dict(options)} if options else {}
    content |= {"late": late} if late else {}
    write_text(folder / "job.json", json.dumps(content) + "\n")


def kept_job(folder: Path) -> str:
    """Return what named the job of the run in `folder`, so that it is found from here.

    Raises:   JobError: the folder does not know it.
    """
    text, place = _kept(folder)
    if not text:
        message = f"{folder} does not say which job it is a run of"
        raise JobError(message, hint=_WHICH)
    file = script_of(text).place
    return str(Path(place) / text) if (Path(place) / file).is_file() else text


def is_own(folder: Path) -> bool:
    """Return whether this user's own penstock wrote what names the job of the run in `folder`.

    Raises:   JobError: what does is damaged.
    """
    text, place = _kept(folder)
    content = read_json(folder / "job.json", JobError, "job.json") if text else {}
    return is_sealed(text, place, content.get("seal"))


def job_to_run(
    folder: Path,
    asks: Callable[[str], bool],
    job: str | None = None,
    rules: Sequence[str] = (),
) -> str:
    """Return what names the job of the run in `folder`, if it may be run: its own, or asked for.

    asks:     puts a question to a person; False where there is none.
    job:      what the person named instead; nobody is asked for it.
    rules:    functions of rules that the run goes by.
    Raises:   JobError: the folder does not know it, or it is not to be run.
    """
    text = job or kept_job(folder)
    if not is_own(folder):
        command = policy_command(folder)
        names = [*([] if job else [text]), *rules]
        names += [f"`sh -c {shlex.quote(command)}`"] if command else []
        if names:
            ask_to_run(folder, ", ".join(names), asks, "read what it names; then give yes=True")
    return text


def policy_command(folder: Path) -> str:
    """Return the command that the policy kept in a run's folder calls for machines; "": none.

    Raises:   FleetError: the policy is damaged.
    """
    if not (folder / POLICY).exists():
        return ""
    from penstock.fleet.policy_file import read_policy

    command = read_policy(folder / POLICY).provision
    return "" if command == ELSEWHERE else command


def check_policy(folder: Path) -> None:
    """Raise where the policy kept in a run's folder calls a command, and others wrote the folder.

    Raises:   JobError.  FleetError: the policy is damaged.
    """
    command = policy_command(folder)
    if command and not is_own(folder):
        hint = f'read {folder / POLICY}, and give it: policy="{folder / POLICY}"'
        ask_to_run(folder, f"`sh -c {shlex.quote(command)}`", lambda question: False, hint)


def kept_options(folder: Path) -> dict[str, Json]:
    """Return the options that the run in `folder` was asked for; defaults are left out."""
    if not (folder / "job.json").exists():
        return {}
    found = read_json(folder / "job.json", JobError, "job.json").get("options")
    return found if isinstance(found, dict) else {}


def kept_micro_batches(folder: Path) -> int | None:
    """Return how many micro-batches a step of the run in `folder` has; None: nothing says so."""
    if not (folder / "job.json").exists():
        return None
    found = read_json(folder / "job.json", JobError, "job.json").get("micro_batches")
    return found if isinstance(found, int) else None


def kept_late(folder: Path) -> str:
    """Return what the steps of the run in `folder` follow from that no checkpoint holds."""
    if not (folder / "job.json").exists():
        return ""
    return str(read_json(folder / "job.json", JobError, "job.json").get("late", ""))


def text_in(folder: Path) -> str:
    """Return what named the job of the run in `folder`, as it was given; "": nothing says so.

    Raises:   JobError: what says so is damaged.
    """
    return _kept(folder)[0]


_WHICH = 'say which job made it: job="JOB"'


def _kept(folder: Path) -> tuple[str, str]:
    """Return what named the job of a run, and in which folder; "" twice where nobody knows."""
    if not (folder / "job.json").exists():
        return "", ""
    content = read_json(folder / "job.json", JobError, "job.json")
    text, place = content.get("job"), content.get("from")
    if not (isinstance(text, str) and isinstance(place, str)):
        raise JobError(f"{folder / 'job.json'} does not name a job", hint=_WHICH)
    return text, place


def _files(path: Path) -> list[Path]:
    """Return the files that belong to the plan in `path`, in the order of a Basis."""
    names = "graph.json", "profile.json", "cluster.toml"
    stem = "" if path.name == "plan.json" else f"{path.stem}."
    return [path.with_name(stem + name) for name in names]
