"""Events: where a run whose ranks may be lost writes what happened to it, a line each."""

EVENTS = "events.jsonl"
