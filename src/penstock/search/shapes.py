"""Shapes: every (hosts, ranks, replicas, depth, schedule, stages) that a search tries."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from penstock.bits import AS_IT_IS
from penstock.cluster.cluster import Cluster
from penstock.cluster.order import host_orders, placed
from penstock.errors import PlanError, ScheduleError
from penstock.graph.graph import Graph
from penstock.graph.tensor.cuts import apart_only
from penstock.plan.terms import Buffers
from penstock.program.passes.offload import Offloaded
from penstock.rules.rule import Rule
from penstock.schedule import SCHEDULES
from penstock.schedule.dapple import dapple, turns_of
from penstock.schedule.grid import InnerAxis, evenly, unlike
from penstock.schedule.layer_pipe import layer_pipe
from penstock.schedule.recipe import (
    AnySchedule,
    Recipe,
    any_schedule,
    built,
    built_on,
    has_window,
    name_of,
    shares_ranks,
    trains,
    units_of,
    words_of,
)
from penstock.schedule.schedule import Schedule
from penstock.schedule.weight_rule import words_of_ranks
from penstock.sums import sums_way

if TYPE_CHECKING:
    from penstock.job import Job

_FEW = 16  # ranks of a cluster, of which every number is tried
_HALVES = 4  # numbers that are tried of more: all, half of them, and so on
_DEEP = (  # schedules that are tried there
    *("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v"),
    *("zb_greedy", "v_half", "v_min", "dual_pipe_v"),
)
_DIVIDED = "gpipe", "one_f_one_b", "zb_h1"  # schedules that are tried where ops are divided, too
_ALL_WAYS = 6  # ranks, of which every way to divide them among stages is tried


class RankExchange(NamedTuple):
    """How ranks are to exchange what they have computed.

    post_validation: as in a plan, where gradients are clipped.
    wire:      fewest bits of a number in messages there and back, as in a plan.
    sums:      as in a plan.
    topology:  as in a plan, or "fastest".
    woven:     whether those that divide ops compute one micro-batch while they collect of another;
               else where that is better.
    """

    post_validation: bool = False
    wire: tuple[int, int] = (AS_IT_IS, AS_IT_IS)
    sums: str | None = None
    topology: str | None = None
    woven: bool = False


class JobNeeds(NamedTuple):
    """What a job and its run need of every plan, whatever the user decides.

    buffers:   as in a plan; "one copy" leaves 1 replica, and what `in_order` leaves.
    in_order:  whether only schedules are wanted in which each stage lives on one rank of its
               replica, and takes its micro-batches in order.
    as_placed: whether hosts stay in the order in which they stand.
    state_stays: whether the optimizer's state cannot be in far memory, or in parts.
    whole:     whether replicas divide their state only where memory is short: for runs that go on
               when ranks are lost, and then have all that is needed.
    """

    buffers: Buffers = "exact"
    in_order: bool = False
    as_placed: bool = False
    state_stays: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the user decided beforehand; None leaves it to the search.

    schedule:  a recipe, its name, or a schedule that stands for itself.
    offload:   what every stage has in far memory while it is not needed; None: nothing.
    memory:    the most bytes that a rank may hold, or that each one may; then the cluster's devices
               have no more.
    rules:     that every plan keeps to.
    tensor:    ranks that divide the ops of each stage: 1, or what the traced step is rewritten for;
               None: also steps that are rewritten for several, where that may pay.
    context:   whether those divide the tokens of each sequence, and have all weights.
    """

    ranks: int | None = None
    replicas: int | None = None
    stages: int | None = None
    schedule: str | AnySchedule | None = None
    recompute: bool | None = None
    offload: Offloaded | None = None
    memory: int | tuple[int, ...] | None = None
    rules: tuple[Rule, ...] = ()
    tensor: int | None = 1
    context: bool = False
    exchange: RankExchange = RankExchange()  # noqa: RUF009 - a tuple
    needs: JobNeeds = JobNeeds()  # noqa: RUF009 - a tuple

    @property
    def axis(self) -> InnerAxis:
        """The ranks that are to divide each stage inside, if any are."""
        return InnerAxis(self.tensor or 1, self.context)

    def as_in(self, job: "Job") -> "Fixed":
        """Return the same, values being exchanged as a job says."""
        return replace(self, exchange=self.exchange._replace(wire=job.fewest_bits, sums=job.sums))

    def needing(self, **needs: Any) -> "Fixed":
        """Return the same, other things being needed of every plan."""
        return replace(self, needs=self.needs._replace(**needs))


@dataclass(frozen=True, slots=True)
class Shape:
    """What is decided before the cuts; `shares` of each replica, `hosts` as in a Plan."""

    replicas: int
    num_ranks: int
    stages: int
    schedule: AnySchedule
    shares: tuple[int, ...]
    hosts: tuple[str, ...] = ()


def shapes(graph: Graph, cluster: Cluster, micro_batches: int, fixed: Fixed) -> Iterator[Shape]:
    """Yield what `fixed` leaves, on the first ranks in every order of hosts that is worth trying.

    First those on the hosts as they stand in the cluster.
    """
    sizes = list(_sizes(graph, cluster.num_ranks, micro_batches, fixed))
    seen: set[tuple[str, ...]] = set()
    orders = host_orders(cluster)
    for order in orders[:1] if fixed.needs.as_placed else orders:
        there = placed(cluster, order)
        holding = [there.host_of(rank).name for rank in range(cluster.num_ranks)]
        for across, row in itertools.groupby(sizes, lambda size: size.replicas * size.num_ranks):
            ranks = across * graph.tensor
            if (key := tuple(holding[:ranks])) in seen:
                continue
            seen.add(key)
            used = tuple(dict.fromkeys(key))
            standing = tuple(host.name for host in cluster.hosts[: len(used)])
            hosts = () if used == standing else used
            yield from (replace(size, hosts=hosts) for size in row)


def _sizes(graph: Graph, most: int, micro_batches: int, fixed: Fixed) -> Iterator[Shape]:
    for ranks in _across(graph, most, fixed):
        for replicas in range(1, ranks + 1):
            if (
                ranks % replicas
                or micro_batches < replicas
                or fixed.replicas not in (None, replicas)
                or (replicas > 1 and fixed.needs.buffers == "one copy")
            ):
                continue
            if ranks == replicas and _wants_pipeline(graph, most, fixed):
                continue
            shares, way = evenly(micro_batches, replicas), sums_way(fixed.exchange.sums)
            if unlike(shares) and (graph.tensor > 1 or way.averages or way.served):
                continue
            if way.served and most > 1 and not 1 < replicas == ranks:
                continue
            yield from _pipelines(graph, ranks // replicas, shares, fixed, few=most <= _FEW)


def _across(graph: Graph, most: int, fixed: Fixed) -> Iterator[int]:
    """Yield the numbers of ranks that are tried; those that divide ops together count as one."""
    return (n // graph.tensor for n in _numbers(most, fixed) if n % graph.tensor == 0)


def _numbers(most: int, fixed: Fixed) -> Iterable[int]:
    """Return the numbers of ranks that are tried on a cluster of `most`."""
    if fixed.ranks is not None:
        return [fixed.ranks] if 1 <= fixed.ranks <= most else []
    if most <= _FEW:
        return range(1, most + 1)
    return [most >> halves for halves in reversed(range(_HALVES))]


def _wants_pipeline(graph: Graph, num_ranks: int, fixed: Fixed) -> bool:
    """Return whether a schedule is fixed and there can be a pipeline to have it."""
    if isinstance(fixed.schedule, Schedule):
        return fixed.schedule.num_ranks > 1
    most = (fixed.ranks or num_ranks) // graph.tensor // (fixed.replicas or 1)
    return fixed.schedule is not None and min(most, len(graph.cut_points) + 1) > 1


def _pipelines(
    graph: Graph, num_ranks: int, shares: tuple[int, ...], fixed: Fixed, *, few: bool
) -> Iterator[Shape]:
    most = len(graph.cut_points) + 1 - len(apart_only(graph))
    wanted = fixed.schedule
    usual = _synchronous(num_ranks, most) if few or num_ranks == 1 else map(Recipe, _DEEP)
    if graph.tensor > 1 and num_ranks > 1:
        usual = map(Recipe, _DIVIDED)
    asked = _wanted(wanted, num_ranks, most) if wanted else usual
    for each in asked:
        if each == _layered(num_ranks) and _wants_order(fixed):
            continue  # what it divides, two ranks have
        for stages in _stage_counts(each, num_ranks) if fixed.stages is None else (fixed.stages,):
            if not 1 <= stages <= most:
                continue
            if unlike(shares) and (isinstance(each, Schedule) or has_window(each)):
                continue
            made = [built_on(each, stages, share, num_ranks) for share in {*shares}]
            if all(one and (one.is_in_order or not _wants_order(fixed)) for one in made):
                yield Shape(len(shares), num_ranks, stages, each, shares)


def _wanted(given: str | AnySchedule, num_ranks: int, most: int) -> list[AnySchedule]:
    """Return the schedules that `given` leaves: one, unless it can divide ranks and does not say.

    Of 1F1B-RR each way to divide so many ranks among stages, of dapple too; of more than 6, those
    in which one stage has more than one.  Of layer_pipe, also on as many processors.
    """
    asked = any_schedule(given)
    if not isinstance(asked, Recipe):
        return [asked]
    if asked == Recipe(layer_pipe.__name__):
        return [asked, _layered(num_ranks)]
    if asked.builder not in ("round_robin", dapple.__name__) or "ranks" in dict(asked.arguments):
        return [asked]
    ways: list[AnySchedule] = [
        replace(asked, arguments=(*asked.arguments, ("ranks", _words(ranks))))
        for ranks in _divided(num_ranks, most)
        if asked.builder == "round_robin" or max(ranks) > 1
    ]
    return ways if asked.builder == "round_robin" else [asked, *ways]


def _layered(num_ranks: int) -> Recipe:
    """Return layer_pipe of more stages than ranks; the search says what work they are."""
    return Recipe(layer_pipe.__name__, (("processors", num_ranks),))


def _divided(num_ranks: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield up to `most` numbers above 0 that add up to `num_ranks`.

    Of many ranks those with one of them above 1.
    """
    if num_ranks > _ALL_WAYS:
        if num_ranks <= most:
            yield (1,) * num_ranks
        for stages in range(1, min(num_ranks, most + 1)):
            more = num_ranks - stages + 1
            for at in range(stages):
                yield (*(1,) * at, more, *(1,) * (stages - at - 1))
        return
    for ends in itertools.product((False, True), repeat=num_ranks - 1):
        cuts = [at for at, is_end in enumerate(ends, 1) if is_end]
        if len(cuts) >= most:
            continue
        yield tuple(b - a for a, b in itertools.pairwise([0, *cuts, num_ranks]))


def has_turns(schedule: AnySchedule) -> TypeGuard[Recipe]:
    """Return whether a recipe is of one synchronous step, and says on how many ranks stages are."""
    if not isinstance(schedule, Recipe) or schedule.builder != dapple.__name__:
        return False
    return "ranks" in dict(schedule.arguments)


def _words(ranks: Sequence[int]) -> int | str:
    return ranks[0] if len(ranks) == 1 else words_of_ranks(ranks)


def _wants_order(fixed: Fixed) -> bool:
    return fixed.needs.in_order or fixed.needs.buffers == "one copy"


def _synchronous(num_ranks: int, most: int) -> list[Recipe]:
    """Return the schedules that are tried if none is fixed; on one rank all are the same.

    most:  stages that there can be.
    """
    if num_ranks == 1:
        return [Recipe("one_f_one_b")]
    each = (Recipe(make.__name__) for make in SCHEDULES)
    found = [recipe for recipe in each if trains(recipe) and not has_window(recipe)]
    several = [ranks for ranks in _divided(num_ranks, most) if 1 < len(ranks) < num_ranks]
    return [*found, _layered(num_ranks)] + [
        Recipe(dapple.__name__, (("policy", policy), ("ranks", _words(ranks))))
        for ranks in several
        for policy in ("A", "B")
    ]


def _stage_counts(schedule: AnySchedule, num_ranks: int) -> tuple[int, ...]:
    """Return the numbers of stages to try: two or three on a rank, where they share ranks.

    One too, if the schedule is then other than those of one stage on a rank: made for links.
    """
    if isinstance(schedule, Schedule):
        return (schedule.num_stages,)
    if units := units_of(schedule):
        return (sum(units),)
    if has_turns(schedule):
        named = turns_of(str(dict(schedule.arguments)["ranks"]))
        left = num_ranks - sum(map(len, named))
        return (len(named) + left,) if left >= 0 else ()
    if schedule == _layered(num_ranks):
        return num_ranks + 1, 2 * num_ranks
    if shares_ranks(schedule):
        one = (num_ranks,) if schedule.takes_links else ()
        return *one, 2 * num_ranks, 3 * num_ranks
    if has_window(schedule):  # of which one may have any stage on several
        return tuple(range(num_ranks, 0, -1))
    return num_ranks, num_ranks - 1  # fewer than ranks, where one of them lives on several


def nothing_fits(graph: Graph, cluster: Cluster, micro_batches: int, fixed: Fixed) -> PlanError:
    """Return the error that says why there is no shape."""
    most = len(graph.cut_points) + 1
    if fixed.stages is not None and fixed.stages > most:
        message = (
            f"{fixed.stages} stages need {fixed.stages - 1} cut points; the model has {most - 1}"
        )
        return PlanError(message, hint=f"use at most {most} stages")
    asked = _asked(fixed)
    there = f"{cluster.num_ranks} ranks, {most - 1} cut points"
    message = f"no plan fits {asked}: {there}, {micro_batches} micro-batches a step"
    if isinstance(fixed.schedule, Schedule):
        return PlanError(message, hint=_what_would_fit_it(fixed.schedule, micro_batches, fixed))
    return PlanError(message, hint=_what_would_fit(micro_batches, fixed))


def _asked(fixed: Fixed) -> str:
    """Return what is fixed, in words."""
    names = ("ranks", "replicas", "stages", "schedule", "recompute", "tensor")
    asked = {n: getattr(fixed, n) for n in names if getattr(fixed, n) is not None}
    if fixed.tensor == 1:
        del asked["tensor"]
    if fixed.context:
        asked["context"] = asked.pop("tensor")
    if fixed.schedule is not None:
        asked["schedule"] = words_of(any_schedule(fixed.schedule))
    words = [f"{name} {value}" for name, value in asked.items()]
    words += ["the rules"] if fixed.rules else []
    if fixed.needs.buffers == "one copy":
        words.append("one copy of each stage")
    elif fixed.needs.in_order:
        words.append("micro-batches in order")
    return ", ".join(words) or "anything"


def _what_would_fit(micro_batches: int, fixed: Fixed) -> str:
    if _wants_order(fixed):
        return "leave replicas and schedule to the search: the model's buffers need one copy"
    if fixed.schedule is None or (stages := fixed.stages or _stages_named(fixed.schedule)) is None:
        return "ask for less, or leave more to the search"
    asked = any_schedule(fixed.schedule)
    try:
        ranks = built(asked, stages, micro_batches).num_ranks
    except ScheduleError as problem:
        return problem.hint or problem.message
    return f"{name_of(asked)} puts {stages} stages on {ranks} ranks: give ranks={ranks}"


def _stages_named(given: str | AnySchedule) -> int | None:
    """Return the stages of which the schedule names the ranks, if it names any."""
    asked = any_schedule(given)
    if not isinstance(asked, Recipe) or (ranks := dict(asked.arguments).get("ranks")) is None:
        return None
    return len(str(ranks).split("-"))


def _what_would_fit_it(written: Schedule, micro_batches: int, fixed: Fixed) -> str:
    """Return what would fit a schedule that stands for itself."""
    replicas, left = divmod(micro_batches, written.num_micro_batches)
    if left:
        return f"write it out for {micro_batches} micro-batches, or a number that divides them"
    copies = f"{replicas} replica{'s' * (replicas > 1)}"
    wrong = fixed.stages not in (None, written.num_stages) or fixed.replicas not in (None, replicas)
    if wrong:
        return f"it is of {written.num_stages} stages; the step is {copies} of it"
    ranks, verb = replicas * written.num_ranks, "is" if replicas == 1 else "are"
    return f"{copies} of it {verb} {ranks} ranks: give ranks={ranks}"
