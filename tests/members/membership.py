"""Membership: who goes on when ranks die and lines are cut, as a model that is searched to its end.

A state is what three members know and what is on its way; an event is one thing that one of them,
or the world, does.  `search` looks at every order of events within limits: deaths, cuts, mends, a
newcomer, steps.  Who may decide on what is decided by the product's own functions (views.py).

    vote      a member's gradients of a step are whole
    see       it learns that all have voted: the step counts
    notice    it takes another one for dead (its line ended), or for silent (no line carries)
    stop      it leaves its generation and tells what it has done
    hear      a word arrives; words to one member from another keep no order
    catch up  it makes the update of a step that others have seen happen
    decide    it is the first that is left, and may: the next view
    write     of a run that is over, the end is written down; then lines end

Leaves out: how state moves, times, and members that were given up and come again.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import NamedTuple

from penstock.members.mesh import Fate, LastSeen
from penstock.members.views import Left, fates_of, go_on, left_of
from penstock.members.words import Halt


class Knows(NamedTuple):
    """One member: `view` is a place in `World.views`; `heard` are the halts of others, and its own.

    late:   those of the lost that ended when another one was no longer heard.
    phase:  step, stopped, ending (its last step is done), over, out (others went on without it),
            asks (a newcomer), dead.
    """

    phase: str = "step"
    view: int = 0
    done: int = 0
    voted: bool = False
    lost: frozenset[tuple[int, Fate]] = frozenset()
    heard: frozenset[tuple[int, int, int, tuple[int, ...]]] = frozenset()
    late: frozenset[int] = frozenset()


class Generation(NamedTuple):
    """A view: its number, the step that it begins with, its members, that before by its place."""

    number: int
    step: int
    members: tuple[int, ...]
    before: int = -1


class Told(NamedTuple):
    """A word on its way: a halt (generation, done, lost), or a view by its place."""

    source: int
    target: int
    what: tuple[int, int, tuple[int, ...]] | int


class World(NamedTuple):
    """All members, the views there have been, lines that are cut, and words on their way.

    through:  steps for which all of a view have voted, and whether a newcomer asked: by its place.
    """

    members: tuple[Knows, ...]
    views: tuple[Generation, ...]
    cut: frozenset[tuple[int, int]] = frozenset()
    words: frozenset[Told] = frozenset()
    through: frozenset[tuple[int, int, bool]] = frozenset()
    ended: bool = False
    spent: tuple[int, int, int] = (0, 0, 0)  # deaths, cuts, mends


class ViolationError(Exception):
    """An invariant that does not hold, with the events that led there."""


@dataclass(frozen=True)
class Rules:
    """How members decide; a test plants a fault by another one."""

    left_of: Callable[..., Left | None] = left_of
    go_on: Callable[..., bool] = go_on
    looks_at_end: bool = True
    keeps_to_first: bool = True  # of two views of one number, the one that it has heard before
    resigns_ahead: bool = True
    cut_is_death: bool = False
    fates_of: Callable[[Mapping[int, LastSeen]], Mapping[int, Fate]] = fates_of


@dataclass(frozen=True)
class Limits:
    """How much happens: ranks, deaths, cuts, mends, steps, generations after the first."""

    ranks: int = 3
    deaths: int = 1
    cuts: int = 1
    mends: int = 1
    steps: int = 2
    generations: int = 2
    joins: bool = False


@cache
def _left(
    rules: Rules,
    number: int,
    members: tuple[int, ...],
    lost: frozenset[tuple[int, Fate]],
    heard: frozenset[tuple[int, int, int, tuple[int, ...]]],
    late: frozenset[int],
) -> Left | None:
    fates = dict(lost)
    ends = {m: LastSeen(fate, 1.0, 2.0 if m in late else 0.0) for m, fate in lost}
    stopped = {m: Halt(gen, done, (), {}, None, away) for m, gen, done, away in sorted(heard)}
    left = rules.left_of(number, members, fates, stopped)
    if left is None or not left.members or not rules.go_on(members, left, rules.fates_of(ends)):
        return None
    return left


@dataclass
class Model:
    """The events of a world, and what must hold in each of its states."""

    rules: Rules = field(default_factory=Rules)
    limits: Limits = field(default_factory=Limits)

    def first(self) -> World:
        """Return the world as a run begins."""
        everyone = tuple(range(self.limits.ranks))
        newcomer = (Knows("asks", -1),) if self.limits.joins else ()
        return World((*[Knows()] * self.limits.ranks, *newcomer), (Generation(1, 0, everyone),))

    def events(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield what may happen next, and the world then."""
        for m, own in enumerate(world.members):
            if own.phase in ("step", "stopped"):
                yield from self._of_member(world, m, own)
            if own.phase == "ending":
                yield (
                    f"write {m}",
                    self._put(world, m, own._replace(phase="over"))._replace(ended=True),
                )
        for word in world.words:
            yield f"hear {word}", self._heard(world, word)
        yield from self._of_the_world(world)

    def _of_member(self, world: World, m: int, own: Knows) -> Iterator[tuple[str, World]]:
        view = world.views[own.view]
        if own.phase == "step":
            yield from self._of_steps(world, m, own, view)
            halts = any(gen == view.number and away for _, gen, _, away in own.heard)
            if halts or {*dict(own.lost)} & {*view.members}:
                yield f"stop {m}", self._stopped(world, m, own)
        for other in view.members:
            if other == m or other in dict(own.lost):
                continue
            fate = self._fate(world, m, other)
            if fate is not None:
                lost, late = own.lost | {(other, fate)}, own.late
                is_quiet = any(m in pair for pair in world.cut) or "silent" in dict(lost).values()
                if fate != "silent" and is_quiet:
                    late |= {other}
                elif fate == "silent" and _pair(m, other) not in world.cut:  # it was told so
                    late |= {each for each, how in own.lost if how != "silent"}
                new = own._replace(lost=lost, late=late)
                yield f"notice {m} {other} {fate}", self._put(world, m, new)
        if own.phase == "stopped":
            ahead = [
                done for _, gen, done, _ in own.heard if gen == view.number and done > own.done
            ]
            if ahead:
                yield f"catch up {m}", self._stopped(world, m, own._replace(done=own.done + 1))
            yield from self._decided(world, m, own, view)

    def _of_steps(
        self, world: World, m: int, own: Knows, view: Generation
    ) -> Iterator[tuple[str, World]]:
        if not own.voted and own.done < self.limits.steps:
            new = self._put(world, m, own._replace(voted=True))
            theirs = [new.members[other] for other in view.members]
            if all(
                each.view == own.view and (each.voted or each.done > own.done) for each in theirs
            ):
                asks = any(each.phase == "asks" for each in world.members)
                new = new._replace(through=new.through | {(own.view, own.done, asks)})
            yield f"vote {m}", new
        for place, step, regroups in world.through:
            if (place, step) == (own.view, own.done) and own.voted:
                after = own._replace(done=step + 1, voted=False)
                if after.done == self.limits.steps:
                    yield f"see {m}", self._put(world, m, after._replace(phase="ending"))
                elif regroups:
                    yield f"see {m}", self._stopped(world, m, after)
                else:
                    yield f"see {m}", self._put(world, m, after)

    def _fate(self, world: World, m: int, other: int) -> Fate | None:
        """Return what a member may take another one for now."""
        phase, is_cut = world.members[other].phase, _pair(m, other) in world.cut
        if is_cut:
            return "died" if self.rules.cut_is_death else "silent"
        if phase == "dead":
            return "died"
        if phase in ("over", "out"):
            return "left"
        return "silent" if m in dict(world.members[other].lost) else None  # who gives up says so

    def _stopped(self, world: World, m: int, own: Knows) -> World:
        view = world.views[own.view]
        away = tuple(sorted(other for other, _ in own.lost if other in view.members))
        halt = view.number, own.done, away
        heard = {each for each in own.heard if each[0] != m} | {(m, *halt)}
        own = own._replace(phase="stopped", voted=False, heard=frozenset(heard))
        return self._send(self._put(world, m, own), m, halt)

    def _send(self, world: World, m: int, what: tuple[int, int, tuple[int, ...]] | int) -> World:
        there = [
            other
            for other in range(len(world.members))
            if other != m and _pair(m, other) not in world.cut
            if other not in dict(world.members[m].lost)
        ]
        words = {
            word
            for word in world.words
            if word.source != m or isinstance(word.what, int) or isinstance(what, int)
        }
        words |= {Told(m, other, what) for other in there if _hears(world.members[other])}
        return world._replace(words=frozenset(words))

    def _heard(self, world: World, word: Told) -> World:
        world = world._replace(words=world.words - {word})
        own = world.members[word.target]
        if not _hears(own):
            return world
        if not isinstance(word.what, int):
            heard = {each for each in own.heard if each[0] != word.source}
            heard |= {(word.source, *word.what)}
            return self._put(world, word.target, own._replace(heard=frozenset(heard)))
        return self._adopted(world, word.target, own, word.what)

    def _adopted(self, world: World, m: int, own: Knows, place: int) -> World:
        view = world.views[place]
        known = world.views[own.view].number if own.view >= 0 else 0
        if known > view.number or (known == view.number and self.rules.keeps_to_first):
            return world
        is_ahead = own.phase != "asks" and own.done > view.step
        if m not in view.members or (is_ahead and self.rules.resigns_ahead):
            return self._put(world, m, own._replace(phase="out")) if own.phase != "asks" else world
        if own.phase != "asks" and own.done != view.step:
            raise ViolationError(
                f"member {m} has done {own.done} steps, and goes on after {view.step}"
            )
        return self._put(world, m, Knows("step", place, view.step))

    def _decided(
        self, world: World, m: int, own: Knows, view: Generation
    ) -> Iterator[tuple[str, World]]:
        here = [other for other in view.members if other not in dict(own.lost)]
        if here[0] != m:
            return
        if len(world.views) > self.limits.generations:
            return
        left = _left(self.rules, view.number, view.members, own.lost, own.heard, own.late)
        if left is None or m not in left.members:
            return
        if world.ended and self.rules.looks_at_end:
            yield f"over {m}", self._put(world, m, own._replace(phase="over"))
            return
        if world.ended:
            raise ViolationError(f"member {m} goes on after the end")
        joins = [
            other
            for other, each in enumerate(world.members)
            if each.phase == "asks"
            and not any(_pair(other, one) in world.cut for one in left.members)
        ]
        new = Generation(view.number + 1, left.done, (*left.members, *joins), own.view)
        place = len(world.views)
        world = world._replace(views=(*world.views, new))
        world = self._put(world, m, Knows("step", place, left.done))
        yield f"decide {m} {new}", self._send(world, m, place)

    def _of_the_world(self, world: World) -> Iterator[tuple[str, World]]:
        deaths, cuts, mends = world.spent
        for m, own in enumerate(world.members):
            if deaths < self.limits.deaths and own.phase not in ("dead", "over", "out"):
                words = frozenset(word for word in world.words if word.target != m)
                dead = self._put(world, m, own._replace(phase="dead"))
                yield f"kill {m}", dead._replace(words=words, spent=(deaths + 1, cuts, mends))
        for pair in combinations(range(len(world.members)), 2):
            if pair not in world.cut and cuts < self.limits.cuts:
                kept = frozenset(w for w in world.words if _pair(w.source, w.target) != pair)
                cut = world._replace(cut=world.cut | {pair}, words=kept)
                yield f"cut {pair}", cut._replace(spent=(deaths, cuts + 1, mends))
            if pair in world.cut and mends < self.limits.mends:
                mended = world._replace(cut=world.cut - {pair}, spent=(deaths, cuts, mends + 1))
                yield f"mend {pair}", self._sought(mended, pair)

    def _sought(self, world: World, pair: tuple[int, int]) -> World:
        """Two that could not reach each other learn how it stands, as `Mesh.seek` tells them."""
        for m, other in (pair, pair[::-1]):
            own, theirs = world.members[m], world.members[other]
            if (other, "silent") not in own.lost or own.phase not in ("step", "stopped"):
                continue
            gone = {"dead": "died", "over": "left", "out": "left"}.get(theirs.phase)
            if gone is not None:
                lost = own.lost - {(other, "silent")} | {(other, gone)}
                world = self._put(world, m, own._replace(lost=lost))
            elif theirs.view >= 0 and m not in world.views[theirs.view].members:
                world = self._put(world, m, own._replace(phase="out"))
        return world

    @staticmethod
    def _put(world: World, m: int, own: Knows) -> World:
        return world._replace(members=(*world.members[:m], own, *world.members[m + 1 :]))

    def check(self, world: World) -> None:
        """Raise where an invariant does not hold.

        Raises:   ViolationError: two generations of one number count steps; a step counts again
                  though somebody went on from where it had counted.
        """
        counting = {place for place, _, _ in world.through}
        for one, other in combinations(sorted(counting), 2):
            first, second = world.views[one], world.views[other]
            if first.number == second.number and {one, other} <= self._alive(world):
                raise ViolationError(f"two generations {first.number}: {first} and {second}")
        for one, step, _ in world.through:
            for other, again, _ in world.through:
                if step == again and one < other and other in self._alive(world):
                    self._check_again(world, one, other, step)

    def _check_again(self, world: World, one: int, other: int, step: int) -> None:
        """Raise where a step has counted in two views, and members go on from the first of them."""
        for m, own in enumerate(world.members):
            if own.phase not in ("step", "stopped") or own.view == one:
                continue
            line = self._line(world, own.view)
            if one in line and other not in line and world.views[own.view].step > step:
                raise ViolationError(
                    f"step {step} counts again, and member {m} has gone on from it"
                )

    @staticmethod
    def _alive(world: World) -> set[int]:
        """Return the views in which members are that have not died or left."""
        phases = "step", "stopped", "ending"
        return {each.view for each in world.members if each.phase in phases}

    @staticmethod
    def _line(world: World, place: int) -> set[int]:
        """Return a view and those before it, by place."""
        found = set[int]()
        while place >= 0:
            found.add(place)
            place = world.views[place].before
        return found


class Found(NamedTuple):
    """What a search has looked at: how many states and events, and how the runs of it ended."""

    states: int
    events: int
    ends: dict[str, int]


def search(model: Model, *, most: int = 3_000_000) -> Found:
    """Look at every state that can be reached, the nearest first.

    Raises:   ViolationError: with the shortest way there.
    """
    first = model.first()
    came: dict[World, tuple[World, str] | None] = {first: None}
    queue, count, ends = deque([first]), 0, dict[str, int]()
    while queue:
        world = queue.popleft()
        none = True
        try:
            for name, new in model.events(world):
                count, none = count + 1, False
                if new not in came:
                    came[new] = world, name
                    model.check(new)
                    queue.append(new)
        except ViolationError as problem:
            raise ViolationError(f"{problem}: {'; '.join(_way(came, world))}") from None
        assert len(came) <= most, "too many states"
        if none:
            end = " ".join(sorted(each.phase for each in world.members))
            ends[end] = ends.get(end, 0) + 1
    return Found(len(came), count, ends)


def _way(came: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    names = list[str]()
    while (before := came[world]) is not None:
        world, name = before
        names.append(name)
    return names[::-1]


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)


def _hears(own: Knows) -> bool:
    return own.phase in ("step", "stopped", "asks")


def planted(**changes: object) -> Rules:
    """Return the rules with a fault."""
    return replace(Rules(), **changes)
