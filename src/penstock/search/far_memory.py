"""Far: where memory is short, plans of which as much waits in far memory as is needed, and no more.

Of plans that lack memory a few are taken, as they are and in units of a block, with what a stage
can do without: the optimizer's state, what F keeps (copied away, or computed again), and its
weights, gradients and state at once.  These are taken in the order of their seconds for a byte
until the plan fits, by halving; then the dearest are given back one by one where it fits without
them.  Where ranks have cores to spare all is tried with copies beside computes and weights loaded
ahead, too, which needs more room.  Everything or nothing of one kind is tried besides, so that no
such plan is better.  What counts is always the simulation.

Source:  COMPASS, arXiv:2501.06780 (weights loaded for all micro-batches at once); adaptive offload
         by what lacks, DeepCompile, arXiv:2504.09983; knapsack by seconds over bytes, as there.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from penstock.graph.stages import Recompute
from penstock.plan.plan import Plan
from penstock.program.codes import COPIED, COST_ROW, OFFLOAD, RELOAD
from penstock.program.passes.offload import AWAY, Offloaded
from penstock.schedule.orders import B, F, I, U, W
from penstock.schedule.recipe import copied_of
from penstock.search.candidate import Candidate
from penstock.search.field import Field
from penstock.search.judge import Judge
from penstock.search.recompute import keeping_all
from penstock.search.sharded import in_units, lets_go

_MOST_PLANS = 2
_Kind: TypeAlias = Literal["state", "activations", "weights", "again"]
_WORD_OF: dict[frozenset[str], Offloaded] = {kinds: word for word, kinds in AWAY.items()}
_ALL: tuple[Offloaded, ...] = ("state", "activations", "both", "all")


class _Item(NamedTuple):
    """What a stage can do without, the bytes of its rank that this frees, and what it costs."""

    stage: int
    kind: _Kind
    freed_bytes: float
    seconds: float


class _CopyWay(NamedTuple):
    """How copies run: beside computes, and how many stages ahead weights are loaded."""

    beside: bool
    prefetch: int


def with_far(
    field: Field, copies_beside: Callable[[Plan], bool], *, moves_state: bool, may_cut: bool
) -> Iterator[Candidate]:
    """Yield plans with copies to far memory, for those of the field that lack memory.

    Some may lack it still.
    moves_state:  whether the optimizer's state can be copied.  may_cut:  whether into units.
    """
    if field.objective == "memory" or not field.effort.rescues:
        return
    judge, limit = field.judge, float("inf")
    copying = (profile.copying for profile in judge.profiles)
    if not all(each.far_s_per_byte for each in copying):  # nobody knows what it takes
        return
    usable = [c.score(field.objective)[0] for c in field.simulated if not c.refused]
    limit = min(usable, default=limit)
    found = [each for each in field.overfull(8 * _MOST_PLANS) if _may_wait(judge, each.plan)]
    for plan in dict.fromkeys(keeping_all(judge, each.plan) for each in found[:_MOST_PLANS]):
        units = in_units(judge, plan) if may_cut else plan
        for form in dict.fromkeys((plan, units)):
            start = judge.candidate(form)
            slower = start.peak_bytes and start.score(field.objective)[0] >= limit
            if field.is_over() or slower or judge.rules.broken(form, judge.graph):
                continue
            for how in (_CopyWay(False, 0), *([_CopyWay(True, 1)] if copies_beside(form) else [])):
                for made in _WaitingForm(judge, form, how, moves_state).candidates(field):
                    if not made.refused:
                        limit = min(limit, made.score(field.objective)[0])
                    yield made


def _may_wait(judge: Judge, plan: Plan) -> bool:
    """Return whether what stages of a plan hold can wait in far memory."""
    free = lets_go(judge, plan)
    return free and not copied_of(plan.schedule) and not plan.offloads


class _WaitingForm:
    """A plan, and how its copies run."""

    def __init__(self, judge: Judge, plan: Plan, how: _CopyWay, moves_state: bool) -> None:
        self.judge, self.how, self.moves_state = judge, how, moves_state
        divides = plan.replicas > 1 and moves_state
        self.plan = plan.changed(shard=("shard",) * plan.num_stages) if divides else plan
        self.said = judge.rules.of_stages("offload", plan, judge.graph)
        self.again = judge.rules.of_stages("recompute", plan, judge.graph)

    def candidates(self, field: Field) -> Iterator[Candidate]:
        """Yield the plan with as little as fits, and those with all of a kind that fit.

        Where none does, the one that lacks least.
        """
        best = self._least(field)
        yield best
        if self.how.beside:
            for word in _ALL:
                if word == "activations" or self.moves_state:
                    made = self.judge.candidate(self._all(word))
                    if not made.refused:
                        yield made

    def _least(self, field: Field) -> Candidate:
        items = sorted(self._items(), key=lambda each: each.seconds / each.freed_bytes)
        made = {len(items): self._made(items)}
        low, high = -1, len(items)  # not enough, enough
        while high - low > 1 and not made[len(items)].refused and not field.is_over():
            middle = (low + high) // 2
            made[middle] = self._made(items[:middle])
            low, high = (middle, high) if made[middle].refused else (low, middle)
        best, taken = made[high], items[:high]
        for item in sorted(taken, key=lambda each: -each.seconds):
            if best.refused or field.is_over():
                break
            rest = [each for each in taken if each != item]
            other = self._made(rest)
            if not other.refused and other.step_s <= best.step_s:
                best, taken = other, rest
        return best

    def _made(self, items: Sequence[_Item]) -> Candidate:
        """Return the plan without what the items say."""
        kinds: list[set[_Kind]] = [set() for _ in range(self.plan.num_stages)]
        for item in items:
            kinds[item.stage].add(item.kind)
        again = tuple(
            "again" in row or word == "yes" for row, word in zip(kinds, self.again, strict=True)
        )
        words: list[Offloaded] = [_word(row) for row in kinds]
        return self.judge.candidate(self._with(tuple(words), again))

    def _all(self, word: Offloaded) -> Plan:
        return self._with((word,) * self.plan.num_stages, self.plan.recompute)

    def _with(self, words: tuple[Offloaded, ...], again: tuple[Recompute, ...]) -> Plan:
        some = any(word != "none" for word in words)
        comes = self.plan.shards or {"weights", "all"} & {*words}
        return self.plan.changed(
            offload=words,
            beside=some and self.how.beside,
            prefetch=self.how.prefetch if comes and self.plan.num_stages > 1 else 0,
            recompute=again,
        )

    def _items(self) -> Iterator[_Item]:
        """Yield what can be done without, on the slowest device of any stage."""
        all_ = self.judge.price(self._all("all" if self.moves_state else "activations"))
        keeps, own = all_.costs.action_s.max(axis=2), all_.held[0]
        plan, flying = self.plan, self._in_flight()
        repeats = self.judge.price(self._all("none").changed(recompute=(True,) * plan.num_stages))
        assert own.copied is not None, "they are asked for"
        for stage, word in enumerate(self.said):
            rows = {kind: COST_ROW[[OFFLOAD, RELOAD], kind] for kind in COPIED}
            pair_s = {kind: float(keeps[row, stage].sum()) for kind, row in rows.items()}
            kept, state, both = map(int, own.copied[1, :, stage])
            if word is None and kept and flying[stage] > 1:
                seconds = plan.num_micro_batches * pair_s[F]
                yield _Item(stage, "activations", kept * (flying[stage] - 1), seconds)
            less = int(own.net[F, stage] - repeats.held[0].net[F, stage])
            if self.again[stage] is None and less > 0:
                seconds = plan.num_micro_batches * float(keeps[F, stage])
                yield _Item(stage, "again", less * flying[stage], seconds)
            if word is None and state and self.moves_state:
                yield _Item(stage, "state", state, pair_s[U])
            if word is None and both and self.moves_state:
                loads_s = 2 * all_.costs.unshard_s[stage] + all_.costs.shards_s[stage]
                yield _Item(stage, "weights", both + state, pair_s[U] + pair_s[W] + float(loads_s))

    def _in_flight(self) -> list[int]:
        """Return of how many micro-batches each stage holds what F keeps, at most."""
        orders = self.judge.schedule(self.judge.suited(self.plan)).orders
        found: list[int] = []
        for stage in range(self.plan.num_stages):
            kinds = orders.kinds[orders.stages == stage]
            ends = np.isin(kinds, (B, I))
            found.append(int(np.cumsum((kinds == F).astype(int) - ends).max(initial=1)))
        return found


def _word(kinds: set[_Kind]) -> Offloaded:
    """Return what a plan says of these; the state is moved with the weights anyway."""
    moved = {"state"} if "weights" in kinds else set[str]()
    return _WORD_OF[frozenset(moved | kinds - {"again"})]
