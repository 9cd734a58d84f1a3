"""Instructions: what a rank can be told to do, and the table that defines them.

F0.3          Compute: forward of stage 0 on micro-batch 3, at weights of version 0
F0.3@-1       the same at version -1 (the one before version 0)
F0.3>r1e0s2   Send: the value that F0.3 made, to rank 1, over edge 0, into its slot 2
F0.3<r0e0s2   Receive: the same message at the other end, from rank 0
tied:wte.0    Sum: the gradients of bucket "wte", of step 0; reductions.py has all of them
U0.0          Update: the optimizer's step 0 on stage 0; it makes version 1
unshard0      Unshard: gather the weights of stage 0;  reshard0 drops them again
F0.3>far      Offload: what F0.3 keeps for the backward, to far memory;  F0.3<far brings it back
U0.0>far      Offload: the optimizer's state of stage 0 as U0.0 left it
U0.1<far      Reload: the same state, for U0.1
W0.0>far      Offload: the weights of stage 0 as U0.0 left them; its gradients are done with
W0.1<far      Reload: the same weights, with the summed gradients, for U0.1
sum:F0.3e1r0,1    Collect: sum what F0.3 made for edge 1 over ranks 0 and 1, which need all of it
F0.3>>far     BeginOffload: the copy that F0.3>far will then wait for, beside computes; so F0.3<<far

Text, columns, verifier, ledger, simulator and timeline read TABLE; only a runtime that binds an
instruction has to know more.  A new one is a class, a row, and a function that binds it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

from penstock.errors import ProgramError, ScheduleError
from penstock.program.reductions import Reduction, Sum
from penstock.schedule.orders import KINDS, Action

CollectHow = Literal["sum", "gather", "scatter", "exchange"]
COLLECT_HOWS: tuple[CollectHow, ...] = ("sum", "gather", "scatter", "exchange")


class Guarding(NamedTuple):
    """How a rank keeps a copy of what another one alone has.

    every:   0: it makes each update of the copy.  Else it keeps the gradients, and a part of the
             state is sent anew in each step, all of it within so many.
    apart:   rank r guards rank r - apart; those before rank 0 are the last ones.
    shared:  stages of which a copy is kept though several ranks have them, all on one host; the
             first of those ranks gives it.
    """

    every: int
    apart: int = 1
    shared: tuple[int, ...] = ()

    def __str__(self) -> str:
        how = f"log of {self.every} steps" if self.every else "updates"
        words = f"{how}, {self.apart} rank{'s' if self.apart > 1 else ''} further"
        stages = ", ".join(map(str, self.shared))
        return f"{words}, with stages {stages} that one host has alone" if self.shared else words


class Printed:
    """Prints as its row of the table says."""

    __slots__ = ()

    def __str__(self) -> str:
        return to_text(self)


@dataclass(frozen=True, slots=True)
class Compute(Printed):
    """Run F, B, I or W of a stage on a micro-batch, at one version of its weights.

    It waits for the messages that it uses: the Receives posted before it.
    """

    action: Action
    version: int = 0


@dataclass(frozen=True, slots=True)
class Send(Printed):
    """Issue the message (edge, micro-batch) to rank `peer`, into its slot `slot`, and go on."""

    of: Action
    edge: int
    peer: int
    slot: int


@dataclass(frozen=True, slots=True)
class Receive(Printed):
    """Post the receive of (edge, micro-batch) from rank `peer` into its own `slot`, and go on."""

    of: Action
    edge: int
    peer: int
    slot: int


@dataclass(frozen=True, slots=True)
class Collect(Printed):
    """Begin to collect what `of` made for another stage of its rank, over `edge`, among `ranks`.

    Each of these, which divide the ops of a stage, has made a part; what reads it waits for all.
    sum: a summand; each gets the sum.  gather: a slice; each gets all of them.  scatter: a summand;
    each gets its part of the sum.  exchange: a part for each; each gets those meant for it.
    """

    of: Action
    edge: int
    ranks: tuple[int, ...]
    how: CollectHow


@dataclass(frozen=True, slots=True)
class Update(Printed):
    """Let the optimizer make version step + 1 of a stage's weights."""

    stage: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Unshard(Printed):
    """Begin to gather the weights of a stage, and go on; its next Compute waits for them."""

    stage: int


@dataclass(frozen=True, slots=True)
class Reshard(Printed):
    """Drop the gathered weights of a stage, all but the rank's own shard."""

    stage: int


@dataclass(frozen=True, slots=True)
class Offload(Printed):
    """Move what an action left to far memory, and free it here.

    F: what it keeps for the backward of its micro-batch.  U: the optimizer's state of its stage.
    W: the weights of its stage, whose gradients are freed.
    """

    of: Action


@dataclass(frozen=True, slots=True)
class Reload(Printed):
    """Bring back what an Offload moved: that of the same F, or, for an update U, its stage's.

    W: weights, and the gradients that the step's last sum has left there; it waits for all sums.
    """

    of: Action


@dataclass(frozen=True, slots=True)
class BeginOffload(Printed):
    """Begin to copy what an action left to far memory, and go on; its Offload waits for that."""

    of: Action


@dataclass(frozen=True, slots=True)
class BeginReload(Printed):
    """Make room for what an Offload moved, begin to copy it back, and go on; its Reload waits."""

    of: Action


Instruction: TypeAlias = (
    Compute
    | Send
    | Receive
    | Reduction
    | Collect
    | Update
    | Unshard
    | Reshard
    | Offload
    | Reload
    | BeginOffload
    | BeginReload
)
Code: TypeAlias = tuple[Instruction, ...]  # of one rank, in the order of issue


Op = Literal[
    "compute",
    "send",
    "receive",
    "reduce",
    "update",
    "unshard",
    "reshard",
    "offload",
    "reload",
    "begin_offload",
    "begin_reload",
    "collect",
]
Does = Literal["works", "sends", "posts", "joins", "meets", "drops", "begins"]
Waits = Literal["", "inputs", "sums"]
Bytes = Literal["", "action", "message", "weights", "no weights"]
Lane = Literal["compute", "send", "receive", "collective", "update", "copy"]
SpanKind = Literal["F", "B", "I", "W", "U", "reduce", "unshard", "offload", "reload", "collect"]


class OpRow(NamedTuple):
    """All there is to know about an instruction.

    of:       its class; of reductions, which stand in one row, the first.
    text:     how it prints; {of} is its action, other names in braces are those of operands.
    columns:  of Codes in which its operands stand, in their order; an action takes three.
    kinds:    those that its action can be of; "F" for an instruction without an action.
    does:     on its rank's clock.  works: has the computing thread for its seconds; sends: hands a
              message over; posts: makes room for one; joins: is a collective, which runs on a lane
              of its own once all members have reached it; meets: is one that its reader waits for;
              drops: takes no time; begins: likewise,
              and what it begins runs beside the thread, which waits for it at another instruction.
    waits:    inputs: messages and gathered weights; sums: all collectives that were issued.
    bytes:    that it takes or frees.  action: what Memory says of its kind; message: from a
              Receive to the first use; weights: those that are gathered.
    lane:     of a timeline that shows it; None: none.
    span:     what it is shown as; None: as its action's kind.
    """

    name: Op
    of: type[Any]
    text: str
    columns: tuple[str, ...]
    kinds: str
    does: Does
    waits: Waits = ""
    bytes: Bytes = ""
    lane: Lane | None = None
    span: SpanKind | None = None


_ACTION = ("kind", "stage", "micro_batch")
_MESSAGE = (*_ACTION, "edge", "peer", "slot")
TABLE = (
    OpRow("compute", Compute, "{of}{version}", (*_ACTION, "version"), "FBIW", "works", "inputs",
        "action", "compute"),
    OpRow("send", Send, "{of}>r{peer}e{edge}s{slot}", _MESSAGE, "FBI", "sends", lane="send"),
    OpRow("receive", Receive, "{of}<r{peer}e{edge}s{slot}", _MESSAGE, "FBI", "posts",
        bytes="message", lane="receive"),
    OpRow("reduce", Sum, "{word}:{bucket}.{step}", ("edge", "micro_batch"), "F", "joins",
        lane="collective", span="reduce"),
    OpRow("update", Update, "U{stage}.{step}", ("stage", "micro_batch"), "U", "works", "sums",
        "action", "update", "U"),
    OpRow("unshard", Unshard, "unshard{stage}", ("stage",), "F", "joins",
        bytes="weights", lane="collective", span="unshard"),
    OpRow("reshard", Reshard, "reshard{stage}", ("stage",), "F", "drops", bytes="no weights"),
    OpRow("offload", Offload, "{of}>far", _ACTION, "FUW", "works",
        bytes="action", lane="copy", span="offload"),
    OpRow("reload", Reload, "{of}<far", _ACTION, "FUW", "works",
        bytes="action", lane="copy", span="reload"),
    OpRow("begin_offload", BeginOffload, "{of}>>far", _ACTION, "FUW", "begins"),
    OpRow("begin_reload", BeginReload, "{of}<<far", _ACTION, "FUW", "begins", bytes="action"),
    OpRow("collect", Collect, "{how}:{of}e{edge}r{ranks}", (*_ACTION, "edge", "slot"), "FBI",
        "meets", "inputs", lane="collective", span="collect"),
)  # fmt: skip
OPS: tuple[Op, ...] = tuple(row.name for row in TABLE)
LANES: tuple[Lane, ...] = ("compute", "send", "receive", "collective", "update", "copy")
SPAN_KINDS: tuple[SpanKind, ...] = (
    *KINDS,  # an action's kind has one code everywhere
    "reduce",
    "unshard",
    "offload",
    "reload",
    "collect",
)
ROW_OF: dict[type[Any], OpRow] = {row.of: row for row in TABLE}
_PATTERNS = {
    "of": r"(?P<of>[{kinds}]\d+\.\d+)",
    "version": r"(?:@(?P<version>-?\d{1,9}))?",
    "how": r"(?P<how>[a-z]+)",
    "word": r"(?P<word>[a-z]+)",
    "bucket": r"(?P<bucket>.+)",
    "ranks": r"(?P<ranks>\d{1,9}(?:,\d{1,9})+)",
}


def to_text(instruction: Printed) -> str:
    """Return how an instruction prints."""
    row = ROW_OF[type(instruction)]
    given = {each.name: getattr(instruction, each.name) for each in fields(instruction)}  # type: ignore[arg-type]
    given["of"] = given.get("of", given.get("action"))
    version = given.get("version", 0)
    given["version"] = f"@{version}" if version else ""
    if isinstance(instruction, Collect):
        given["ranks"] = ",".join(map(str, instruction.ranks))
    return row.text.format(**given)


def parse_instruction(text: str, reductions: Mapping[tuple[str, str], Reduction]) -> Instruction:
    """Return the instruction that prints as `text`.

    `reductions` says, by word and bucket, over which ranks and with how many bytes one is.
    Raises:   ProgramError: no instruction prints so.
    """
    for row in TABLE:
        if found := _pattern(row).fullmatch(text):
            try:
                return _made(row, found.groupdict(), reductions)
            except (ValueError, KeyError, ScheduleError):
                break
    hint = "write F0.3 F0.3@-1 F0.3>r1e0s2 F0.3<r0e0s2 tied:wte.0 U0.0 unshard0 reshard0 F0.3>far"
    raise ProgramError(f"{text!r} is not an instruction", hint=hint)


def _made(
    row: OpRow,
    given: Mapping[str, str | None],
    reductions: Mapping[tuple[str, str], Reduction],
) -> Instruction:
    if row.of is Sum:
        named = reductions[str(given["word"]), str(given["bucket"])]
        return replace(named, step=int(str(given["step"])))
    operands: list[object] = []
    if row.of is Collect:
        how = COLLECT_HOWS[[*map(str, COLLECT_HOWS)].index(str(given["how"]))]
        ranks = tuple(map(int, str(given["ranks"]).split(",")))
        return Collect(Action.parse(str(given["of"])), int(given["edge"] or 0), ranks, how)
    for each in fields(row.of):
        value = given["of" if each.name == "action" else each.name]
        is_action = each.name in ("of", "action")
        operands.append(Action.parse(str(value)) if is_action else int(value or 0))
    return row.of(*operands)


@cache
def _pattern(row: OpRow) -> re.Pattern[str]:
    """Return what the text of a row's instructions looks like."""
    parts = re.split(r"\{(\w+)\}", row.text)
    words = [
        _PATTERNS.get(part, rf"(?P<{part}>\d{{1,9}})").replace("{kinds}", row.kinds)
        if at % 2
        else re.escape(part)
        for at, part in enumerate(parts)
    ]
    return re.compile("".join(words), re.ASCII)
