"""Degrees: steps whose ops several ranks divide, searched beside those whose ops are whole.

A degree is another step: rewritten, measured, searched.  So it is tried only where it may pay, by
what is known of the whole step: first by a bound that takes a millisecond (graph/tensor/least.py),
then by the seconds of the rewritten step's ops and collects, the others' measured or estimated.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from penstock.bits import AS_IT_IS
from penstock.choose.prepare import divided_step
from penstock.cluster.cluster import Cluster
from penstock.errors import GraphError, PlanError
from penstock.graph.graph import Graph
from penstock.graph.parts import part_in
from penstock.graph.tensor.cuts import LOG_SUM_EXP, OWN_ROWS, collects_in, how_of
from penstock.graph.tensor.least import least_s
from penstock.job import Job
from penstock.plan.plan import Decision
from penstock.profile.expert_load import ExpertLoad, loads_in_words, parts_of_products
from penstock.schedule.grid import InnerAxis
from penstock.schedule.recipe import any_schedule, has_window
from penstock.search.candidate import Objective
from penstock.search.shapes import Fixed
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.choose.choose import Joining, Option
    from penstock.graph.tensor.choose_slices import OpDivision
    from penstock.graph.trace import Capture
    from penstock.listener import Listener

    Found = tuple[Joining, Option | PlanError]  # what a search of a way has found

log = logging.getLogger(__name__)
MOST = 8  # ranks that divide ops, unless more are asked for
WORTH = 0.05  # of the score of the best plan: predictions are no closer than that
_MIB = float(1 << 20)


class Degree(NamedTuple):
    """What was found of so many ranks that divide ops.

    expected_s:  of a step, before it was measured; `option`: what a search found, if it was worth
                 one; `problem`: why there is none.
    """

    ranks: int
    expected_s: float = inf
    option: "Option | None" = None
    problem: str = ""


def check_alone(tensor: int | None, context: int | None, asks: Mapping[str, object]) -> None:
    """Raise where ops or tokens are to be divided together with what no such plan has.

    asks:     what was requested, by name.
    Raises:   PlanError.
    """
    names = [name for name, value in asks.items() if value]
    degrees = {"tensor": tensor or 1, "context": context or 1}
    if min(degrees.values()) > 1:
        message = f"{tensor} ranks are to divide ops, and {context} tokens; no plan has both"
        raise PlanError(message, hint="leave out tensor, or context")
    for name, ranks in degrees.items():
        if ranks > 1 and names:
            what = "the ops of stages" if name == "tensor" else "the tokens of sequences"
            message = f"{ranks} ranks are to divide {what}, and no such plan has {names[0]}"
            raise PlanError(message, hint=f"leave out {name}, or {', '.join(names)}")


def axis_asked(
    tensor: int | None, context: int | None, asks: Mapping[str, object]
) -> tuple[int | None, bool]:
    """Return how many ranks are to divide ops, and whether tokens in place of them.

    Raises:   PlanError: together with what no such plan has.
    """
    check_alone(tensor, context, asks)
    if (context or 1) > 1:
        return context, True
    return degree_asked(tensor, asks), False


def degree_asked(tensor: int | None, asks: Mapping[str, object]) -> int | None:
    """Return how many ranks are to divide ops, None: as the search finds best.

    That is 1 where what else is asked for leaves no more, and where torchrun has started the ranks.
    Raises:   PlanError: more are asked for, together with what no such plan has.
    """
    from penstock.processes.started import under_torchrun

    check_alone(tensor, None, asks)
    return 1 if tensor is None and (any(asks.values()) or under_torchrun()) else tensor


class DegreeSearch:
    """The search for how many ranks divide the ops of a job's step.

    tried:    what was found of the whole step, by the way of joining micro-batches.
    search:   of the step of a way, rewritten so.
    is_over:  whether the time for it is over.
    """

    def __init__(
        self,
        tried: "Sequence[Found]",
        fixed: Fixed,
        cluster: Cluster | None,
        search: "Callable[[Joining, Capture], Option]",
        is_over: Callable[[], bool],
    ) -> None:
        assert cluster is not None, "a search is of some machines"
        self.tried, self.fixed, self.cluster = tried, fixed, cluster
        self.search, self.is_over = search, is_over
        self.rows: list[Degree] = []

    def options(self, objective: Objective) -> "Iterator[Option]":
        """Yield what is found with 2, 4, 8 ranks, each better than all before by `WORTH`."""
        from penstock.state.shards import updates_by_number

        ways = [way for way, _ in self.tried if self._may(way)]
        if self.fixed.tensor is not None or not ways or not self._is_open(objective):
            return
        usable = [found for _, found in self.tried if not isinstance(found, PlanError)]
        best = min(usable, key=lambda found: found.best.score(objective), default=None)
        way = ways[0] if best is None or best.way not in ways else best.way
        for ranks in self._counts():
            if self.is_over() or not self._may_gain(way, best, ranks):
                continue
            if not updates_by_number(way.job, way.captured.model):
                return
            self.rows.append(made := self._degree(way, best, ranks))
            if made.option is not None and (
                best is None or _is_better(made.option, best, objective)
            ):
                best = made.option
                yield best

    def _is_open(self, objective: Objective) -> bool:
        """Return whether nothing is fixed that no divided plan has."""
        fixed = self.fixed
        is_late = fixed.schedule is not None and has_window(any_schedule(fixed.schedule))
        asked = (
            is_late,
            fixed.offload,
            fixed.exchange.post_validation,
            fixed.rules,
            fixed.needs.whole,
        )
        return objective != "memory" and fixed.needs.buffers == "exact" and not any(asked)

    def _may(self, way: "Joining") -> bool:
        """Return whether the ops of a way's step can be divided as it is."""
        job, is_plain = way.job, way.joined >= 1 and not way.captured.graph.slices
        return is_plain and job.sums is None and job.fewest_bits == (AS_IT_IS, AS_IT_IS)

    def _counts(self) -> list[int]:
        """Return how many ranks are tried."""
        most, counts = self.fixed.ranks or self.cluster.num_ranks, [2, 4, MOST]
        return [n for n in counts if n <= most and (self.fixed.ranks or n) % n == 0]

    def _may_gain(self, way: "Joining", best: "Option | None", ranks: int) -> bool:
        """Return whether the bound of all plans with so many ranks is below the best."""
        if best is None:
            return True
        graph, collect_s = way.captured.graph, self._collect_s(ranks)
        rows = self._op_s(way, ranks)
        least = min(least_s(graph, op_s, ranks, collect_s) for op_s in rows)
        return self._step_s(way, least, ranks) <= (1 - WORTH) * best.best.step_s

    def _collect_s(self, ranks: int) -> Callable[[float], float]:
        def collect_s(size_bytes: float) -> float:
            return self.cluster.sum_s(size_bytes, range(ranks))

        return cache(collect_s)

    def _step_s(self, way: "Joining", seconds: float, ranks: int) -> float:
        """Return the seconds of a step whose micro-batches are shared by all, none waiting."""
        return seconds * self._share(way, ranks)

    def _share(self, way: "Joining", ranks: int) -> float:
        """Return the micro-batches of a step for each set of ranks that divide ops."""
        across = (self.fixed.ranks or self.cluster.num_ranks) // ranks
        return way.job.micro_batches / max(1, across)

    def _op_s(self, way: "Joining", ranks: int) -> "list[tuple[float, ...]]":
        """Return the seconds of each op on each kind of device; of a parameter, those of its update
        that each micro-batch bears.
        """
        share, nodes = self._share(way, ranks), way.captured.graph.nodes
        return [
            tuple(
                profile.update.update_s_per_byte * node.size_bytes / share
                if node.kind == "parameter"
                else s
                for node, s in zip(nodes, profile.op_s, strict=True)
            )
            for profile in way.profiles
        ]

    def _degree(self, way: "Joining", best: "Option | None", ranks: int) -> Degree:
        made = divided_or_why(way.captured, ranks)
        if isinstance(made, str):
            return Degree(ranks, problem=made)
        collect_s = self._collect_s(ranks)
        seconds = min(
            expected_s(way.captured, made, op_s, collect_s, ranks=ranks, loads=profile.loads)
            for op_s, profile in zip(self._op_s(way, ranks), way.profiles, strict=True)
        )
        expected = self._step_s(way, seconds, ranks)
        if best is not None and expected > (1 - WORTH) * best.best.step_s:
            return Degree(ranks, expected)
        try:
            return Degree(ranks, expected, self.search(way, made.capture))
        except (PlanError, GraphError) as problem:
            return Degree(ranks, expected, problem=problem.message)


def divided_or_why(captured: "Capture", ranks: int) -> "OpDivision | str":
    """Return a step whose ops so many ranks divide, which nobody asked for; or why it is whole."""
    from penstock.graph.tensor.choose_slices import division

    try:
        return division(captured, ranks)
    except GraphError as problem:
        return problem.message
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as problem:
        log.debug("ops are not divided among %s ranks", ranks, exc_info=True)
        return f"an op cannot be computed in slices ({type(problem).__name__})"


def expected_s(
    captured: "Capture",
    made: "OpDivision",
    op_s: Sequence[float],
    collect_s: Callable[[float], float],
    *,
    ranks: int,
    loads: Sequence[ExpertLoad] = (),
) -> float:
    """Return the seconds of a micro-batch of a divided step, by those of the whole step's nodes.

    loads:    of the whole step's experts.
    """
    from penstock.graph.tensor.placed import Placing, RankSpeed

    latency_s = collect_s(0.0)
    per_byte = (collect_s(_MIB) - latency_s) / (2 * _MIB * (ranks - 1) / ranks)
    rate = 1 / per_byte if per_byte else inf
    parts = parts_of_products(captured.graph, loads, ranks)
    speed = RankSpeed(link_bytes_per_s=rate, latency_s=latency_s, op_s=op_s, busiest=parts)
    rows = zip(captured.graph.nodes, op_s, strict=True)
    updates = (
        s / (ranks if node.name in made.held else 1) for node, s in rows if node.kind == "parameter"
    )
    placing = Placing(captured, ranks, speed, spread=made.spread)
    return placing.layout(made.held).seconds + sum(updates)


def _is_better(found: "Option", best: "Option", objective: Objective) -> bool:
    return found.best.score(objective)[0] < (1 - WORTH) * best.best.score(objective)[0]


def as_asked(
    job: Job, captured: "Capture", axis: InnerAxis, listener: "Listener"
) -> "tuple[Job, Capture]":
    """Return a job and its step, divided by as many ranks as are asked for, if any are.

    Raises:   PlanError: slices of weights would not be updated as the whole ones are.
              GraphError: no op can be divided.
    """
    from penstock.state.shards import updates_by_number

    if axis.ranks == 1:
        return job, captured
    if not axis.context and not updates_by_number(job, captured.model):
        message = "the job's optimizer is not known to update each number by itself"
        raise PlanError(message, hint="leave out tensor, or use an optimizer such as AdamW")
    return job, divided_step(captured, axis, listener)


# -- in words -------------------------------------------------------------------------------------


def slices_in_words(graph: Graph) -> str:
    """Return what of a step is divided, what stays whole, and what that sends."""
    if graph.context:
        return _tokens_in_words(graph)
    parameters = [node for node in graph.nodes if node.kind == "parameter"]
    sliced = {n.name: p.key for n in parameters if (p := part_in(n.name)) and p.order is not None}
    all_bytes = sum(node.size_bytes for node in parameters)
    own_bytes = sum(node.size_bytes for node in parameters if node.name in sliced)
    collects = collects_in(graph.nodes)
    moved = sum(graph.nodes[graph.nodes[at].inputs[0]].size_bytes for at in collects)
    told = [
        f"{len(sliced)} of {len(parameters)} parameters in slices "
        f"({format_bytes(own_bytes)} of {format_bytes(all_bytes)} a rank): "
        f"{_alike(sliced.values())}"
    ]
    whole = [node.name for node in parameters if node.name not in sliced]
    told += [f"whole: {_alike(whole)}"] if whole else []
    by_class = any(node.target == LOG_SUM_EXP for node in graph.nodes)
    told += ["a loss over classes by classes"] if by_class else []
    spread = sum(how_of(graph.nodes, at) == "scatter" for at in collects)
    told += [f"{spread} sums by tokens"] if spread else []
    products = sum(node.target == OWN_ROWS and node.phase == "F" for node in graph.nodes)
    told += [f"{products} products of experts by rows"] if products else []
    exchanges = sum(how_of(graph.nodes, at) == "exchange" for at in collects)
    told += [f"{exchanges} exchanges of slices"] if exchanges else []
    return "; ".join((*told, f"{len(collects)} collects of {format_bytes(moved)} a micro-batch"))


def division_in_words(way: "Joining") -> str:
    """Return what of a step is divided, and how unlike the ranks are that divide its experts."""
    graph, loads = way.captured.graph, way.profiles[0].loads
    told = slices_in_words(graph), loads_in_words(graph, loads)
    return "; ".join(filter(None, told))


def _tokens_in_words(graph: Graph) -> str:
    collects, nodes = collects_in(graph.nodes), graph.nodes
    moved = sum(nodes[nodes[at].inputs[0]].size_bytes for at in collects)
    told = [f"each has 1 / {graph.tensor} of the tokens of a sequence, and all weights"]
    gathers = [at for at in collects if how_of(nodes, at) == "gather"]
    forward = sum(nodes[at].phase == "F" for at in gathers)
    times = f"{forward} times forward, {len(gathers) - forward} times backward"
    told += [f"what attention reads of all tokens is gathered {times}"]
    return "; ".join((*told, f"{len(collects)} collects of {format_bytes(moved)} a micro-batch"))


def _alike(names: Iterable[str]) -> str:
    """Return names, those once that differ in numbers only."""
    return ", ".join(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))


def decision(
    first: "Option", options: "Sequence[Option]", rows: Sequence[Degree], asked: int | None
) -> tuple[Decision, ...]:
    """Return what is decided of the ranks that divide ops, and why; nothing where none was tried.

    options:  all that were found; `first` is the best of them.
    """
    graph = first.way.captured.graph
    if asked is not None:
        if asked == 1:
            return ()
        what, words = "context" if graph.context else "tensor", division_in_words(first.way)
        return (Decision(what, f"{asked} ranks", "user", f"requested: {words}"),)
    if not rows:
        return ()
    if graph.tensor == 1:
        words = (f"{row.ranks} ranks {_figures(row)}" for row in rows)
        return (Decision("tensor", "1 rank", "search", "; ".join(words)),)
    whole = [option for option in options if option.way.captured.graph.tensor == 1]
    other = min((option.best.step_s for option in whole), default=None)
    gain = "no plan fits that divides none"
    if other is not None:
        gain = f"{format_seconds(first.best.step_s)} in place of {format_seconds(other)} undivided"
    others = [f"{row.ranks} ranks {_figures(row)}" for row in rows if row.ranks != graph.tensor]
    why = "; ".join((gain, division_in_words(first.way), *others))
    return (Decision("tensor", f"{graph.tensor} ranks", "search", why),)


def _figures(row: Degree) -> str:
    if row.option is not None:
        return format_seconds(row.option.best.step_s)
    return (
        f"not possible: {row.problem}"
        if row.problem
        else (f"about {format_seconds(row.expected_s)}, by the seconds of the whole ops")
    )
