"""Script: a job by name, "file.py[:name] -- ARGUMENTS", and what its own parser is given.

A script reads its own arguments, never those of `penstock`: while it is loaded and while it runs,
`sys.argv` is what `python file.py ARGUMENTS` makes of it.  Forked processes inherit that.
"""

import argparse
import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from penstock.errors import JobError

_BEFORE_ARGUMENTS = " -- "


class Script(NamedTuple):
    """What a text names.

    job:        path/to/file.py[:name] or package.module[:name].
    arguments:  of the script itself.
    """

    job: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _BEFORE_ARGUMENTS.join([self.job, *([self.tail] if self.arguments else [])])

    @property
    def tail(self) -> str:
        """Return the arguments as a shell takes them."""
        return shlex.join(self.arguments)

    @property
    def place(self) -> str:
        """Return the file or module, without the name of a function in it."""
        place, colon, name = self.job.rpartition(":")
        return place if colon and name.isidentifier() else self.job


def script_of(text: str) -> Script:
    """Return the job that a text names, and the arguments of its script.

    Raises:   JobError: a quotation mark is missing among the arguments.
    """
    job, _, rest = text.partition(_BEFORE_ARGUMENTS)
    try:
        return Script(job, tuple(shlex.split(rest)))
    except ValueError as problem:
        raise JobError(f"{text}: {problem}", hint="close the quotation mark") from problem


def with_arguments(text: str, arguments: Sequence[str]) -> str:
    """Return `text` with more arguments of the script."""
    known = script_of(text)
    return str(Script(known.job, (*known.arguments, *arguments)))


@contextmanager
def as_started(text: str) -> Generator[None]:
    """Let `sys.argv` be that of the script that a text names; "": it stays as it is."""
    before, script = sys.argv, script_of(text)
    if text:
        sys.argv = [script.place, *script.arguments]
    try:
        yield
    finally:
        sys.argv = before


class UsageExit(SystemExit):
    """What a parser of arguments ends a script with, and what it said."""

    def __init__(self, words: str, usage: str) -> None:
        super().__init__(2)
        self.words, self.usage = words, usage


@contextmanager
def parsing() -> Generator[None]:
    """Let a parser say with its `UsageExit` what it does not take, and print nothing."""

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise UsageExit(message, self.format_usage())

    before = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = error
    try:
        yield
    finally:
        argparse.ArgumentParser.error = before


def ended_early(problem: SystemExit, where: str, text: str) -> JobError:
    """Return the error for a script that ends the program before it has made its job.

    where:    the line that ends it.
    """
    hint = f"what belongs to the script stands behind ` -- `: {script_of(text).job} -- --name value"
    if isinstance(problem, UsageExit):
        return JobError(f"{where}: {problem.words}\n{problem.usage.strip()}", hint=hint)
    code = problem.code
    if code == 2:
        return JobError(f"{where}: SystemExit: 2, as parsers end for arguments", hint=hint)
    hint = 'let it make the job first; `if __name__ == "__main__":` guards what only python runs'
    found = " ".join(str(code).split()) or "no message"
    return JobError(f"{where}: SystemExit: {found}: it ends before there is a job", hint=hint)


def has_helped(problem: BaseException, text: str) -> bool:
    """Return whether a script has only shown the help that its arguments ask for."""
    ended = problem.__cause__
    asks = {"-h", "--help"} & {*script_of(text).arguments}
    return isinstance(ended, SystemExit) and not ended.code and bool(asks)
