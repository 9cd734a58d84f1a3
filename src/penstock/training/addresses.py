"""Addresses: what a newcomer has to know of an elastic run, and the file that tells it.

elastic.json   where members listen, the run's token, its plans; only its owner may read it
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.checkpoints.folders import Keep
from penstock.choose.choose import Choice
from penstock.choose.key_plans import choice_of_keys, read_key_plans
from penstock.choose.loading import JobTerms
from penstock.choose.run_windows import CheckpointInterval
from penstock.choose.told_data import ToldData
from penstock.errors import RunError
from penstock.files import read_json
from penstock.job import Job
from penstock.listener import Listener
from penstock.members.words import Where
from penstock.pilot.goal import Goal
from penstock.plan.plan import Plan
from penstock.profile.noise import EVERY as NOISE_EVERY
from penstock.training.at_work import ADDRESSES
from penstock.typed import damage, typed

if TYPE_CHECKING:
    from penstock.choose.keys import TracedKey


class RunTerms(NamedTuple):
    """What was asked of a run besides its plan and its steps, as far as every member heeds it.

    checked:  how the plan was compared with the plain loop.
    until:    the loss at which it ends.
    mirror:   URL at which the folder is kept, too; "": nowhere else.
    audits:   whether members keep steps for audits.
    forgets:  whether they go on without what no checkpoint holds.
    job:      what makes its job besides the text that names it.
    validate_every, noise_every: steps after which ranks validate, and watch their gradients' noise.
    """

    every: CheckpointInterval = CheckpointInterval()
    keep: Keep = Keep()
    checked: str = ""
    until: Goal | None = None
    mirror: str = ""
    audits: bool = False
    forgets: bool = False
    job: JobTerms = JobTerms()
    validate_every: int = 0
    noise_every: int = NOISE_EVERY


@dataclass(frozen=True, slots=True)
class Addresses:
    """What a newcomer has to know of a run.

    token:    what it has to prove that it knows; "": it knows it from elsewhere.
    folder:   of the run, which all its hosts see.
    members:  where they listen.
    job:      the digest of the folder's record of its job.
    keyed:    where its steps have several shapes, the plans of all of them, for each of `plans`.
    data:     what was found of the data of its job.
    """

    token: str
    folder: str
    members: dict[str, Where]
    plans: tuple[str, ...]
    steps: int
    terms: RunTerms = RunTerms()  # noqa: RUF009 - a frozen record
    job: str = ""
    keyed: tuple[str, ...] = ()
    data: ToldData = ToldData()  # noqa: RUF009 - a frozen record

    @property
    def secret(self) -> bytes:
        """Return the token itself."""
        return bytes.fromhex(self.token)

    @property
    def by_count(self) -> dict[int, Plan]:
        """Return the plans, by number of ranks."""
        return {plan.total_ranks: plan for plan in map(Plan.from_text, self.plans)}

    def keyed_by(
        self, job: Job, shapes: "Sequence[TracedKey]", listener: Listener
    ) -> dict[int, Choice]:
        """Return the plans of all shapes by number of ranks; nothing where steps have one.

        Raises:   PlanError: they are those of another job.
        """
        rows = (choice_of_keys(job, shapes, read_key_plans(t), listener) for t in self.keyed)
        return {choice.plan.total_ranks: choice for choice in rows}

    @property
    def public(self) -> str:
        """Return all but the token, as text."""
        return json.dumps(asdict(replace(self, token="")))


def job_digest(folder: Path) -> str:
    """Return the digest of what the folder of a run says of its job; "": it says nothing."""
    try:
        return hashlib.sha256((folder / "job.json").read_bytes()).hexdigest()
    except OSError:
        return ""


def write_addresses(own: Addresses, where: Mapping[int, Where]) -> None:
    """Write what a newcomer has to know, and where members are, for the run's owner alone."""
    members = {str(member): place for member, place in where.items()}
    path = Path(own.folder) / ADDRESSES
    part = path.with_name(f".{ADDRESSES}-{secrets.token_hex(4)}")
    handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps(asdict(replace(own, members=members))) + "\n")
    os.replace(part, path)


def addresses_in(folder: Path) -> Addresses:
    """Return what a newcomer has to know of the run in `folder`.

    Raises:   RunError: there is no elastic run, or its file is damaged.
    """
    path = folder / ADDRESSES
    if not path.exists():
        message = f"{folder} holds no run that ranks can join: no {ADDRESSES}"
        raise RunError(message, hint="start it with `penstock train JOB --elastic`")
    content = read_json(path, RunError, "file of addresses")
    with damage(f"{path}", RunError, hint="start the run again"):
        return typed(Addresses, content)


def addresses_of(text: str) -> Addresses:
    """Return what a member told of its run.

    Raises:   RunError: it is nothing of the kind.
    """
    with damage("what a member told of its run", RunError, hint="is it of this version?"):
        return typed(Addresses, json.loads(text))
