"""Ruled: what rules say of one graph, piece by piece, and whether a plan keeps to it.

Between two cut points there is a piece (graph/pieces.py).  A rule says that a cut has to be, or
must not be, or what becomes of a piece; a stage is of pieces of which the same is said.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from penstock.errors import PlanError
from penstock.graph.cut_points import slice_ends
from penstock.graph.graph import Graph
from penstock.graph.parts import key_in
from penstock.graph.pieces import (
    ends_of,
    is_inside,
    modules_by_piece,
    modules_of,
    outer,
    owners_by_piece,
)
from penstock.plan.plan import Decision, Plan
from penstock.rules.rule import Rule

Aspect = Literal["recompute", "offload", "shard"]
ASKED = "asked for"
ASPECTS: tuple[Aspect, ...] = ("recompute", "shard", "offload")  # each goes with those before
_SHARDING = {"shard": "shard", "replicate": "replicate", "keep": "shard_keep"}


class Said(NamedTuple):
    """A value, and the rule that says it."""

    value: str
    rule: Rule


@dataclass(frozen=True, slots=True)
class Ruled:
    """What rules say of a graph.

    rules:     in their order.
    ends:      of cut points, whether they "must" be cuts or "may not".
    values:    of pieces, by aspect.
    whole:     a rule about slices that the graph does not have; "": it has them.
    """

    rules: tuple[Rule, ...] = ()
    ends: Mapping[int, Said] = field(default_factory=dict[int, Said])
    values: Mapping[Aspect, Mapping[int, Said]] = field(
        default_factory=dict[Aspect, Mapping[int, Said]]
    )
    whole: str = ""

    @property
    def required(self) -> frozenset[int]:
        """Return the cut points that have to be cuts."""
        return frozenset(at for at, said in self.ends.items() if said.value == "must")

    @property
    def forbidden(self) -> frozenset[int]:
        """Return the cut points that must not be cuts."""
        return frozenset(at for at, said in self.ends.items() if said.value == "may not")

    def with_rest(self, aspect: Aspect, rule: Rule, graph: Graph) -> "Ruled":
        """Return what these rules say, and what `rule` does of every piece of which none does."""
        rest = dict.fromkeys(range(len(graph.cut_points) + 1), Said(rule.how, rule))
        return replace(
            self, values={**self.values, aspect: {**rest, **self.values.get(aspect, {})}}
        )

    def said(self, aspect: Aspect, piece: int) -> str | None:
        """Return the value that a rule gives a piece; None: none does."""
        row = self.values.get(aspect)
        found = None if row is None else row.get(piece)
        return None if found is None else found.value

    def of_stages(self, aspect: Aspect, plan: Plan, graph: Graph) -> tuple[str | None, ...]:
        """Return what is said of each stage of a plan that keeps to the rules."""
        return tuple(self.said(aspect, first) for first, _ in stages_in_pieces(plan, graph))

    def broken(self, plan: Plan, graph: Graph) -> str:
        """Return the first rule to which a plan does not keep, with what it has; "": to all."""
        if self.whole:
            return self.whole
        cuts = set(plan.cuts)
        for at, said in self.ends.items():
            if (at in cuts) != (said.value == "must"):
                name, how = graph.cut_points[at].name, "is" if at in cuts else "is not"
                return f"{said.rule}: {name!r} {how} a cut"
        for aspect, row in self.values.items():
            for stage, (first, end) in enumerate(stages_in_pieces(plan, graph)):
                own = value_of(plan, aspect, stage)
                for piece in range(first, end):
                    if (said := row.get(piece)) is not None and said.value != own:
                        return f"{said.rule}: stage {stage} has {own}"
        return ""

    def decisions(self) -> tuple[Decision, ...]:
        """Return what was decided, a decision for each rule."""
        return tuple(
            Decision(f"{rule.verb} {rule.pattern}", rule.how or "yes", "user", rule.place or ASKED)
            for rule in self.rules
        )


FREE = Ruled()


def stages_in_pieces(plan: Plan, graph: Graph) -> list[tuple[int, int]]:
    """Return for each stage its first piece, and the one behind its last."""
    ends = [0, *(cut + 1 for cut in plan.cuts), len(graph.cut_points) + 1]
    return list(pairwise(ends))


def value_of(plan: Plan, aspect: Aspect, stage: int) -> str:
    """Return what a plan says of a stage, as rules say it."""
    match aspect:
        case "recompute":
            again = plan.stages[stage].recompute
            return "no" if again is False else "yes" if again is True else "in part"
        case "offload":
            return plan.stages[stage].far
        case "shard":
            return plan.stages[stage].weights


def ruled(rules: Sequence[Rule], graph: Graph) -> Ruled:
    """Return what `rules` say of `graph`; those that replace modules say nothing of it.

    Raises:   PlanError: a pattern matches nothing, or what is no piece and ends at no cut point;
              two rules contradict each other.
    """
    modules, pieces = modules_of(graph), modules_by_piece(graph)
    ends: dict[int, Said] = {}
    values: dict[Aspect, dict[int, Said]] = {}
    for rule in rules:
        match rule.verb:
            case "cut":
                for at in _cuts(rule, graph, modules):
                    _say(ends, at, Said("must", rule), f"cut point {graph.cut_points[at].name!r}")
            case "fuse":
                found = _pieces(rule, graph, modules, pieces)
                _check_run(rule, found, pieces)
                for at in found[:-1]:
                    where = f"cut point {graph.cut_points[at].name!r}"
                    _say(ends, at, Said("may not", rule), where)
            case "recompute" | "offload" as aspect:
                row = values.setdefault(aspect, {})
                for at in _pieces(rule, graph, modules, pieces):
                    _say(row, at, Said(rule.how, rule), f"piece {at} ({_names(pieces[at])})")
            case "shard" | "replicate" | "keep":
                row, value = values.setdefault("shard", {}), _SHARDING[rule.verb]
                for at in _holding(rule, graph):
                    _say(row, at, Said(value, rule), f"piece {at} ({_names(pieces[at])})")
            case "split":
                for at in slice_ends(graph):
                    where = f"cut point {graph.cut_points[at].name!r}"
                    _say(ends, at, Said("must", rule), where)
            case "replace":
                pass
    _check_fused(ends, values)
    return Ruled(tuple(rules), ends, values, _whole(rules, graph))


def slices_asked(rules: Sequence[Rule], graph: Graph) -> dict[str, int]:
    """Return into how many slices rules cut parameters, by name: all that have rows and columns of
    the modules that they match.

    Raises:   PlanError: a pattern matches no module with such parameters; two rules contradict each
              other.
    """
    found: dict[str, Said] = {}
    names = {key_in(n.name) for n in graph.nodes if n.kind == "parameter" and len(n.shape) > 1}
    paths = dict.fromkeys(name for each in sorted(names) for name in outer(each)[:-1])
    for rule in rules:
        own = matched(rule, paths) if rule.verb == "split" else ()
        for name in sorted(names):
            if any(is_inside(name, module) for module in own):
                other = found.setdefault(name, Said(rule.how, rule))
                if other.value != rule.how:
                    message = f"{rule} contradicts {other.rule}, of {name}"
                    hint = "give each parameter one rule: narrow one of the patterns"
                    raise PlanError(message, hint=hint)
    return {name: int(said.value) for name, said in found.items()}


def _whole(rules: Sequence[Rule], graph: Graph) -> str:
    """Return the first rule about slices that a graph does not have, with what it has; "": none.

    Raises:   as `slices_asked`.
    """
    own, _ = dict(graph.slices), slices_asked(rules, graph)
    for rule in rules:
        for name, count in slices_asked([rule], graph).items():
            if own.get(name) != count:
                return f"{rule}: {name} is in {own.get(name, 'no')} slices"
    return ""


def matched(rule: Rule, modules: Iterable[str]) -> tuple[str, ...]:
    """Return the outermost of `modules` that the pattern of a rule matches.

    Raises:   PlanError: there is none.
    """
    names = list(modules)
    found: list[str] = []
    for name in names:
        is_held = any(is_inside(name, outer) for outer in found)
        if not is_held and fnmatch.fnmatchcase(name, rule.pattern):
            found.append(name)
    if not found:
        near = difflib.get_close_matches(rule.pattern, names, n=2, cutoff=0.0)
        hint = f"the nearest of {len(names)} modules: {' and '.join(near) or 'there is none'}"
        raise PlanError(f"{rule} matches no module of the traced step", hint=hint)
    return tuple(found)


def _cuts(rule: Rule, graph: Graph, modules: Sequence[str]) -> list[int]:
    """Return the cut points that a rule names: behind modules, or by their names.

    Raises:   PlanError: there is none.
    """
    points = graph.cut_points
    if rule.pattern.startswith(("after ", "before ")):
        named = [k for k, p in enumerate(points) if fnmatch.fnmatchcase(p.name, rule.pattern)]
        if not named:
            near = difflib.get_close_matches(rule.pattern, [p.name for p in points], 2, 0.0)
            hint = f"the nearest: {' and '.join(map(repr, near)) or 'there is none'}"
            raise PlanError(f"{rule}: there is no such cut point", hint=hint)
        return named
    found: list[int] = []
    for module in matched(rule, modules):
        own = ends_of(graph, module)
        if not own:
            message = f"{rule}: the end of {module} is no cut point"
            raise PlanError(message, hint=_nearest(graph, module))
        found += own
    return found


def _nearest(graph: Graph, module: str) -> str:
    """Return the two cut points nearest to the end of a module, in words."""
    nodes = graph.nodes
    last = max(i for i, n in enumerate(nodes) if n.phase == "F" and is_inside(n.module, module))
    before = [point.name for point in graph.cut_points if point.at <= last][-1:]
    after = [point.name for point in graph.cut_points if point.at > last][:1]
    return f"cut points near it: {' and '.join(map(repr, before + after)) or 'there is none'}"


def _pieces(
    rule: Rule, graph: Graph, modules: Sequence[str], pieces: Sequence[frozenset[str]]
) -> list[int]:
    """Return the pieces of which all work is in the modules of a rule.

    Raises:   PlanError: a piece is partly theirs, or none is.
    """
    own = matched(rule, modules)
    found: list[int] = []
    for at, works in enumerate(pieces):
        inside = frozenset(n for n in works if any(is_inside(n, outer) for outer in own))
        if inside and inside != works:
            message = f"{rule}: {_names(inside)} cannot be divided from {_names(works - inside)}"
            raise PlanError(message, hint=f"both are between {_around(graph, at)}: name both")
        found += [at] if inside else []
    if not found:
        message = f"{rule}: {', '.join(own[:3])} has no matrix product of its own"
        raise PlanError(message, hint="it goes with the module behind it: name that one")
    return found


def _holding(rule: Rule, graph: Graph) -> list[int]:
    """Return the pieces that read a parameter of the modules of a rule.

    Raises:   PlanError: no such module has any.
    """
    holders = owners_by_piece(graph)
    paths = dict.fromkeys(
        name for piece in holders for owner in sorted(piece) for name in outer(owner)
    )
    own = matched(rule, sorted(paths))
    return [
        at
        for at, owners in enumerate(holders)
        if any(is_inside(o, name) for o in owners for name in own)
    ]


def _around(graph: Graph, piece: int) -> str:
    """Return between which cut points a piece is, in words."""
    names = ["the input", *(repr(point.name) for point in graph.cut_points), "the loss"]
    return f"{names[piece]} and {names[piece + 1]}"


def _say(row: dict[int, Said], at: int, said: Said, where: str) -> None:
    """Note what is said.

    Raises:   PlanError: another rule has said something else.
    """
    other = row.setdefault(at, said)
    if other.value != said.value:
        message = f"{said.rule} contradicts {other.rule}, of {where}"
        raise PlanError(message, hint="give each piece one rule: narrow one of the patterns")


def _check_run(rule: Rule, found: Sequence[int], pieces: Sequence[frozenset[str]]) -> None:
    for a, b in pairwise(found):
        if b != a + 1:
            message = f"{rule}: between its modules there is {_names(pieces[a + 1])}"
            raise PlanError(message, hint="fuse what stands together: one rule for each run of it")


def _check_fused(ends: dict[int, Said], values: dict[Aspect, dict[int, Said]]) -> None:
    """Raise where rules say different things of pieces that must be one stage."""
    for at, said in ends.items():
        for row in values.values() if said.value == "may not" else ():
            one, other = row.get(at), row.get(at + 1)
            if (one and one.value) != (other and other.value):
                against = one or other
                assert against is not None, "one of them is said"
                message = f"{said.rule} contradicts {against.rule}, which is of a part of it"
                raise PlanError(message, hint="fuse less, or let both be of the same modules")


def _names(works: Iterable[str]) -> str:
    """Return the outermost modules of a piece, in words."""
    names = sorted(name or "the model" for name in works)
    outer = [n for n in names if not any(n != o and is_inside(n, o) for o in names)]
    return ", ".join(outer[:3]) + (", ..." if len(outer) > 3 else "")
