"""Flags of options: a command takes those of `Options` that it is given names of.

Its help shows those that people type; `--options-help` lists all, and all are taken.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from penstock.cli import face
from penstock.training.options import (
    OPTIONS,
    Options,
    Spelling,
    flag_of,
    listed,
    options_in,
    said,
    valued,
)

Command = Callable[..., None]
OFTEN = tuple(name for name, option in OPTIONS.items() if option.subject == "often")


def taking(names: Sequence[str], shown: Sequence[str] = OFTEN) -> Callable[[Command], Command]:
    """Return a decorator: `command(..., **options)` takes a flag for each of these options.

    shown:  those that the command's help names.
    """

    def decorated(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
        hints = {name: _hint(name, OPTIONS[name], hidden=name not in shown) for name in names}
        hints["list_all"] = _list_of(names)
        rows = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in hints.items()
        ]
        first = [each for each in own if each.kind != each.KEYWORD_ONLY]
        last = [each for each in own if each.kind == each.KEYWORD_ONLY]
        command.__dict__["__signature__"] = signature.replace(parameters=[*first, *rows, *last])
        command.__annotations__ |= {each.name: each.annotation for each in rows}
        return command

    return decorated


def _hint(name: str, option: Spelling, *, hidden: bool) -> Any:
    """Return a parameter's annotation, from which Typer makes the flag."""
    flag = flag_of(name)
    word = flag.removeprefix("--no-") if option.is_on else ""
    declared = f"--{word}/{flag}" if option.is_on else flag
    info = typer.Option(
        declared,
        help=option.help,
        metavar=option.metavar or ("N" if option.kind is int else None),
        min=option.least if option.kind is int else None,
        hidden=hidden,
    )
    return Annotated[option.kind | None, info]


def asked(
    flags: Mapping[str, object], sets: Sequence[str] = (), file: Path | None = None
) -> Options:
    """Return what is asked for: by flags before `--set` before a file.

    Raises:   PlanError: the file or a text says no option.
    """
    given = {
        name: valued(name, value, flag_of(name))
        for name, value in flags.items()
        if value is not None and name in OPTIONS
    }
    read = options_in(file) if file else {}
    return cast("Options", {**read, **dict(map(said, sets)), **given})


def _list_of(names: Sequence[str]) -> Any:
    """Return the flag that prints these options, by subject, and ends the command."""

    def show(value: bool | None) -> None:
        if value:
            face.show(listed(names))
            raise typer.Exit(face.DONE)

    help_ = "List all options."
    return Annotated[
        bool | None, typer.Option("--options-help", is_eager=True, callback=show, help=help_)
    ]


Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any option.", hidden=True),
]
File = Annotated[
    Path | None,
    typer.Option("--options", metavar="TOML", help="Options from the table [train] of a file."),
]
