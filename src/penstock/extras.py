"""Extras: packages that only some of Penstock needs, asked for where they are used."""

import logging
from functools import cache
from importlib.util import find_spec

from penstock.errors import ExtraError

log = logging.getLogger(__name__)


def has(module: str) -> bool:
    """Return whether a package is installed."""
    return find_spec(module) is not None


def need(module: str, extra: str, what: str) -> None:
    """Check that a package is installed.

    extra:    the one of Penstock that brings it.
    what:     what needs it, as the error says.
    Raises:   ExtraError.
    """
    if not has(module):
        message = f"{what} needs {module}, which is not installed"
        raise ExtraError(message, hint=hint_of(extra))


@cache
def lacks(module: str, extra: str, what: str) -> bool:
    """Return whether a package is missing; if so, it is said once what is therefore left out."""
    if is_missing := not has(module):
        log.warning("%s are left out, for %s is not installed: %s", what, module, hint_of(extra))
    return is_missing


def hint_of(extra: str) -> str:
    """Return the command that installs an extra, as hints say it."""
    return f'pip install "penstock[{extra}]"'
