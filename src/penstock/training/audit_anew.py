"""Audit anew: a run on accelerators is audited by its own command, begun once more beside it.

No fork can use an accelerator, and no CPU makes its numbers to the last bits, nor in time.  So the
plain loop's steps are made on one like the run's own: that on which the plan holds least, in the
memory that is left there, and no more, so that no rank is ever short of it for an audit.  Where the
author's loop has no room in that, its weights wait in the host's memory (graph/waiting.py), as they
do for a model that is larger than one accelerator.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from penstock.choose.choose import Choice, for_plan
from penstock.choose.update_memory import forgets
from penstock.device import Device, all_here, here
from penstock.errors import GraphError
from penstock.listener import SILENT
from penstock.plan.plan import Plan
from penstock.processes.begun_anew import answer_beside, asked_beside
from penstock.prove.audit import Anew, audit_asked
from penstock.prove.prove import Planned, case_of, needs_trace, untraced_case
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.prove.plain_side import Case
    from penstock.training.session import Session


class AuditSeat(NamedTuple):
    """Where the plain loop's steps are made again.

    room_bytes:  that the plan leaves there.
    plain_bytes: that the loop is expected to hold; what has no room of it waits.
    """

    device: Device
    room_bytes: int
    plain_bytes: int

    def __str__(self) -> str:
        room, needs = format_bytes(self.room_bytes), format_bytes(self.plain_bytes)
        words = f"audits on {self.device.place}: the plan leaves {room}"
        words = f"{words}, the plain loop takes {needs}"
        return words if self.plain_bytes <= self.room_bytes else f"{words}; its weights wait"


def seat_for(held_bytes: Sequence[int], plain_bytes: int) -> AuditSeat:
    """Return where a run is audited whose ranks are expected to hold so much each.

    Of several hosts, this one's own device, and what the fullest rank leaves.
    """
    devices, most = all_here(), max(held_bytes, default=0)
    if len(devices) >= len(held_bytes):
        places = list(zip(held_bytes, devices, strict=False)) or [(0, here())]
    else:
        places = [(most, here())]
    held, device = min(places, key=lambda place: place[0])
    return AuditSeat(device, device.beside_bytes(held), plain_bytes)


def begun_anew(session: "Session", seat: AuditSeat, plan: Plan | None, ranks: int) -> Anew:
    """Return how the process is begun that audits a plan, or so many replicas without one."""
    asked = {
        "folder": str(session.folder),
        "plan": None if plan is None else json.dumps(plan.to_json()),
        "ranks": ranks,
        "room_bytes": seat.room_bytes,
        "by_parts": seat.plain_bytes > seat.room_bytes,
    }
    return Anew(asked, seat.device)


def audit_beside(session: "Session") -> None:
    """Audit, in the process that was begun for it, and answer with what was found."""
    asked, device = asked_beside(), here()
    device.limit(asked["room_bytes"])
    plan = None if asked["plan"] is None else Plan.from_text(asked["plan"])
    if plan is None:
        case = _case_of_replicas(session, asked["ranks"])
    else:
        case = replace(_case(session, plan), by_parts=asked["by_parts"])
    case = replace(case, forgets=partial(forgets, case.job, session.key))
    device.reset_peak()
    found = audit_asked(case, session.folder, session.asked.audit, asked)
    most = device.peak_bytes
    answer_beside(asdict(replace(found, room_bytes=asked["room_bytes"], most_bytes=most)))


def _case(session: "Session", plan: Plan) -> "Case":
    """Return the plain loop's task; a step is traced anew where that needs it.

    Raises:   GraphError: it cannot be traced any more.
    """
    if not needs_trace(session.author, plan):
        return untraced_case(session.author, plan, (0,))
    captured = session.trace()
    if captured is None:
        raise GraphError(session.learned.untraced)
    choice = Choice(*for_plan(session.job, plan, captured, SILENT), plan)
    return case_of(Planned(session.author, choice.captured, plan), (0,), begun=True)


def _case_of_replicas(session: "Session", ranks: int) -> "Case":
    from penstock.prove.plain_side import Case
    from penstock.prove.prove import owners_of_replicas

    return Case(session.author, (0,), owners=owners_of_replicas(session.author, ranks))
