"""Group: commands with what each does, wrapped where a terminal is narrow and never cut."""

from typing import Any

from typer.core import TyperGroup

_WHOLE = 10_000  # characters of a description


class WholeGroup(TyperGroup):
    """Commands whose descriptions are told whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with their descriptions."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, each.get_short_help_str(_WHOLE)) for name, each in commands if each]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
