"""Face: what a command says.  Results go to stdout; errors, messages and progress to stderr.

An error is one line `error:`, its evidence indented below, and one line `hint:`.  Nothing here
starts a thread, so ranks can be forked while a bar is shown.
"""

import contextlib
import errno
import json
import os
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from penstock import terminal
from penstock.cli.flags import in_flags
from penstock.errors import GraphError, JobError, PenstockError, PlanError, ProgramError, RunError
from penstock.files import Json, finite
from penstock.garbage import collector_waits
from penstock.runtime.stop import Stopped
from penstock.terminal import console, say

Yes = Annotated[bool, typer.Option("--yes", help="Run what the folder names, whoever wrote it.")]
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_HELP = "`penstock COMMAND --help` shows what a command takes"
_HINTS: dict[type[PenstockError], str] = {  # where the error itself has none
    GraphError: "change the model there; `penstock train JOB` trains it by plain data parallelism",
    PlanError: "ask for less, or leave more to the search",
}
_USAGE = typer.BadParameter.__mro__[1]  # Typer has a Click of its own and exports only this
out = console(stderr=False)
busy, progress, table = terminal.busy, terminal.progress, terminal.table


@contextlib.contextmanager
def loading() -> Generator[None]:
    """Say that what needs torch is imported: the body does so."""
    with busy("loading PyTorch"), collector_waits():
        yield


def show(text: str) -> None:
    """Print a result to stdout as it is."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, "stdout") from problem


def show_json(document: Json) -> None:
    """Print the one JSON document of a command to stdout; what is not a number becomes null."""
    show(json.dumps(finite(document), allow_nan=False))


def asks(question: str) -> bool:
    """Return whether a person at a terminal says yes; False where nobody is there."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    say(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def agrees(*, yes: bool) -> Callable[[str], bool]:
    """Return what answers a question: yes, where that was said already; else a person."""
    return (lambda question: True) if yes else asks


def let_go() -> None:
    """Discard what stdout and stderr still hold and nobody reads.

    Else the interpreter tries once more when it ends, says so, and changes the exit code to 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def only_results() -> contextlib.AbstractContextManager[object]:
    """Send to stderr what the user's code prints to stdout, where only results belong."""
    return contextlib.redirect_stdout(sys.stderr)


def check_folder(path: Path) -> None:
    """Raise if there is no such folder: a run was to be in it.

    Raises:   JobError.
    """
    if not path.is_dir():
        hint = "give the folder that `penstock train --out` wrote"
        raise JobError(f"there is no folder {path}", hint=hint)


def check_place(path: Path) -> None:
    """Raise if no file can be written, before time is spent on its contents.

    Raises:   OSError: a folder or something else than a file is there; no permission.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a device: the rename would put a file in its place
        raise FileExistsError(errno.EEXIST, "is not a regular file", str(path))
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


# -- errors ----------------------------------------------------------------------------------------


def fail(problem: BaseException, arguments: Sequence[str] = ()) -> int:
    """Print what went wrong and what to do about it to stderr; return the exit code.

    2 for bad usage (of `arguments`) and bad input, 1 for what failed later, 130 for Ctrl-C,
    143 for SIGTERM.  Where `--json` is asked for, stdout has the same as one JSON document.
    """
    asked = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in asked
    if isinstance(problem, KeyboardInterrupt):
        is_known = isinstance(problem, Stopped)
        words, code = (problem.words, problem.code) if is_known else ("interrupted", INTERRUPTED)
        say(words)
        if as_json:
            _show_error(code, words, (), "")
        return code
    code, message, hint = _explain(problem, arguments)
    hint = in_flags(hint, next(iter(arguments), ""))
    first, *evidence = message.strip().splitlines() or [type(problem).__name__]
    shown = textwrap.indent(textwrap.dedent("\n".join(_without_frames(evidence))), "  ")
    hint = " ".join(hint.split())
    say("\n".join([f"error: {first}", *shown.splitlines(), f"hint: {hint}"]))
    if as_json:
        _show_error(code, first, shown.splitlines(), hint)
    return code


def _show_error(code: int, error: str, evidence: Sequence[str], hint: str) -> None:
    """Print an error to stdout as one JSON document; if nobody can read it, it is lost."""
    lines: list[Json] = [line.strip() for line in evidence]
    with contextlib.suppress(OSError):
        show_json({"error": error, "evidence": lines, "hint": hint, "code": code})


def _explain(problem: BaseException, arguments: Sequence[str]) -> tuple[int, str, str]:
    """Return exit code, message and hint."""
    if isinstance(problem, _USAGE):
        usage = cast(typer.BadParameter, problem)
        return BAD_INPUT, *_explain_usage(usage, arguments)
    match problem:
        case RunError() | ProgramError():
            return FAILED, problem.message, problem.hint or "the lines above say where"
        case PenstockError():
            return BAD_INPUT, problem.message, problem.hint or _HINTS.get(type(problem), _HELP)
        case OSError():
            return FAILED, *_explain_os_error(problem)
        case _:
            return FAILED, *_explain_unexpected(problem)


def _explain_os_error(problem: OSError) -> tuple[str, str]:
    place = "" if problem.filename is None else f"{problem.filename}: "
    message = f"{place}{problem.strerror or problem}"
    match problem.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return (
                message,
                "free some space, or choose another place; nothing half-written was left",
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return message, "choose a place where you can write"
        case errno.EEXIST | errno.ENOTDIR | errno.EISDIR | errno.ENOENT:
            return message, "check the path"
        case errno.ENOMEM | errno.EAGAIN | errno.EMFILE | errno.ENFILE:
            return message, "the machine is short of this: use fewer ranks, or end other programs"
        case _:
            return message, "`penstock doctor` shows what this machine has"


def _explain_usage(problem: typer.BadParameter, arguments: Sequence[str]) -> tuple[str, str]:
    message, _, meant = problem.format_message().partition(". Did you mean ")
    path = "penstock" if problem.ctx is None else problem.ctx.command_path
    hint = f"`{path} --help` shows what it takes"
    names: Sequence[str] = getattr(problem, "possibilities", None) or ()
    command = getattr(problem.ctx, "command", None)
    if hasattr(problem, "possibilities") and hasattr(command, "takes_arguments"):
        hint = "the script's own arguments stand behind ` -- `: " + f"{path} JOB -- --name value"
    if names:
        message, meant = problem.message, f"{' or '.join(sorted(names))}?"
    if meant:
        hint = f"did you mean {meant.replace(chr(39), '')} {hint}"
    typed = shlex.join(["penstock", *arguments])
    return f"{message[:1].lower()}{message[1:].rstrip('.')} ({typed})", hint


def _explain_unexpected(problem: BaseException) -> tuple[str, str]:
    """Blame the last line of the user's code; if there is none, Penstock."""
    from penstock.job import is_users

    if "torch" in sys.modules:
        from penstock.processes.short_of_memory import words_without_plan

        if (found := words_without_plan(problem)) is not None:
            return found
    what = f"{type(problem).__name__}: {' '.join(str(problem).split()) or 'no message'}"
    frames = traceback.extract_tb(problem.__traceback__)
    users = [frame for frame in frames if is_users(frame.filename)]
    if users:
        return f"{users[-1].filename}:{users[-1].lineno}: {what}", "correct that line"
    where = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames[-3:]]
    return "\n".join([what, *where]), "this is a bug in Penstock: report these lines"


def _without_frames(lines: Sequence[str]) -> list[str]:
    """Return `lines` with only the last frame of a traceback among them."""
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback")]
    if not starts:
        return [line for line in lines if line.strip()]
    frames = [at for at, line in enumerate(lines) if line.startswith('  File "')]
    last = max([at for at in frames if at > starts[0]], default=len(lines))
    kept = [*lines[: starts[0]], *lines[last:]]
    return [line for line in kept if line.strip()]
