"""Generation news: tells of a run's generations while it goes on, as its events.jsonl grows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from penstock.listener import Listener, Row
from penstock.training.events import EVENTS
from penstock.units import format_seconds


@final
class Happenings:
    """What a listener has been told of a run's events: those that were there before are not."""

    def __init__(self, folder: Path, listener: Listener) -> None:
        self._path, self._listener = folder / EVENTS, listener
        self._at = self._path.stat().st_size if self._path.exists() else 0

    def hear(self, row: Row) -> None:
        """Say what has happened since the last row of a step."""
        self.look()

    def look(self) -> None:
        """Say what has happened since the last look."""
        try:
            if self._path.stat().st_size <= self._at:
                return
        except FileNotFoundError:
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, _, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + 1 if whole else 0
        for row in map(json.loads, whole.splitlines()):
            if row["what"] != "begins":
                self._listener.say(event_words(row))


def event_words(row: Mapping[str, Any]) -> str:
    """Return who went or came, who goes on by which plan, and what a step should take then."""
    count = len(row["members"])
    who = f"{count} ranks go on" if count > 1 else "1 rank goes on"
    took = format_seconds(row["agreed_s"] + row["ready_s"] + row["stepped_s"])
    why = str(row["why"]).partition(":")[0] or str(row["what"])
    predicted = row["predicted_step_s"]
    tail = f", {format_seconds(predicted)} a step predicted" if predicted else ""
    return f"{why}: {who} after step {row['step']:,}, in {took}, by {row['plan']}{tail}"
