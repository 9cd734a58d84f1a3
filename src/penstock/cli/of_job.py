"""Of a job: a command that is given JOB takes the arguments of its script behind `--`.

penstock train script.py --steps 100 -- --lr 0.1
"""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from penstock.cli.flags import moved
from penstock.cli.options import taken_by
from penstock.errors import JobError, PlanError
from penstock.job import check_file
from penstock.script import as_started, has_helped, with_arguments

_NAMES = "job", "what"  # of the parameter that is the job


class JobCommand(TyperCommand):
    """A command of a job, whose script sees its own arguments alone while the command lasts."""

    takes_arguments = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take what stands before `--` as the command's, and the rest as the script's."""
        own, arguments = divided(args)
        known = {flag for each in self.params for flag in (*each.opts, *each.secondary_opts)}
        check_moved([word for word in own if word.partition("=")[0] not in known], own, self)
        rest: list[str] = super().parse_args(ctx, own)
        name = next(name for name in _NAMES if name in ctx.params)
        if arguments and ctx.params[name] is None:
            raise typer.BadParameter("What stands behind -- belongs to the script of --job", ctx)
        if arguments:
            ctx.params[name] = with_arguments(ctx.params[name], arguments)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the help of a script, where its arguments ask for it, is enough."""
        text = next(ctx.params[name] for name in _NAMES if name in ctx.params) or ""
        check_file(text)  # before torch is loaded
        with as_started(text):
            try:
                return super().invoke(ctx)
            except JobError as problem:
                if has_helped(problem, text):
                    return None
                raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what the line of usage says, the script's arguments last."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]


def check_moved(unknown: Sequence[str], words: Sequence[str], command: TyperCommand) -> None:
    """Raise if one of the unknown words of a command line is a flag that became an option.

    Raises:   PlanError: it names the flag's new place.
    """
    takes = taken_by(command.callback)
    for word in unknown:
        found = moved(word, words) if word.startswith("--") else None
        if found is not None and found[0] in takes:
            hint = "`--options-help` lists all that --set can say"
            raise PlanError(f"{word.partition('=')[0]} is now {found[1]}", hint=hint)


def divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what stands before the first `--`, and what behind it."""
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at]], [*words[at + 1 :]]
