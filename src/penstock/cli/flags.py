"""Flags: of which options a command has one, and how it takes all others.

`--set NAME=VALUE` says any of them, so a command has few flags.  A message says what an option is
to be as Python does, `stages=1`; here it becomes what a person types.
"""

import re
import shlex
from collections.abc import Sequence

from penstock.training.options import OPTIONS, SAID, word_of

TRAIN = "num_steps", "ranks", "memory", "plan", "schedule", "out", "resume", "elastic"
PLAN = "cluster", "ranks", "memory", "stages", "replicas", "schedule"
CHECK = "plan", "stages", "schedule", "tensor"
BY_COMMAND = {"train": TRAIN, "plan": PLAN, "check": CHECK}
_OF_OTHERS = "job", "to", "yes", "token_file"  # flags of commands that are no options of a run
_WERE = {"with": "rules", "from": "weights"}  # flags of other names than their options


def flag_of(name: str) -> str:
    """Return the flag of an option that has one: "--steps"."""
    return "--" + word_of(name).replace("_", "-")


def typed(name: str, value: str, flags: Sequence[str] = TRAIN) -> str:
    """Return how a person says what an option is: by its flag, or by `--set`.

    flags:  options of which the command has a flag.
    """
    if name not in flags:
        value = value.lower() if OPTIONS[name].kind is bool else value
        return f"--set {word_of(name)}={value}"
    return flag_of(name) if OPTIONS[name].kind is bool else f"{flag_of(name)} {value}"


def in_flags(text: str, command: str = "train") -> str:
    """Return a hint that says options as Python does, `stages=1`, in the words of a command.

    What stands between backticks is a command already, and stays.
    """
    flags = BY_COMMAND.get(command, TRAIN)

    def said(found: "re.Match[str]") -> str:
        name, value = found["name"], (found["value"] or "").strip('"')
        if name in _OF_OTHERS:
            return f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {value}")
        return typed(name, value, flags) if name in OPTIONS else found[0]

    parts = text.split("`")
    parts[::2] = [SAID.sub(said, part) for part in parts[::2]]
    return "`".join(parts)


def moved(flag: str, words: Sequence[str]) -> tuple[str, str] | None:
    """Return the option that a flag was of, and how it is said now; None: it was of none.

    words:  of the command line, where the flag's value stands.
    """
    given, _, value = flag.partition("=")
    old = given.removeprefix("--").replace("-", "_")
    is_off = old.startswith("no_")
    old = old.removeprefix("no_")
    name = _WERE.get(old, old)
    option = OPTIONS.get(name)
    if option is None or option.short or (is_off and not option.is_on):
        return None
    if option.kind is bool:
        value = "false" if is_off else "true"
    else:
        value = value or _value_of(given, words) or option.metavar or "VALUE"
    return name, f"--set {word_of(name)}={shlex.quote(value)}"


def _value_of(flag: str, words: Sequence[str]) -> str:
    """Return what stands behind a flag; "": nothing, or another flag."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            return "" if following.startswith("--") else following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""


def listed(names: Sequence[str], flags: Sequence[str] = TRAIN) -> str:
    """Return options by subject, as text: how each is said, and what it is."""
    shown = {name: _shown(name, flags) for name in names}
    width = max(map(len, shown.values())) + 2
    lines = ["What has no flag here is said by --set NAME=VALUE, once for each."]
    for subject in dict.fromkeys(OPTIONS[name].subject for name in names):
        lines += ["", f"{subject[0].upper()}{subject[1:]}:"]
        rows = [name for name in names if OPTIONS[name].subject == subject]
        lines += [f"  {shown[name]:{width}}{OPTIONS[name].help}" for name in rows]
    return "\n".join(lines)


def _shown(name: str, flags: Sequence[str]) -> str:
    option = OPTIONS[name]
    if option.kind is bool:
        word = "" if name in flags else str(not option.is_on).lower()
    else:
        word = option.metavar or "|".join(option.words) or ("N" if option.kind is int else "TEXT")
    if name in flags:
        return f"{flag_of(name)} {word}".strip()
    return f"{word_of(name)}={word}"
