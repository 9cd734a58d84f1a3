"""Of flags: a command that is given one record, of which each field is a flag or an argument."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, get_type_hints


def of_flags(command: Callable[[Any], None]) -> Callable[..., None]:
    """Return a command that Typer makes flags for: those of the record that `command` takes.

    The record is a named tuple, whose fields are annotated as parameters of a command are.
    """
    hints = get_type_hints(command)
    hints.pop("return", None)
    (record,) = hints.values()
    fields: dict[str, Any] = get_type_hints(record, include_extras=True)
    defaults: dict[str, object] = record._field_defaults
    kind, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    rows = [
        inspect.Parameter(name, kind, default=defaults.get(name, none), annotation=hint)
        for name, hint in fields.items()
    ]

    @wraps(command)
    def told(**flags: object) -> None:
        command(record(**flags))

    told.__dict__["__signature__"] = inspect.Signature(rows)
    told.__annotations__ = dict(fields)
    return told
