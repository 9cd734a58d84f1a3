"""Options: what a run may be asked for, in one table.

`ps.train` takes them as keywords.  `penstock train` has a flag for those that people type; all are
said by `--set NAME=VALUE`, or in the table [train] of a TOML file, and `penstock train
--options-help` lists them.  Nothing here takes time to load.
"""

import re
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, TypedDict, cast

from penstock.errors import PlanError
from penstock.files import read_bytes

if TYPE_CHECKING:
    from penstock.cluster.cluster import Cluster
    from penstock.fleet.batch_size import Least
    from penstock.plan.plan import Plan, Units
    from penstock.program.passes.offload import Offloaded
    from penstock.rules.rule import Rule
    from penstock.schedule.recipe import AnySchedule

Subject: TypeAlias = Literal["run", "plan", "trust", "begin and end", "machines that come and go"]
Value: TypeAlias = bool | int | float | str
_LIST = "`penstock train --options-help` lists the options"
SAID = re.compile(  # what an option is to be, in a hint
    r"\w\([^()]*\)|"  # but what belongs to a name, as in found(limit=5)
    r"(?<![\w.-])(?P<name>[a-z_]+)=(?P<value>\"[^\"]*\"|[\w.%]+)"
)


class Spelling(NamedTuple):
    """How one is written and read.

    kind:     of its value, where text or a file says it.
    metavar:  what its value looks like.
    least:    of a number.
    words:    that it can be; none: any.
    is_on:    whether it holds unless it is turned off, which `help` tells of.
    short:    another name of it, outside Python.
    """

    subject: Subject
    help: str
    kind: type[Value] = str
    metavar: str = ""
    least: float | None = None
    words: tuple[str, ...] = ()
    is_on: bool = False
    short: str = ""


class Options(TypedDict, total=False):
    """What a run may be asked for; each is what its text says, and absent where nobody asks."""

    num_steps: Annotated[
        "int | None",
        Spelling("run", "Steps in all; default: the job's.", int, short="steps", least=1),
    ]
    ranks: Annotated[
        "int | None", Spelling("run", "Total ranks; default: the best number.", int, least=1)
    ]
    cluster: Annotated[
        "Cluster | Path | str | None",
        Spelling("run", "The machines (TOML) it runs on; default: measured.", metavar="TOML"),
    ]
    plan: Annotated[
        "Plan | Path | str | None",
        Spelling("run", "Train with this plan; default: searched for.", metavar="FILE"),
    ]
    out: Annotated[
        "Path | str | None",
        Spelling("run", "Folder of the run; default: runs/NAME of the job.", metavar="DIR|URL"),
    ]
    turns: Annotated[
        str,
        Spelling(
            "run",
            "Compute by turns with another run on these ranks.",
            metavar="first:DIR|second:DIR",
        ),
    ]
    torch_profile: Annotated[
        str,
        Spelling(
            "run",
            "Let torch.profiler watch these steps; a trace of each rank is in OUT/torch_profile.",
            metavar="FIRST:LAST",
        ),
    ]
    resume: Annotated[bool, Spelling("run", "Resume from the last checkpoint.", bool)]
    elastic: Annotated[bool, Spelling("run", "Go on when ranks are lost, or others join.", bool)]
    schedule: Annotated[
        "AnySchedule | str | None",
        Spelling("plan", "A name from `penstock schedule`, or a file: text, JSON, torch's CSV."),
    ]
    stages: Annotated["int | None", Spelling("plan", "Stages of a pipeline.", int, least=1)]
    replicas: Annotated["int | None", Spelling("plan", "Copies of the pipeline.", int, least=1)]
    memory: Annotated[
        "str | int | tuple[int, ...] | None",
        Spelling(
            "plan",
            "The most a rank may hold: 60MiB, or 60MiB,30MiB one by one.",
            metavar="SIZE",
        ),
    ]
    tensor: Annotated[
        int,
        Spelling(
            "plan", "Ranks that divide the ops of each stage; default: the best.", int, least=1
        ),
    ]
    context: Annotated[
        int, Spelling("plan", "Ranks that divide the tokens of each sequence.", int, least=1)
    ]
    units: Annotated[
        "Units | None",
        Spelling(
            "plan",
            "One unit for each block, or N for each stage; woven: of two micro-batches in turn, "
            "where ranks divide ops or tokens.",
            metavar="block|N|woven",
        ),
    ]
    offload: Annotated[
        "Offloaded | None",
        Spelling(
            "plan",
            "Keep in far memory what is not needed: state, activations, both, "
            "weights (with state), all.",
            metavar="WORD",
        ),
    ]
    sums: Annotated[
        str,
        Spelling(
            "plan",
            "Sum gradients as bfloat16, float16, int8, sign, top:PART, rank:COLUMNS or delayed:K; "
            "or average weights: local:STEPS, diloco:STEPS, easgd:STEPS or gossip:STEPS; or update "
            "as they come: backup:RANKS, ssp:STEPS or async.",
            metavar="WAY",
        ),
    ]
    decisions: Annotated[
        "Path | str | None",
        Spelling(
            "plan",
            "Take gradients as the run in this folder did, whose sums were as these.",
            metavar="DIR",
        ),
    ]
    topology: Annotated[
        str,
        Spelling(
            "plan",
            "Sum along ring, tree, halving, doubling, direct, server:RANKS or hierarchical:RANKS; "
            "or fastest, by prediction.",
            metavar="WAY",
        ),
    ]
    post_validation: Annotated[
        bool,
        Spelling("plan", "Update before the norm that clips is known.", bool),
    ]
    rules: Annotated[
        "Sequence[Rule] | Path | str",
        Spelling("plan", "Rules (TOML) that plans keep to.", metavar="TOML"),
    ]
    trial: Annotated[
        bool, Spelling("plan", "Do not let the best plans run some steps first.", bool, is_on=True)
    ]
    replan: Annotated[
        bool,
        Spelling("plan", "Do not plan again where what ranks take has moved.", bool, is_on=True),
    ]
    eager: Annotated[bool, Spelling("plan", "Without a plan: plain data parallelism.", bool)]
    check: Annotated[
        bool,
        Spelling(
            "trust", "Do not examine the job, nor compare it with the plain loop.", bool, is_on=True
        ),
    ]
    strict: Annotated[
        bool, Spelling("trust", "Refuse what no plan can train, or what differs.", bool)
    ]
    audit: Annotated[
        str,
        Spelling(
            "trust",
            "Time to compare steps with the plain loop; default: 1%.",
            metavar="N%[,stop|,warn]",
        ),
    ]
    forget_state: Annotated[
        bool, Spelling("trust", "Go on without state that no checkpoint holds.", bool)
    ]
    weights: Annotated[
        "Path | str | None",
        Spelling(
            "begin and end",
            "Begin with these weights: a file or folder of safetensors.",
            metavar="PATH",
        ),
    ]
    checkpoint_every: Annotated[
        "int | str | None",
        Spelling(
            "begin and end",
            "500 (steps), 30s, 10m or 2h; default: by mtbf, else 100.",
            metavar="N|TIME",
        ),
    ]
    keep: Annotated[
        str,
        Spelling(
            "begin and end",
            "Which checkpoints stay; default: the 2 newest, and the best.",
            metavar="N[,every=N][,no-best]",
        ),
    ]
    mtbf: Annotated[
        "str | None",
        Spelling("begin and end", "Mean time between failures, as 3h.", metavar="TIME"),
    ]
    until_loss: Annotated[
        "float | None",
        Spelling("begin and end", "End at this loss; finds ranks and batch.", float, metavar="X"),
    ]
    objective: Annotated[
        "Least",
        Spelling(
            "begin and end",
            "To that loss with least of it; default: time.",
            words=("time", "cost"),
        ),
    ]
    policy: Annotated[
        "Path | str | None",
        Spelling(
            "machines that come and go",
            "Have the machines that this policy wants; with elastic.",
            metavar="TOML",
        ),
    ]
    tls: Annotated[
        bool,
        Spelling(
            "machines that come and go",
            "Lines between ranks inside TLS, by keys that the token makes; with elastic.",
            bool,
        ),
    ]


def _table() -> dict[str, Spelling]:
    hints: dict[str, Any] = Options.__annotations__
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


OPTIONS = _table()
_BY_SHORT = {option.short: name for name, option in OPTIONS.items() if option.short}


def word_of(name: str) -> str:
    """Return how an option is called outside Python: "steps", "checkpoint_every"."""
    return OPTIONS[name].short or name


def asked_for(options: Options) -> dict[str, Value]:
    """Return what options ask for, as a file can hold it; defaults, and the folder, are left out.

    What was given as an object, such as a Plan, is said by the name of its class.
    """
    found: dict[str, Value] = {}
    for name, value in cast(dict[str, object], options).items():
        default = OPTIONS[name].is_on if OPTIONS[name].kind is bool else None
        if name != "out" and value not in (None, default):
            found[name] = _plain(value)
    return found


def _plain(value: object) -> Value:
    if isinstance(value, tuple | list):
        return ",".join(str(_plain(each)) for each in cast("Sequence[object]", value))
    if isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, Path) else type(value).__name__


def check_known(names: Sequence[str]) -> None:
    """Raise where there is no such option.

    Raises:   PlanError: with the nearest.
    """
    for name in names:
        if name in OPTIONS:
            continue
        if name in _BY_SHORT:
            hint = f"in Python it is {_BY_SHORT[name]}"
            raise PlanError(f"there is no option {name}", hint=hint)
        raise PlanError(f"there is no option {name}", hint=_near(name))


def said(text: str) -> tuple[str, Value]:
    """Return an option and its value, of a text such as "steps=200".

    Raises:   PlanError: it says none.
    """
    name, sign, value = text.partition("=")
    if not sign:
        raise PlanError(f"--set {text} has no value", hint=f"write --set {name.strip()}=VALUE")
    known = _named(name, "--set")
    return known, valued(known, value.strip(), f"--set {name.strip()}")


def options_in(path: Path) -> dict[str, Value]:
    """Return what the table [train] of a TOML file asks for.

    Raises:   PlanError: no such file, not TOML, no such table, or an option that is none.
    """
    content = read_bytes(path, PlanError, "options")
    hint = "write [train], and below it lines such as steps = 200"
    try:
        document = tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as problem:
        raise PlanError(f"options {path}: not readable TOML: {problem}", hint=hint) from problem
    table: object = document.get("train")
    if not isinstance(table, dict):
        raise PlanError(f"options {path}: there is no table [train] in it", hint=hint)
    rows = cast("dict[str, object]", table).items()
    named = [(_named(name, f"options {path}"), name, value) for name, value in rows]
    return {known: valued(known, value, f"options {path}: {name}") for known, name, value in named}


def _named(text: str, place: str) -> str:
    """Return the option of that name.

    Raises:   PlanError: there is none.
    """
    word = text.strip().replace("-", "_")
    known = word if word in OPTIONS else _BY_SHORT.get(word)
    if known is None:
        raise PlanError(f"{place}: there is no option {text.strip()}", hint=_near(word))
    return known


def valued(name: str, value: object, place: str) -> Value:
    """Return the value of an option, of a text or of what a file holds.

    Raises:   PlanError: it can have no such value; with the `place` that says it.
    """
    option = OPTIONS[name]
    try:
        return _value(option, value)
    except ValueError as problem:
        message = f"{place} is {value!r:.60}, not {problem}"
        raise PlanError(message, hint=f"{word_of(name)}: {option.help}") from None


def _value(option: Spelling, value: object) -> Value:
    """Return a value as its kind.

    Raises:   ValueError: it is none; with what it can be.
    """
    if option.kind is bool:
        words = {"true": True, "yes": True, "false": False, "no": False}
        made = words.get(str(value).lower())
        if made is None:
            raise ValueError("true or false")
        return made
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a text or a number")
    if option.kind is str:
        if option.words and value not in option.words:
            raise ValueError(" or ".join(option.words))
        return str(value)
    try:
        number = option.kind(str(value))
    except ValueError:
        raise ValueError("a whole number" if option.kind is int else "a number") from None
    if option.least is not None and float(number) < option.least:
        raise ValueError(f"at least {option.least:g}")
    return number


def _near(name: str) -> str:
    near = get_close_matches(name, [*OPTIONS, *_BY_SHORT], 1)
    return f"did you mean {near[0]}? {_LIST}" if near else _LIST
