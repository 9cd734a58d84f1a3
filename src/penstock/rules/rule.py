"""Rule: one decision of the user about the modules that a pattern matches; and a file of them.

    [[rule]]
    recompute = "blocks.*"      # one of VERBS, and the pattern
    on = false                  # of `recompute`: whether; of `offload`: what; of `replace`: by;
                                # of `split`: into

A pattern matches the path of a module as file names are matched (fnmatch): `*` is any text, a point
included, `?` one character, `[0-3]` one of them.  What a module holds belongs to it.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from penstock.errors import PlanError
from penstock.files import read_bytes
from penstock.program.passes.offload import Offloaded

Verb = Literal[
    "cut", "fuse", "recompute", "offload", "shard", "replicate", "keep", "split", "replace"
]
VERBS: tuple[Verb, ...] = get_args(Verb)
_MORE: dict[str, str] = {"recompute": "on", "offload": "what", "replace": "by", "split": "into"}
_SLICES = "2"  # where nothing is said
_DOCS = "docs/rules.md shows what rules look like"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a verb, a pattern of module paths, and how.

    how:    of `recompute` "yes" or "no"; of `offload` what; of `split` into how many slices, as
            text; of `replace` a function "file.py:name" that makes the other module of the one;
            else empty.
    place:  where it was said, for errors and reasons: "rules.toml, rule 2"; empty: in Python.
    Raises: PlanError: not such a verb, no pattern, or it cannot be done so.
    """

    verb: Verb
    pattern: str
    how: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            message = f"{self._at}there is no rule {self.verb!r}"
            raise PlanError(message, hint=f"the rules are {', '.join(VERBS)}")
        if not self.pattern.strip():
            message = f"{self._at}{self.verb} of no module"
            raise PlanError(message, hint=f'write {self.verb} = "blocks.*", or another pattern')
        known = {"recompute": ("yes", "no"), "offload": get_args(Offloaded)}.get(self.verb)
        if known is not None and self.how not in known:
            message = f"{self._at}{self.verb} of {self.pattern} is {self.how!r}"
            raise PlanError(message, hint=f"it can be {', '.join(known)}")
        if self.verb == "split" and not (self.how.isdecimal() and int(self.how) > 1):
            message = f"{self._at}split of {self.pattern} is into {self.how or 'nothing'}"
            raise PlanError(message, hint='write split = "head" and into = 4, or 2 or more')
        if (self.verb in ("replace", "split")) != bool(self.how) and known is None:
            message = f"{self._at}{self.verb} of {self.pattern} by {self.how or 'nothing'}"
            raise PlanError(message, hint='write replace = "blocks.*.mlp" and by = "file.py:name"')

    def __str__(self) -> str:
        """Return the rule as it was written, with its place."""
        how = f" ({self.how})" if self.how else ""
        return f"{self._at}{self.verb} = {self.pattern!r}{how}"

    @property
    def file(self) -> str:
        """Return the file in which it stands; empty: it was said in Python."""
        return self.place.rpartition(", rule ")[0]

    @property
    def _at(self) -> str:
        return f"{self.place}: " if self.place else ""


def load(path: Path | str) -> tuple[Rule, ...]:
    """Return the rules in a TOML file, in their order.

    Raises:   PlanError: missing, not TOML, or a rule that is none; with file, number and values.
    """
    content = read_bytes(path, PlanError, "rules")
    try:
        document = tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as problem:
        raise PlanError(f"rules {path}: not readable TOML: {problem}", hint=_DOCS) from problem
    for key in document:
        if key != "rule":
            raise PlanError(f'rules {path}: unknown key "{key}"', hint="write [[rule]] above each")
    tables: object = document.get("rule", [])
    if not isinstance(tables, list):
        raise PlanError(f"rules {path}: rule is {tables!r:.60}, no list", hint="write [[rule]]")
    if not tables:
        raise PlanError(f"rules {path}: there is no [[rule]] in it", hint=_DOCS)
    return tuple(
        _read(f"{path}, rule {at}", table)
        for at, table in enumerate(cast("list[object]", tables), 1)
    )


def _read(place: str, table: object) -> Rule:
    """Return the rule that a table says.

    Raises:   PlanError: it says none, or several, or something that is not known.
    """
    if not isinstance(table, dict):
        raise PlanError(f"{place} is {table!r:.60}, not a table", hint=_DOCS)
    keys = cast("dict[str, object]", table)
    said: list[Verb] = [verb for verb in VERBS if verb in keys]
    if len(said) != 1:
        message = f"{place} says {' and '.join(said) or 'nothing'}"
        raise PlanError(message, hint=f"each rule says one of {', '.join(VERBS)}")
    verb, more = said[0], _MORE.get(said[0])
    for key in keys:
        if key not in (verb, more):
            hint = f"known keys beside {verb}: {more or 'none'}"
            raise PlanError(f'{place}: {verb} with an unknown key "{key}"', hint=hint)
    pattern, how = keys[verb], keys.get(more) if more else None
    if not isinstance(pattern, str):
        raise PlanError(f"{place}: {verb} is {pattern!r}", hint="give a pattern of module paths")
    if verb == "recompute":
        if not isinstance(how, bool | None):
            raise PlanError(f"{place}: on is {how!r}", hint="give true or false")
        return Rule("recompute", pattern, "no" if how is False else "yes", place)
    if verb == "split":
        if not isinstance(how, int | None) or isinstance(how, bool):
            raise PlanError(f"{place}: into is {how!r}", hint="give the number of slices")
        return Rule("split", pattern, _SLICES if how is None else str(how), place)
    if not isinstance(how, str | None):
        raise PlanError(f"{place}: {more} is {how!r}", hint="give a text")
    return Rule(verb, pattern, how or ("both" if verb == "offload" else ""), place)
