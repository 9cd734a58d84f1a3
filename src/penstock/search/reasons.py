"""Reasons: why a plan is the best, decision by decision, by the best that decides otherwise."""

from collections.abc import Callable, Sequence

from penstock.plan import By, Decision, Plan
from penstock.search.balance import seconds_before
from penstock.search.candidate import Candidate
from penstock.search.field import Field
from penstock.search.judge import Judge
from penstock.search.shapes import Wish
from penstock.units import format_bytes, format_seconds


def reasons(
    best: Candidate, field: Field, judge: Judge, wish: Wish, devices: Sequence[Sequence[int]]
) -> tuple[Decision, ...]:
    """Return the decisions of the best candidate, each with the best that decides otherwise.

    devices:  for each stage the kinds of device that it runs on, as places among the profiles.
    """

    def by(wanted: object) -> By:
        return "user" if wanted is not None else "search"

    def against(name: str, wanted: object, value: Callable[[Plan], object]) -> str:
        if wanted is not None:
            return "asked for"
        return _against(best, field, name, value)

    plan = best.plan
    ranks = against("ranks", wish.ranks, lambda p: p.total_ranks)
    replicas = against("replicas", wish.replicas, lambda p: p.replicas)
    stages = against("number of stages", wish.stages, lambda p: p.num_stages)
    schedule = against("schedule", wish.schedule, lambda p: p.schedule)
    again = against("recompute", wish.recompute, lambda p: any(p.recompute))
    per = f"{plan.num_micro_batches} per replica"
    cuts = ", ".join(plan.cut_names) or "uncut"
    return (
        Decision("ranks", str(plan.total_ranks), by(wish.ranks), ranks),
        *_hosts(best, field, judge),
        Decision("replicas", str(plan.replicas), by(wish.replicas), replicas),
        Decision("stages", f"{plan.num_stages} on {plan.num_ranks} ranks", by(wish.stages), stages),
        Decision("cuts", cuts, "search", _balance(judge, plan, devices)),
        Decision("schedule", plan.schedule, by(wish.schedule), schedule),
        Decision("micro-batches", per, "only choice", "the job sets how many make a step"),
        Decision("recompute", _yes_no(plan), by(wish.recompute), again),
        _rests_on(judge, plan),
    )


def _hosts(best: Candidate, field: Field, judge: Judge) -> tuple[Decision, ...]:
    """Return the decision which hosts to use in which order, where there is more than one."""
    if len(judge.cluster.hosts) == 1:
        return ()
    plan = best.plan
    why = _against(best, field, "order of hosts", lambda p: _order_of(judge, p))
    there = judge.cluster_of(plan.hosts)
    holding = [there.host_of(rank).name for rank in range(plan.total_ranks)]
    words: list[str] = []
    for host in there.hosts:
        ranks = [rank for rank, name in enumerate(holding) if name == host.name]
        if ranks:
            kind = there.device_of(ranks[0])
            spot = ", preemptible" if kind.preemptible else ""
            words.append(f"{host.name} (ranks {_span(ranks)} on {kind.name}{spot})")
    idle = [host.name for host in there.hosts if host.name not in holding]
    value = ", ".join(words) + (f"; idle: {', '.join(idle)}" if idle else "")
    return (Decision("hosts", value, "search", why),)


def _order_of(judge: Judge, plan: Plan) -> tuple[str, ...]:
    there = judge.cluster_of(plan.hosts)
    return tuple(dict.fromkeys(there.host_of(rank).name for rank in range(plan.total_ranks)))


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _balance(judge: Judge, plan: Plan, devices: Sequence[Sequence[int]]) -> str:
    """Return the seconds of each stage on its slowest device, with its name where they differ."""
    by_kind = [seconds_before(judge.graph, profile.op_s) for profile in judge.profiles]
    ends = [0, *(c + 1 for c in plan.cuts), len(by_kind[0]) - 1]
    words: list[str] = []
    for stage, kinds in enumerate(devices):
        seconds, kind = max((by_kind[k][ends[stage + 1]] - by_kind[k][ends[stage]], k) for k in kinds)
        where = f" ({judge.profiles[kind].kind})" if len(judge.profiles) > 1 else ""
        words.append(format_seconds(seconds) + where)
    return "per micro-batch: " + ", ".join(words)


def _rests_on(judge: Judge, plan: Plan) -> Decision:
    """Return what the seconds of the plan's ranks rest on."""
    used = dict.fromkeys(judge.places(plan.hosts, plan.total_ranks))
    rows = [judge.profiles[place] for place in used]
    value = ", ".join(f"{row.kind or row.device} {row.how}" for row in rows)
    why = ", ".join(
        f"{format_seconds(row.micro_batch_s)} per micro-batch on {row.kind or row.device}"
        for row in rows
    )
    return Decision("seconds", value, "only choice", why)


def _yes_no(plan: Plan) -> str:
    stages = [str(stage) for stage, again in enumerate(plan.recompute) if again]
    return f"stages {', '.join(stages)}" if stages else "none"


def _against(
    best: Candidate, field: Field, name: str, value: Callable[[Plan], object]
) -> str:
    """Return the best candidate that decides otherwise, in words."""
    own = value(best.plan)

    def differs(plan: Plan) -> bool:
        return value(plan) != own

    first = next((at for at, plan in enumerate(field.plans) if differs(plan)), None)
    if first is None:
        return "nothing else is possible"
    found = field.best(1, differs)
    if not found:
        return f"every other {name} was refused: {field.made(first).refused}"
    other = found[0]
    plan = other.plan
    what = f"{plan.replicas} x {plan.num_stages} stages, {plan.schedule}"
    if any(plan.recompute):
        what += ", recompute"
    peak = max(other.peak_bytes)
    slower, larger = _times(other.step_s, best.step_s), _times(peak, max(best.peak_bytes))
    return (
        f"the best otherwise ({what}): {format_seconds(other.step_s)}, {slower} of this, and "
        f"{format_bytes(peak)}, {larger}"
    )


def _times(other: float, own: float) -> str:
    return f"{other / own:.2f}x" if own else "against none"
