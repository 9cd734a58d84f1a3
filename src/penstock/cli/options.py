"""Options of a command: it takes those of `Options` that it is given names of.

Some have a flag; `--set NAME=VALUE` says any of them, and `--options-help` lists all.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from penstock.cli import face
from penstock.cli.flags import flag_of, listed
from penstock.errors import PlanError
from penstock.training.options import (
    OPTIONS,
    Options,
    Spelling,
    Value,
    options_in,
    said,
    valued,
    word_of,
)

Command = Callable[..., None]
_SETS = "sets"
_SET: Any = typer.Option("--set", metavar="NAME=VALUE", help="Any option, once for each.")
_METAVARS: dict[type[Value], str] = {int: "N", str: "TEXT"}
_TAKES = "__options__"  # the name under which a command has those that it takes


def taking(names: Sequence[str], flags: Sequence[str]) -> Callable[[Command], Command]:
    """Return a decorator: `command(..., **options)` takes these options, for `asked`.

    flags:  those of them that have a flag.
    """

    def decorated(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
        hints = {name: _hint(name, OPTIONS[name]) for name in flags}
        hints[_SETS] = Annotated[list[str] | None, _SET]
        hints["list_all"] = _list_of(names, flags)
        rows = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in hints.items()
        ]
        first = [each for each in own if each.kind != each.KEYWORD_ONLY]
        last = [each for each in own if each.kind == each.KEYWORD_ONLY]
        command.__dict__["__signature__"] = signature.replace(parameters=[*first, *rows, *last])
        command.__annotations__ |= {each.name: each.annotation for each in rows}
        command.__dict__[_TAKES] = tuple(names)
        return command

    return decorated


def taken_by(command: object) -> tuple[str, ...]:
    """Return the options that a command takes, or what Typer made of it."""
    return getattr(command, _TAKES, ())


def _hint(name: str, option: Spelling) -> Any:
    """Return a parameter's annotation, from which Typer makes the flag."""
    info = typer.Option(
        flag_of(name),
        help=option.help,
        metavar=option.metavar or _METAVARS.get(option.kind),
        min=option.least if option.kind is int else None,
    )
    return Annotated[option.kind | None, info]


def asked(
    flags: Mapping[str, object], names: Sequence[str] = tuple(OPTIONS), *, file: Path | None = None
) -> Options:
    """Return what is asked for: by flags before `--set` before a file.

    names:    of the options that the command takes.
    Raises:   PlanError: the file or a text says no option, or none that the command takes.
    """
    given = {
        name: valued(name, value, flag_of(name))
        for name, value in flags.items()
        if value is not None and name in OPTIONS
    }
    read = options_in(file) if file else {}
    told = dict(map(said, cast("list[str] | None", flags.get(_SETS)) or ()))
    for name in told:
        if name not in names:
            words = ", ".join(map(word_of, names))
            message = f"--set {word_of(name)}: this command takes no such option"
            raise PlanError(message, hint=f"it takes {words}")
    return cast("Options", {**read, **told, **given})


def _list_of(names: Sequence[str], flags: Sequence[str]) -> Any:
    """Return the flag that prints these options, by subject, and ends the command."""

    def show(value: bool | None) -> None:
        if value:
            face.show(listed(names, flags))
            raise typer.Exit(face.DONE)

    help_ = "List all that --set can say."
    return Annotated[
        bool | None, typer.Option("--options-help", is_eager=True, callback=show, help=help_)
    ]


File = Annotated[
    Path | None,
    typer.Option("--options", metavar="TOML", help="Options from the table [train] of a file."),
]
