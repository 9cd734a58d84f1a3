"""Reasons: why a plan is the best, decision by decision, with the best alternative."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.bits import AS_IT_IS
from penstock.cluster.cluster import Host
from penstock.graph.graph import Graph
from penstock.graph.segment_memory import moved
from penstock.graph.server_parts import server_parts
from penstock.graph.wire import error_bound, message_bytes, summed_bytes
from penstock.plan.decision_words import Words
from penstock.plan.overlap import Prefetch
from penstock.plan.plan import By, Decision, Plan, repeats_all
from penstock.plan.tried import is_tie
from penstock.profile.profile import Profile
from penstock.program.passes.offload import Offloaded
from penstock.program.passes.shard import Sharding
from penstock.routes import routes_of, server_places
from penstock.schedule.figures import peak_activations
from penstock.schedule.orders import B
from penstock.schedule.recipe import (
    Recipe,
    any_schedule,
    copied_of,
    has_window,
    is_woven,
    name_of,
    trains,
)
from penstock.search.balance import seconds_before
from penstock.search.candidate import Candidate
from penstock.search.crossing import crossing
from penstock.search.field import Field
from penstock.search.judge import Judge
from penstock.search.shapes import Fixed
from penstock.search.whole import whole_cuts, whole_stages
from penstock.simulate.sharing import crowded
from penstock.sums import in_words
from penstock.units import format_bytes, format_seconds

_WHOLE = Words(shard=(), prefetch=0, parts=())
_NEAR = Words(offload=(), beside=False)  # weights that every replica would have far
_WORTH = 0.99  # of a step: less is no gain
_MOST_NAMES = 8  # of hosts, where each rank has its own


def reasons(
    best: Candidate, field: Field, judge: Judge, fixed: Fixed, devices: Sequence[Sequence[int]]
) -> tuple[Decision, ...]:
    """Return the decisions of the best candidate, each with its best alternative.

    devices:  for each stage the kinds of device that it runs on, as places among the profiles.
    """

    def by(wanted: object) -> By:
        return "user" if wanted is not None else "search"

    def against(name: str, wanted: object, value: Callable[[Plan], object]) -> str:
        if wanted is not None:
            return "asked for"
        return _against(best, field, judge, name, value)

    plan = best.plan
    ranks = against("ranks", fixed.ranks, lambda p: p.total_ranks)
    replicas = against("replicas", fixed.replicas, lambda p: p.replicas)
    stages = against("number of stages", fixed.stages, whole_stages)
    asked = None if _is_completed(plan, fixed) else fixed.schedule
    schedule = against("schedule", asked, lambda p: name_of(p.schedule))
    again = _saved(judge, plan) + against("recompute", fixed.recompute, _how_much)
    cuts = ", ".join(whole_cuts(plan)) or "uncut"
    return (
        Decision("ranks", str(plan.total_ranks), by(fixed.ranks), ranks),
        *_machines(best, field, judge),
        Decision("replicas", str(plan.replicas), by(fixed.replicas), replicas),
        Decision(
            "stages", f"{whole_stages(plan)} on {plan.num_ranks} ranks", by(fixed.stages), stages
        ),
        Decision("cuts", cuts, "search", _balance(judge, plan, devices)),
        Decision("schedule", _made_for(plan), by(asked), schedule),
        Decision("micro-batches", plan.share_words, *_sharing(plan)),
        Decision("recompute", _yes_no(plan), by(fixed.recompute), again),
        *_weaving(best, field, judge, asked=fixed.exchange.woven),
        *_waiting(judge, best, fixed),
        *_copies(best, field, judge, asked),
        *_shards(judge, best),
        *_fewer_bits(judge, best, fixed.exchange.wire),
        *_validation(judge, plan),
        *judge.rules.decisions(),
        _rests_on(judge),
    )


def _is_completed(plan: Plan, fixed: Fixed) -> bool:
    """Return whether arguments of the schedule that was asked for were left to the search."""
    if fixed.schedule is None or not isinstance(plan.schedule, Recipe):
        return False
    asked = any_schedule(fixed.schedule)
    return isinstance(asked, Recipe) and asked.arguments != plan.schedule.arguments


def _copies(best: Candidate, field: Field, judge: Judge, asked: object) -> Iterator[Decision]:
    """Yield what is copied to far memory and back as schedule and plan say, how, and why.

    asked:  the schedule, where it is not the search's.
    """
    plan, made = best.plan, best.plan.schedule
    if not isinstance(made, Recipe) and made.far:
        pairs = made.num_stages * made.num_micro_batches
        value = f"{len(made.far) // 2} of {pairs} activations wait there"
        most = max(peak_activations(made))
        why = f"no rank holds more than {most} at once"
        if asked is None:
            how = _against(best, field, judge, "plan", lambda plan: bool(copied_of(plan.schedule)))
            why = f"{why}; {how}"
        yield Decision("far memory", value, "user" if asked is not None else "search", why)
    if any(word != "none" for word in plan.offload):
        by: By = "search"
        if not any(each.offloads for each in field.plans):  # found where memory was short
            other = judge.candidate(plan.changed(beside=not plan.overlap.beside))
            way = "between" if plan.overlap.beside else "beside"
            why = f"{way} computes {other.refused or format_seconds(other.step_s)}"
            if not (plan.overlap.beside or other.refused) and other.step_s < best.step_s:
                why = "no rank has a core more than it computes with"
        elif all(not each.overlap.beside for each in field.plans):
            by, why = "only choice", "no rank has a core more than it computes with"
        else:
            why = _against(best, field, judge, "way to copy", lambda plan: plan.overlap.beside)
        value = "beside computes" if plan.overlap.beside else "between computes"
        yield Decision("copies", value, by, why)


def _waiting(judge: Judge, best: Candidate, fixed: Fixed) -> Iterator[Decision]:
    """Yield what waits in far memory where that is the search's, and what it saves and costs."""
    plan = best.plan
    if fixed.offload:
        yield Decision("offload", fixed.offload, "user", "asked for")
        return
    if all(word == "none" for word in plan.offload):
        return
    ahead = plan.overlap.prefetch
    near = plan.changed(offload=(), beside=False, prefetch=ahead if plan.shards else 0)
    if judge.rules.broken(near, judge.graph):
        return
    counts = Counter(plan.offload)
    words: dict[Offloaded, str] = {
        "state": "the optimizer's state",
        "activations": "activations",
        "both": "state and activations",
        "weights": "weights, gradients and state",
        "all": "weights, gradients, state and activations",
    }
    parts = [f"{words[each]} of {counts[each]}" for each in words if counts[each]]
    value = f"{', '.join(parts)} of {plan.num_stages} stages"
    if plan.far:
        value += f", loaded {_early(ahead)}"
    whole = judge.candidate(near)
    yield Decision("offload", value, "search", _in_place_of(best, whole))


def _early(prefetch: Prefetch) -> str:
    """Return how long before its use something is fetched, in words."""
    if isinstance(prefetch, int):
        return f"{prefetch} ahead" if prefetch else "at their use"
    return f"{min(prefetch)} to {max(prefetch)} ahead, stage by stage"


def _in_place_of(best: Candidate, other: Candidate) -> str:
    """Return what the fullest rank holds and a step takes, with those of another plan."""
    held = [format_bytes(max(each.peak_bytes)) for each in (best, other)]
    step = [format_seconds(each.step_s) for each in (best, other)]
    return f"{held[0]} a rank in place of {held[1]}, {step[0]} in place of {step[1]}"


def _shards(judge: Judge, best: Candidate) -> Iterator[Decision]:
    """Yield which stages are divided among replicas, and what that saves and costs."""
    plan = best.plan
    if not plan.shards:
        return
    counts = Counter(plan.shard)
    words: dict[Sharding, str] = {
        "shard": "divided",
        "shard_keep": "divided, whole for a step",
        "replicate": "whole",
    }
    value = ", ".join(f"{counts[each]} {words[each]}" for each in words if counts[each])
    distance, own = plan.overlap.prefetch, plan.place.parts
    ahead = f", gathered {_early(distance)}"
    undivided = plan.changed(**(_WHOLE | (_NEAR if plan.far else Words())))
    if judge.rules.broken(undivided, judge.graph):
        yield Decision("shard", value + ahead, "user", "asked for by a rule")
        return
    whole = judge.candidate(undivided)
    yield Decision("shard", value + ahead, "search", _in_place_of(best, whole))
    if own:
        equal = judge.candidate(plan.changed(parts=()))
        row = (f"{float(plan.grid.part_of(r, own)):.3g}" for r in range(plan.total_ranks))
        why = f"in equal parts {equal.refused}" if equal.refused else "by the memory of the ranks"
        yield Decision("parts", f"{', '.join(row)} of what is divided", "search", why)


def _weaving(best: Candidate, field: Field, judge: Judge, *, asked: bool) -> Iterator[Decision]:
    """Yield whether ranks that divide ops compute one micro-batch while they collect of another."""
    if not any(is_woven(each.schedule) for each in field.plans):
        return
    value = "woven" if is_woven(best.plan.schedule) else "one after the other"
    if asked:
        yield Decision("units", value, "user", "asked for")
        return
    why = _against(best, field, judge, "order of units", lambda plan: is_woven(plan.schedule))
    yield Decision("units", value, "search", why)


def _validation(judge: Judge, plan: Plan) -> Iterator[Decision]:
    """Yield what waiting for the norm costs, where an update may come before it, and gains."""
    if not plan.agreement.clip or plan.num_ranks == 1 or has_window(plan.schedule):
        return
    if judge.graph.copy_dtype == "float16":  # a step that overflows is left out
        return
    ways = (plan.changed(clip=clip, post_validation=False) for clip in (True, False))
    waits, free = (judge.simulated(way, spans=False)[0].step_s for way in ways)
    gain = f"{format_seconds(free)} in place of {format_seconds(waits)} per step of a long run"
    if plan.agreement.post_validation:
        why = f"asked for: {gain}, where few gradients are clipped; weights and state held twice"
        yield Decision("post-validation", "yes", "user", why)
    elif free < _WORTH * waits:
        why = f"an update before the norm is known would take {gain}: post_validation"
        yield Decision("post-validation", "no", "search", why)


def _fewer_bits(judge: Judge, best: Candidate, fewest: tuple[int, int]) -> Iterator[Decision]:
    """Yield in how few bits numbers are computed, summed and sent, where the job says something."""
    yield from _halved(judge, best.plan)
    yield from _summed(judge, best)
    yield from _routed(judge, best)
    yield from _packed(judge, best, fewest)


def _halved(judge: Judge, plan: Plan) -> Iterator[Decision]:
    """Yield in which precision a step computes, where weights are kept in another one."""
    graph, stages = judge.graph, judge.price(plan).stages
    own = [
        at for at, n in enumerate(graph.nodes) if n.kind == "parameter" and n.name in graph.masters
    ]
    if not own:
        return
    dtype = graph.copy_dtype
    sent = [value for edge in stages.edges for value in edge.values]
    kept = [
        v
        for stage in stages.stages
        for group in moved(graph, stages, stage.index)
        for v in group[:1]
    ]
    parts = [
        f"{now} in place of {wide} {what}"
        for what, values in (("between stages", sent), ("from F to backward", kept))
        for now, wide in [_widths(graph, values, dtype)]
        if values
    ]
    copies = format_bytes(sum(map(graph.copy_bytes, own)))
    why = (
        f"asked for: {', '.join(parts)} a micro-batch; copies of the weights take {copies} besides"
    )
    yield Decision("precision", dtype, "user", why)


def _widths(graph: Graph, values: Iterable[int], dtype: str) -> tuple[str, str]:
    """Return the bytes of values, and what they would be if those of `dtype` had 32 bits."""
    nodes = [graph.nodes[value] for value in values]
    now = sum(node.size_bytes for node in nodes)
    return format_bytes(now), format_bytes(
        now + sum(n.size_bytes for n in nodes if n.dtype == dtype)
    )


def _summed(judge: Judge, chosen: Candidate) -> Iterator[Decision]:
    """Yield in which dtype gradients travel that copies of a stage sum, where that is another."""
    plan, stages = chosen.plan, judge.price(chosen.plan).stages
    made = judge.schedule(plan)
    among = [plan.replicas * len(ranks) for ranks in made.stage_ranks]
    several = [s for s in stages.stages if among[s.index] > 1]
    if plan.agreement.sums is None or not several:
        return
    other = judge.candidate(plan.changed(sums=None))
    now, wide = (
        format_bytes(
            sum(
                summed_bytes(
                    judge.graph, s.parameters, sums, ranks=among[s.index], shared=stages.shared
                )
                for s in several
            )
        )
        for sums in (plan.agreement.sums, None)
    )
    what = "a server" if plan.served else f"sums of {now} in place of {wide}"
    why = f"asked for: {what}, {format_seconds(chosen.step_s)} in place of "
    why += f"{format_seconds(other.step_s)} a step; gradients {in_words(plan.agreement.sums)}"
    yield Decision("sums", plan.agreement.sums, "user", why)


def _routed(judge: Judge, chosen: Candidate) -> Iterator[Decision]:
    """Yield along whose rounds sums go, where they do not as the transport makes them."""
    plan = chosen.plan
    if plan.served:
        yield from _servers(judge, chosen)
    if plan.served or not plan.topology:
        return
    rounds = len(routes_of(plan.topology, plan.replicas).rounds)
    other = judge.candidate(plan.changed(topology=None))
    why = f"asked for: {rounds} rounds a sum, {format_seconds(chosen.step_s)} in place of "
    why += f"{format_seconds(other.step_s)} a step; gradients are summed in another order"
    yield Decision("topology", plan.topology, "user", why)


def _servers(judge: Judge, chosen: Candidate) -> Iterator[Decision]:
    """Yield which servers divide the parameters, where several do."""
    plan = chosen.plan
    places = server_places(plan.topology, plan.total_ranks)
    if len(places) == 1:
        return
    parts = server_parts(judge.graph, judge.price(plan).stages.stages, len(places))
    sizes = ", ".join(map(format_bytes, parts.size_bytes))
    other = judge.candidate(plan.changed(topology=None))
    why = f"asked for: servers beside ranks {', '.join(map(str, places))} have {sizes}, "
    why += f"{format_seconds(chosen.step_s)} in place of {format_seconds(other.step_s)} a step "
    yield Decision("topology", plan.topology, "user", f"{why}by one; updates are the same")


def _packed(judge: Judge, chosen: Candidate, fewest: tuple[int, int]) -> Iterator[Decision]:
    """Yield in how many bits numbers go from rank to rank, where the job allows fewer than all."""
    plan = chosen.plan
    if fewest == (AS_IT_IS, AS_IT_IS) or plan.num_ranks == 1:
        return
    other = fewest if not plan.terms.rounds else (AS_IT_IS, AS_IT_IS)
    against = judge.candidate(plan.changed(wire=other))
    stages = judge.price(plan).stages
    sizes = [
        sum(message_bytes(judge.graph, e.values, wire[e.kind == "B"]) for e in stages.edges)
        for wire in (plan.terms.wire, other)
    ]
    own, theirs = map(format_bytes, sizes)
    other_s = "no plan" if against.refused else f"{format_seconds(against.step_s)} a step"
    if plan.terms.rounds:
        most = max(error_bound(bits) for bits in plan.terms.wire if bits != AS_IT_IS)
        why = f"{own} in place of {theirs} between stages a micro-batch, "
        why += f"{format_seconds(chosen.step_s)} in place of {other_s}; a number moves by at most "
        why += f"{most:.2g} of the greatest of its row"
    else:
        why = f"{wire_words(other)}, as the job allows, would take {other_s}: {theirs} in place "
        why += f"of {own} between stages a micro-batch"
    yield Decision("wire", wire_words(plan.terms.wire), "search", why)


def wire_words(wire: tuple[int, int]) -> str:
    """Return in how many bits numbers go there and back, in words."""
    if wire == (AS_IT_IS, AS_IT_IS):
        return "numbers as they are"
    there, back = ("as they are" if bits == AS_IT_IS else f"{bits} bits" for bits in wire)
    return f"activations {there}, gradients {back}"


def _sharing(plan: Plan) -> tuple[By, str]:
    """Return by whom and why the micro-batches of a step are shared as they are."""
    why = "the job sets how many make a step"
    shares = plan.place.shares
    if not shares:
        return "only choice", why
    if max(shares) - min(shares) == 1 and plan.step_micro_batches % plan.replicas:
        return "only choice", f"{why}, and {plan.replicas} replicas cannot have the same"
    return "search", f"{why}; replicas on faster devices take more of them"


def _made_for(plan: Plan) -> str:
    """Return the schedule in words, and whether it is built for seconds."""
    said = plan.schedule
    has_seconds = isinstance(said, Recipe) and said.seconds is not None
    return f"{name_of(said)}, built for the seconds of its stages" if has_seconds else name_of(said)


def _machines(best: Candidate, field: Field, judge: Judge) -> tuple[Decision, ...]:
    """Return what is decided by the machines that there are."""
    plan = best.plan
    return *_cores(judge, plan), *_assumed(judge, plan), *_hosts(best, field, judge)


def _cores(judge: Judge, plan: Plan) -> tuple[Decision, ...]:
    """Return that ranks share cores, where a host has fewer."""
    cluster = judge.cluster_of(plan.place.hosts)
    words: list[str] = []
    for number, cores in crowded(plan.total_ranks, cluster).items():
        host = cluster.hosts[number]
        ranks = sum(rank < plan.total_ranks for rank in cluster.ranks_on(host))
        words.append(f"{ranks} ranks share {cores} of {host.name}")
    why = "while more of them compute than there are cores, each gets a share of one"
    return (Decision("cores", ", ".join(words), "only choice", why),) if words else ()


def _assumed(judge: Judge, plan: Plan) -> tuple[Decision, ...]:
    """Return that nobody has measured the link between the ranks, where that is so."""
    if plan.total_ranks < 2:
        return ()
    link = judge.cluster_of(plan.place.hosts).slowest_link(range(plan.total_ranks))
    why = "a guess that nobody has measured; `penstock doctor --links --out FILE` does"
    return (Decision("link", str(link), "only choice", why),) if link.assumed else ()


def _hosts(best: Candidate, field: Field, judge: Judge) -> tuple[Decision, ...]:
    """Return the decision which hosts to use in which order, where there is more than one."""
    if len(judge.cluster.hosts) == 1:
        return ()
    plan = best.plan
    why = _against(best, field, judge, "order of hosts", lambda p: _order_of(judge, p))
    there, used = judge.cluster_of(plan.place.hosts), _order_of(judge, plan)
    holding = [there.host_of(rank).name for rank in range(plan.total_ranks)]
    words, apart = list[str](), len(used) > len({*used})

    def alike(host: Host) -> tuple[str, ...]:
        return host.device, host.region, host.name if apart else ""

    for _, group in itertools.groupby(there.hosts[: len({*used})], alike):
        row = list(group)
        ranks = [rank for rank, name in enumerate(holding) if name in {host.name for host in row}]
        words.append(f"{_names(row)} ({_span(ranks)} on {_kind(judge, row[0])})")
    idle = there.hosts[len({*used}) :]
    for _, group in itertools.groupby(idle, lambda h: (h.device, h.region)):
        row = list(group)
        count = sum(host.num_devices for host in row)
        words.append(f"idle {_names(row)} ({count} {_kind(judge, row[0])})")
    found = [Decision("hosts", ", ".join(words), "search", why)]
    if plan.overlap.early:
        posted = "between hosts a message moves only once its receive is posted"
        value = f"{plan.overlap.early} computes early"
        found.append(Decision("receives", value, "only choice", posted))
    return *found, *crossing(judge, plan)


def _names(hosts: Sequence[Host]) -> str:
    names = [host.name for host in hosts]
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"


def _kind(judge: Judge, host: Host) -> str:
    kind = next(kind for kind in judge.cluster.devices if kind.name == host.device)
    return f"{kind.name}, preemptible" if kind.preemptible else kind.name


def _order_of(judge: Judge, plan: Plan) -> tuple[str, ...]:
    """Return the hosts in the order of their ranks; of each rank, where one's are not a row."""
    there = judge.cluster_of(plan.place.hosts)
    names = [there.host_of(rank).name for rank in range(plan.total_ranks)]
    rows = [name for name, _ in itertools.groupby(names)]
    return tuple(rows if len(rows) == len({*rows}) else names)


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_row = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"ranks {ranks[0]}-{ranks[-1]}" if is_row else f"ranks {', '.join(map(str, ranks))}"


def _balance(judge: Judge, plan: Plan, devices: Sequence[Sequence[int]]) -> str:
    """Return the seconds of each stage on its slowest device, with its name where they differ."""
    by_kind = [seconds_before(judge.graph, profile.op_s) for profile in judge.profiles]
    ends = [0, *(c + 1 for c in plan.cuts), len(by_kind[0]) - 1]
    slowest = [
        max((by_kind[kind][end] - by_kind[kind][start], kind) for kind in kinds)
        for kinds, (start, end) in zip(devices, itertools.pairwise(ends), strict=True)
    ]
    words = [format_seconds(seconds) for seconds, _ in slowest]
    if len({kind for _, kind in slowest}) > 1:
        names = (judge.profiles[kind].kind for _, kind in slowest)
        words = [f"{word} on {name}" for word, name in zip(words, names, strict=True)]
    return "per micro-batch: " + ", ".join(words)


def _rests_on(judge: Judge) -> Decision:
    """Return what the seconds of each kind of device rest on, those of idle ones too."""
    value = ", ".join(f"{row.kind or row.basis.device} {row.basis.how}" for row in judge.profiles)
    why = "a micro-batch: " + ", ".join(map(_seconds_on, judge.profiles))
    return Decision("seconds", value, "only choice", why)


def _seconds_on(profile: Profile) -> str:
    words = f"{format_seconds(profile.micro_batch_s)} on {profile.kind or profile.basis.device}"
    basis = profile.basis
    if basis.steps:
        return f"{words} (rests on {basis.steps:,} measured steps of {_runs(basis.runs)})"
    if not basis.samples:
        how = f"by the pool of measured runs, may be off by {basis.error:.0%}"
        return f"{words} ({how})" if basis.error else words
    told = f"learned from {basis.samples} measured segments of runs"
    return f"{words} ({told}, may be off by {basis.error:.0%})"


def _runs(count: int) -> str:
    return "a run" if count == 1 else f"{count:,} runs"


def _how_much(plan: Plan) -> str:
    """Return whether all stages recompute, or some, or none."""
    return "all" if repeats_all(plan) else "some" if any(plan.recompute) else "none"


def _yes_no(plan: Plan) -> str:
    rows = enumerate(plan.recompute)
    stages = [f"{k} in part" if again is not True else str(k) for k, again in rows if again]
    return f"stages {', '.join(stages)}" if stages else "none"


def _saved(judge: Judge, plan: Plan) -> str:
    """Return what recompute saves of activations, and the seconds that it takes, in words."""
    if not any(plan.recompute) or not trains(plan.schedule):
        return ""
    whole = plan.changed(recompute=(False,) * plan.num_stages)
    priced, kept = judge.price(plan), judge.price(whole)
    held, less = (sum(s.forward.change_bytes for s in p.stages.stages) for p in (kept, priced))
    seconds = priced.costs.action_s[B].max(axis=1) - kept.costs.action_s[B].max(axis=1)
    words = f"keeps {format_bytes(less)} of {format_bytes(held)} of activations a micro-batch"
    return f"{words}, for {format_seconds(float(seconds.sum()))} of repeated work; "


def _against(
    best: Candidate, field: Field, judge: Judge, name: str, value: Callable[[Plan], object]
) -> str:
    """Return the best alternative, in words."""
    own = value(best.plan)

    def differs(plan: Plan) -> bool:
        return value(plan) != own

    if not any(map(differs, field.plans)):
        return "nothing else is possible"
    found = field.best(1, differs)
    if not found and field.was_cut_short:
        return "none was found in time"
    if not found:
        return f"every other {name} was refused: {field.refusal(differs)}"
    other = found[0]
    plan = other.plan
    used = _order_of(judge, plan)
    names = used if len(used) <= _MOST_NAMES else (*used[:_MOST_NAMES], "...")
    where = "" if used == _order_of(judge, best.plan) else f" on {', '.join(names)}"
    what = f"{plan.replicas} x {whole_stages(plan)} stages{where}, {name_of(plan.schedule)}"
    if any(plan.recompute):
        what += f", recompute{'' if repeats_all(plan) else ' ' + _yes_no(plan)}"
    peak = max(other.peak_bytes)
    larger = _times(peak, max(best.peak_bytes))
    slower = f"{other.step_s / best.step_s:.2f}x of this" if best.step_s else "against none"
    slower = "a tie" if is_tie(other.step_s, best.step_s) else slower
    paid = field.objective == "cost" and best.usd > 0
    usd = f", {other.usd:.3g} usd, {_times(other.usd, best.usd)}" if paid else ""
    return (
        f"best alternative ({what}): {format_seconds(other.step_s)}, {slower}{usd}, and "
        f"{format_bytes(peak)}, {larger}"
    )


def _times(other: float, own: float) -> str:
    return f"{other / own:.2f}x" if own else "against none"
