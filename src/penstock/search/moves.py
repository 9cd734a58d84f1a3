"""Moves: what can be decided of each stage, one decision at a time, and climbing by them.

Computed again, in far memory - state, activations, weights -, divided among replicas or whole, how
early it is fetched: whatever a stage can do without is one list of moves, and one simulation says
what a move frees and costs.  So decisions that belong to different works are found together: a
stage that is gathered early, another kept whole, a third with its state in far memory.

`climbed` takes one move after the other while the plan gets better: while it lacks memory, better
is what lacks less; then what is faster.  Where no single move helps, a move that is faster but
lacks memory is taken with one that frees it, in the order of what both together should take.

`lowered` begins with the fastest plan that is found as if there were room for all, and takes the
moves that cost the fewest seconds for a byte that lacks, until it fits: so more room gives hardly
ever a slower plan.

Source:  the four passes of DeepCompile, arXiv:2504.09983, decided together; not its fixed order.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.plan.plan import Plan
from penstock.plan.stage import StagePlan
from penstock.program.passes.offload import AWAY, Offloaded
from penstock.program.passes.shard import Sharding
from penstock.schedule.recipe import copied_of
from penstock.search.candidate import Candidate
from penstock.search.field import Field
from penstock.search.judge import Judge
from penstock.search.recompute import keeping_all
from penstock.search.resized import as_one, in_two
from penstock.search.sharded import in_units, lets_go, order

_FEWEST, _MOST = 60, 300  # plans that are simulated
_ACTIONS = 40_000  # of all of them, stages times micro-batches of a step
_MOST_PAIRS = 24  # of moves that are simulated together, for each climb
_TOPS = 3  # from which pairs of moves are tried
_LEAST = 1e-3  # of a step: what more decisions have to gain
_NOTICED_S = 2.5e-4  # where none is needed: of less, in a step, no prediction tells
_NEAR = 1.25  # times the best: what is started from
_AHEAD = 0, 1, 2

_What: TypeAlias = Literal["again", "far", "shard", "prefetch", "ahead", "beside", "units"]
_FAR: tuple[Offloaded, ...] = get_args(Offloaded)
_SHARDS: tuple[Sharding, ...] = get_args(Sharding)


class StageMove(NamedTuple):
    """One decision taken otherwise.

    stage:  of which; -1: of the plan as a whole.
    """

    what: _What
    stage: int
    value: bool | str | int

    def apply(self, plan: Plan, graph: Graph) -> Plan | None:
        """Return the plan with this decision; None where it has it, or cannot have it."""
        if self.stage >= plan.num_stages:  # it was of another number of stages
            return None
        try:
            made = self._applied(plan, graph)
        except PlanError:
            return None
        return None if made == plan else made

    def _applied(self, plan: Plan, graph: Graph) -> Plan | None:
        stages = plan.num_stages
        match self.what:
            case "again":
                again = list(plan.recompute)
                again[self.stage] = bool(self.value)
                return plan.changed(recompute=tuple(again))
            case "far":
                words = list[Offloaded](plan.offload or ("none",) * stages)
                words[self.stage] = cast("Offloaded", self.value)
                return _placed(plan, words, plan.shard)
            case "shard":
                parts = list[Sharding](plan.shard or ("replicate",) * stages)
                parts[self.stage] = cast("Sharding", self.value)
                return _placed(plan, plan.offload, parts)
            case "prefetch":
                return plan.changed(prefetch=int(self.value))
            case "ahead":
                ahead = list(plan.ahead)
                ahead[self.stage] = int(self.value)
                return plan.changed(prefetch=ahead)
            case "beside":
                return plan.changed(beside=bool(self.value))
            case "units":
                make = in_two if self.value == 2 else as_one
                return make(plan, graph, self.stage)


def _placed(plan: Plan, words: Sequence[Offloaded], parts: Sequence[Sharding]) -> Plan:
    """Return the plan with what is in far memory, and what in parts, and nothing that needs none.

    Weights that several replicas have go to far memory in parts.
    """
    row = list[Sharding](parts or ("replicate",) * plan.num_stages)
    for stage, word in enumerate(words):
        if plan.replicas > 1 and "weights" in AWAY[word] and row[stage] == "replicate":
            row[stage] = "shard"
    shards = any(word != "replicate" for word in row)
    fetches = shards or any("weights" in AWAY[word] for word in words)
    return plan.changed(
        offload=words,
        beside=plan.overlap.beside and any(word != "none" for word in words),
        shard=row,
        prefetch=plan.overlap.prefetch if fetches else 0,
        parts=plan.place.parts if shards else (),
    )


def _bare(judge: Judge, plan: Plan) -> Plan:
    """Return the plan with everything near, whole, and kept but for what rules say."""
    kept = keeping_all(judge, plan)
    return kept.changed(offload=(), beside=False, shard=(), prefetch=0, parts=())


class MayMove(NamedTuple):
    """What may be decided otherwise.

    again, far, state, shards:  whether something is computed again, goes to far memory, the
                optimizer's state with it, or is divided among replicas.
    beside:     whether copies may run beside computes.
    cuts:       whether stages may be cut into units.
    """

    again: bool
    far: bool
    state: bool
    shards: bool
    beside: bool
    cuts: bool

    def moves(self, plan: Plan) -> Iterator[StageMove]:
        """Yield all moves there are for plans with as many stages and replicas."""
        shards = self.shards and plan.replicas > 1
        fetches = plan.num_stages > 1 and (shards or (self.far and self.state))
        if fetches:
            yield from (StageMove("prefetch", -1, ahead) for ahead in _AHEAD)
        if self.beside and self.far:
            yield from (StageMove("beside", -1, beside) for beside in (False, True))
        for stage in range(plan.num_stages):
            if self.again:
                yield from (StageMove("again", stage, again) for again in (False, True))
            if self.far:
                words = _FAR if self.state else ("none", "activations")
                yield from (StageMove("far", stage, word) for word in words)
            if shards:
                yield from (StageMove("shard", stage, word) for word in _SHARDS)
        for stage, own in enumerate(plan.stages if fetches else ()):
            if _fetches(own):
                yield from (StageMove("ahead", stage, ahead) for ahead in _AHEAD)
        if self.cuts:
            yield from self._resizing(plan)

    def _resizing(self, plan: Plan) -> Iterator[StageMove]:
        """Yield moves of stages that do without something: one in two, or two as one."""
        without = [_does_without(stage) for stage in plan.stages]
        for stage in range(plan.num_stages):
            if without[stage]:
                yield StageMove("units", stage, 2)
            if any(without[stage : stage + 2]) and stage + 1 < plan.num_stages:
                yield StageMove("units", stage, 1)


def _fetches(stage: StagePlan) -> bool:
    """Return whether the weights of a stage are gathered or loaded for a use."""
    return stage.weights != "replicate" or "weights" in AWAY[stage.far]


def _does_without(stage: StagePlan) -> bool:
    """Return whether anything of a stage is divided, in far memory, or computed again."""
    return stage.weights != "replicate" or stage.far != "none" or bool(stage.recompute)


class _TriedMove(NamedTuple):
    """A move and what the plan with it gives."""

    move: StageMove
    candidate: Candidate


class Climber:
    """Takes moves from a candidate on while that makes it better, and there is time.

    It simulates fewer plans the more there is in each.
    """

    def __init__(self, field: Field, may: MayMove, worth: float = math.inf) -> None:
        self.field, self.judge = field, field.judge
        self._may, self._most, self._worth = may, min(_MOST, worth), worth
        self._known: dict[Plan, Candidate] = {}

    def is_over(self) -> bool:
        """Return whether no further plan is simulated."""
        return len(self._known) >= self._most or self.field.is_over()

    def climbed(self, best: Candidate, *, beside: bool, pairs: bool = False) -> Candidate:
        """Return the best candidate that is reached from `best` by single moves.

        beside:  whether copies may run beside computes.  pairs: by pairs of moves, too.
        """
        self._allow(best.plan, beside=beside)
        if not pairs:
            return self._by_singles(best)
        before = None
        while best is not before and not self.is_over():
            before = best
            best = self._by_pairs(self._by_singles(best))
        return best

    def lowered(self, start: Candidate, *, beside: bool) -> Candidate:
        """Return what fits below the fastest plan that singles reach from `start` without a cap.

        Where nothing fits, the one that lacks least.
        """
        self._allow(start.plan, beside=beside)
        best, before = start, None
        while best is not before:
            before = best
            for move in self._may.moves(best.plan):
                made = None if self.is_over() else self._with(best, move)
                if made is not None and made.peak_bytes and made.step_s < best.step_s:
                    best = made
                    if move.what == "units":
                        break
        self._allow(best.plan, beside=beside)  # what was climbed up has to come down
        return self._relieved(best) if best.refused else best

    def _relieved(self, best: Candidate) -> Candidate:
        """Return the candidate with moves that free what lacks, the cheapest for a byte first.

        What a move frees and costs is simulated anew before it is taken.
        """
        moves = (move for move in self._may.moves(best.plan) if move.what != "units")
        queue = [(0.0, at, move) for at, move in enumerate(moves)]
        while best.refused and queue and not self.is_over():
            _, at, move = heapq.heappop(queue)
            made = self._with(best, move)
            freed = self._freed(best, made)
            if made is None or not freed:
                continue
            price = (made.step_s - best.step_s) / freed
            if queue and price > queue[0][0]:
                heapq.heappush(queue, (price, at, move))
            else:
                best = made
        return best

    def _freed(self, best: Candidate, made: Candidate | None) -> int:
        """Return how many bytes less lack of a candidate; 0 where not fewer."""
        if made is None or not made.peak_bytes:
            return 0
        return max(0, self.judge.lacking_bytes(best) - self.judge.lacking_bytes(made))

    def _allow(self, plan: Plan, *, beside: bool) -> None:
        """Allow as many more plans as there is time for in one climb."""
        self._may = self._may._replace(beside=beside)
        most = _ACTIONS // (plan.num_stages * plan.step_micro_batches)
        most = max(_FEWEST, min(_MOST, most)) // 2
        self._most = min(len(self._known) + most, self._worth)

    def _by_singles(self, best: Candidate) -> Candidate:
        before = None
        while best is not before:
            before = best
            for move in self._may.moves(best.plan):
                if self.is_over():
                    return best
                if _room(move, best.plan) == (-1 if best.refused else 1):
                    continue  # a plan that fits needs no room, one that does not has none
                other = self._with(best, move)
                if other is not None and order(self.field, other) < order(self.field, best):
                    best = other
                    if move.what == "units":  # the others are of stages as they were numbered
                        break
        return best

    def _by_pairs(self, best: Candidate) -> Candidate:
        """Return a better candidate by a move that is faster and one that makes room; or `best`."""
        if best.refused:
            return best
        faster = [one for one in self._all(best, -1) if one.candidate.step_s < best.step_s]
        rooms = self._all(best, 1) if faster else ()
        leaner = [one for one in rooms if _frees(one.candidate, best)]
        pairs = sorted(
            (one.candidate.step_s + other.candidate.step_s - best.step_s, a, b)
            for a, one in enumerate(faster)
            for b, other in enumerate(leaner)
            if one.move != other.move
        )
        for seconds, a, b in pairs[:_MOST_PAIRS]:
            if self.is_over() or seconds >= best.step_s:
                break
            first = faster[a].move.apply(best.plan, self.judge.graph)
            both = None if first is None else leaner[b].move.apply(first, self.judge.graph)
            made = None if both is None else self._candidate(both)
            if made is not None and order(self.field, made) < order(self.field, best):
                return made
        return best

    def _all(self, best: Candidate, room: int) -> Iterator[_TriedMove]:
        """Yield what each move gives from a candidate on that makes room, or takes it."""
        for move in self._may.moves(best.plan):
            if self.is_over():
                return
            if _room(move, best.plan) == -room:
                continue
            made = self._with(best, move)
            if made is not None and made.peak_bytes:
                yield _TriedMove(move, made)

    def _with(self, best: Candidate, move: StageMove) -> Candidate | None:
        plan = move.apply(best.plan, self.judge.graph)
        return None if plan is None else self._candidate(plan)

    def _candidate(self, plan: Plan) -> Candidate:
        if plan not in self._known:
            self._known[plan] = self.judge.candidate(plan)
        return self._known[plan]

    def starts(self, rows: Sequence[Candidate], *, always: bool) -> Iterator[Candidate]:
        """Yield plans in units from which no search of one kind begins.

        One with all state in parts of replicas; and, where the best of `rows` does without
        something, or `always`, one with all of it in far memory.
        """
        if not rows:
            return
        plan = rows[0].plan
        is_short = always or bool(rows[0].refused) or does_without(plan)
        replicas = [each.plan for each in rows if each.plan.replicas > 1]
        wanted = [(replicas[0], "shard")] if replicas and self._may.shards else []
        wanted += [(plan, "far")] if is_short and self._may.far and self._may.state else []
        for of, what in wanted:
            bare = _bare(self.judge, of)
            units = in_units(self.judge, bare) if self._may.cuts else bare
            shard: tuple[Sharding, ...] = ("shard",) * units.num_stages if of.replicas > 1 else ()
            far: tuple[Offloaded, ...] = ("all",) * units.num_stages if what == "far" else ()
            made = units.changed(shard=shard, offload=far)
            if not self.judge.rules.broken(made, self.judge.graph):
                yield self._candidate(made)


def _room(move: StageMove, plan: Plan) -> int:
    """Return whether a move does nothing but make room, 1, nothing but take it, -1, or either."""
    match move.what:
        case "again":
            return 1 if move.value else -1
        case "far":
            now = plan.stages[move.stage].far
            away, other = AWAY[now], AWAY[cast("Offloaded", move.value)]
            return (away <= other) - (other <= away)
        case _:
            return 0


def _frees(candidate: Candidate, best: Candidate) -> bool:
    pairs = zip(candidate.peak_bytes, best.peak_bytes, strict=True)
    return any(one < other for one, other in pairs)


def with_moves(
    field: Field,
    candidates: Iterable[Candidate],
    copies_beside: Callable[[Plan], bool],
    may: MayMove,
    error: float,
) -> Iterator[Candidate]:
    """Yield what climbing makes of the best candidates, and of those that `Climber.starts` adds.

    error:  share of a step within which the simplest is taken (simplest.py); 0: the best is.
    """
    if field.objective == "memory" or not field.effort.rescues:
        return
    rows = _movable(field, candidates, error)
    best = next(iter(rows), None)
    if best is None or _worth(field, best) < 1:
        return
    climber = Climber(field, may, _worth(field, best))
    forms: set[tuple[object, ...]] = set()
    tops, lacks = list[Candidate](), list[Candidate]()  # lacks: begun without enough memory
    for start in (*rows, *climber.starts(rows, always=not error)):
        plan = start.plan
        form = plan.cuts, plan.schedule, plan.replicas, plan.place.hosts
        form = form if start in rows else (*form, plan.offload)
        if field.is_over():
            return
        if form in forms or (start in rows and not _is_near(field, start, best)):
            continue
        forms.add(form)
        lacks += [start] if start.refused and start not in rows else []
        made = climber.climbed(start, beside=may.beside and copies_beside(plan))
        tops.append(made)
        if _is_worth(field, made, best, error):
            best = made
            yield made
    if not error or best.refused or does_without(best.plan) or lacks:
        beside = may.beside and copies_beside(best.plan)
        tops = sorted({*tops, best}, key=lambda each: order(field, each))[:_TOPS]
        lowered = (climber.lowered(each, beside=beside) for each in (best, *lacks[:1]))
        for start in (*lowered, *tops):
            made = climber.climbed(start, beside=beside, pairs=True)
            if _is_worth(field, made, best, error):
                best = made
                yield made


def _worth(field: Field, best: Candidate) -> float:
    """Return how many plans a run pays for; where none fits, as many as may."""
    is_needed = best.refused or field.objective == "memory"
    worth_s = field.effort.worth_s
    return math.inf if is_needed or not worth_s else best.step_s / worth_s


def _movable(field: Field, candidates: Iterable[Candidate], error: float) -> list[Candidate]:
    """Return the candidates whose stages can do without something, the best first.

    Where the best is wanted, however little it gains, the best of those in the field, too.
    """
    moves = partial(_moves, field.judge)
    rows = [each for each in candidates if moves(each.plan)]
    if not error:
        rows += field.best(1, moves)
        rows += field.best(1, lambda plan: plan.replicas > 1 and moves(plan))
    return sorted(rows, key=lambda candidate: order(field, candidate))


def _is_worth(field: Field, candidate: Candidate, best: Candidate, error: float) -> bool:
    """Return whether a candidate is so much better that it is worth what it makes of a plan."""
    if candidate.refused or best.refused:
        return not candidate.refused
    score, least = (each.score(field.objective)[0] for each in (candidate, best))
    if score >= (1 - _LEAST) * least:
        return False
    is_needed = does_without(best.plan) or not error or field.objective == "memory"
    return is_needed or best.step_s - candidate.step_s > _NOTICED_S


def does_without(plan: Plan) -> bool:
    """Return whether stages of a plan do without anything."""
    return plan.shards or plan.offloads or any(plan.recompute)


def _is_near(field: Field, candidate: Candidate, best: Candidate) -> bool:
    """Return whether a candidate may become better than the best; where none fits, it may."""
    if best.refused:
        return True
    score, least = (each.score(field.objective)[0] for each in (candidate, best))
    return not candidate.refused and score <= _NEAR * least


def _moves(judge: Judge, plan: Plan) -> bool:
    """Return whether stages of a plan can do without what they hold."""
    return lets_go(judge, plan) and not copied_of(plan.schedule)
