"""Update memory: what an optimizer keeps from update to update that no checkpoint holds.

A hook that counts its calls in a variable of its own knows another number in an audit, and begins
anew where a run goes on.
"""

from dataclasses import asdict, dataclass

from penstock.job import Job


@dataclass(frozen=True, slots=True)
class _Lost:
    """What would differ, empty if nothing, and the lines that keep it."""

    what: str
    lines: str


def forgets(job: Job, text: str = "") -> str:
    """Return why no update can be made again from a state; empty: it can.

    text:     how the job was named; what was found before is not tried again.
    """
    what = _lost(job, text).what
    return what and f"the optimizer keeps something in no checkpoint: {what}"


def check_updates(job: Job, text: str = "") -> None:
    """Raise where a run that goes on would begin anew what the optimizer keeps.

    text:     how the job was named.
    Raises:   CheckpointError: it says what would differ, with the lines that keep it.
    """
    from penstock.state.optimizer.optimizer import raise_for

    lost = _lost(job, text)
    raise_for(lost.what, lost.lines)


def _lost(job: Job, text: str) -> _Lost:
    from penstock.choose.store import keep, kept, key_of
    from penstock.graph.trace import build_model
    from penstock.processes.child import apart
    from penstock.state.optimizer.optimizer import Optimizers, hooks_a_gradient

    def asked() -> list[str]:
        if hooks_a_gradient(job, build_model(job)):  # no made-up gradient calls them
            return ["", ""]  # whole steps are tried (training/resumed.py)
        model = build_model(job)
        reached = [name for name, p in model.named_parameters() if p.requires_grad]
        return list(Optimizers(job, model, reached).lost())

    key = key_of(job, text, "what an update keeps")
    found = kept(_Lost, key, "memory of an optimizer")
    if found is None:
        what, lines = apart(asked)
        found = _Lost(str(what), str(lines))
        keep(key, "memory of an optimizer", asdict(found))
    return found
