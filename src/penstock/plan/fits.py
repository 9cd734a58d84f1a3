"""Fits: what the fields of a plan may be, and what does not go together: one table, FITS."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PlanError, ScheduleError
from penstock.program.instructions import Guarding
from penstock.program.passes.offload import Offloaded
from penstock.routes import topology_of
from penstock.schedule.grid import unlike, written
from penstock.schedule.recipe import Recipe, built, copied_of, has_window, name_of
from penstock.schedule.schedule import Schedule
from penstock.sums import SumsKind

if TYPE_CHECKING:
    from penstock.plan.plan import Plan

_MOST_WORK = 50_000_000  # what a schedule can list: arrays of about 2 GiB


class Misfit(NamedTuple):
    """Two features that no plan has together.

    why:    what is wrong, of a plan that has both.
    hint:   which of them to leave out, and what to take instead.
    """

    one: str
    other: str
    why: "Callable[[Plan], str]"
    hint: str


def _undoes(plan: "Plan") -> bool:
    return plan.agreement.clip and plan.agreement.post_validation


def _has_servers(plan: "Plan") -> bool:
    """Return whether its topology says how many servers update the weights."""
    return bool(plan.served) and topology_of(plan.topology).kind == "server"


def _away(plan: "Plan", *words: Offloaded) -> bool:
    return any(stage.far in words for stage in plan.stages)


def _far_whole(plan: "Plan") -> list[int]:
    """Return the stages whose weights each replica would have in far memory of its own."""
    if plan.replicas == 1:
        return []
    return sorted(number for number in plan.far if plan.stages[number].weights == "replicate")


_OWN_WAYS: dict[SumsKind, str] = {
    "16 bits": "adds up each part on one rank, so that it rounds twice",
    "int8": "adds up each part on one rank, and sends codes of it",
    "sign": "adds up each part on one rank, and sends codes of it",
    "top": "gives all ranks the numbers of each",
    "gossip": "averages two by two",
}

FEATURES: "dict[str, Callable[[Plan], bool]]" = {
    "a window": lambda plan: has_window(plan.schedule),
    "a schedule as it is": lambda plan: (
        isinstance(plan.schedule, Schedule) or has_window(plan.schedule)
    ),
    "post-validation": _undoes,
    "replicas": lambda plan: plan.replicas > 1,
    "one replica": lambda plan: plan.replicas == 1,
    "unlike shares": lambda plan: bool(unlike(plan.place.shares)),
    "shards": lambda plan: plan.shards,
    "parts": lambda plan: bool(plan.place.parts),
    "whole stages": lambda plan: not plan.shards,
    "far weights": lambda plan: bool(plan.far),
    "far weights of each replica": lambda plan: bool(_far_whole(plan)),
    "far state": lambda plan: _away(plan, "state", "both"),
    "copies beside computes": lambda plan: plan.overlap.beside,
    "nothing far": lambda plan: all(stage.far == "none" for stage in plan.stages),
    "prefetch": lambda plan: plan.overlap.prefetch != 0,
    "nothing to fetch": lambda plan: not (plan.shards or plan.far),
    "slices": lambda plan: bool(plan.terms.split),
    "divided micro-batches": lambda plan: plan.terms.joined < 1,
    "rounded messages": lambda plan: plan.terms.rounds,
    "sums in fewer bits": lambda plan: plan.agreement.sums is not None,
    "sums that hold back": lambda plan: plan.holds_back,
    "averages of weights": lambda plan: bool(plan.averages),
    "gradients that are served": lambda plan: bool(plan.served),
    "ranks that divide a replica": lambda plan: plan.num_ranks > 1,
    "clipping": lambda plan: plan.agreement.clip,
    "a topology": lambda plan: (
        bool(plan.agreement.topology and plan.topology) and not _has_servers(plan)
    ),
    "sums that have ways of their own": lambda plan: plan.sums_kind in _OWN_WAYS,
    "compiled ops": lambda plan: plan.terms.compiled,
    "one copy of buffers": lambda plan: plan.terms.buffers == "one copy",
    "commits": lambda plan: plan.agreement.commits,
    "no commits": lambda plan: not plan.agreement.commits,
    "a guard": lambda plan: plan.agreement.guard is not None,
    "divided ops": lambda plan: plan.tensor > 1,
    "anything far": lambda plan: any(stage.far != "none" for stage in plan.stages),
}


def _older(what: str) -> "Callable[[Plan], str]":
    return lambda plan: f"{name_of(plan.schedule)} reads older weights, {what}"


def _always(text: str) -> "Callable[[Plan], str]":
    return lambda plan: text


def _parts_with(what: str) -> "Callable[[Plan], str]":
    return lambda plan: f"micro-batches in {1 / plan.terms.joined} parts, with {what}"


def _updates_before(plan: "Plan") -> str:
    what = "post_validation" if _undoes(plan) else name_of(plan.schedule)
    return f"a step is to count once all ranks have come to its end; {what} updates before"


def _parts_with_sums(plan: "Plan") -> str:
    return f"micro-batches in {1 / plan.terms.joined} parts, with sums in {plan.agreement.sums}"


def _copies(plan: "Plan") -> str:
    return f"buffers need one copy of each stage, the plan has {plan.replicas} replicas"


def _far_apart(plan: "Plan") -> str:
    return f"every replica would have stage {_far_whole(plan)[0]} in far memory of its own"


def _prefetch(plan: "Plan") -> str:
    return f"prefetch is {plan.overlap.prefetch} stages"


def _unlike_shares(plan: "Plan") -> str:
    return f"shares are {written(plan.place.shares)}, by {name_of(plan.schedule)}"


def _with_divided(words: str) -> "Callable[[Plan], str]":
    return lambda plan: f"{divided_what(plan)} divided among {plan.tensor} ranks, with {words}"


def divided_what(plan: "Plan") -> str:
    """Return what ranks of the tensor axis divide, in a word."""
    return "tokens" if plan.place.context else "ops"


def _held_with(words: str) -> "Callable[[Plan], str]":
    return lambda plan: f"sums as {plan.agreement.sums} hold back what is not sent, with {words}"


def _averaged_with(words: str) -> "Callable[[Plan], str]":
    return lambda plan: f"weights averaged as {plan.averages} says, with {words}"


def _served_with(words: str) -> "Callable[[Plan], str]":
    return lambda plan: f"a server that takes gradients as {plan.served} says, with {words}"


def _routed_with(words: str) -> "Callable[[Plan], str]":
    return lambda plan: f"sums by {plan.topology}, with {words}"


def _own_way(plan: "Plan") -> str:
    text = plan.agreement.sums
    return f"sums by {plan.topology}, and {text}, which {_OWN_WAYS[plan.sums_kind]}"


_SUMMED = "sum gradients instead: leave sums out, or take bfloat16"
_IN_HALVES = "take sums in bfloat16, which hold back nothing, or leave the other out"
_ALIKE = "give all replicas the same share"
_SERVERS = 'leave topology out, or take as many servers as "server:2" says'
_ALONE = "give each replica one rank: as many replicas as ranks"
_WHOLE = "leave the wire as it is"
_UNDIVIDED = "take 1 tensor rank, or leave the other out"
_OWN_BATCHES = "make the plan with the job's own micro-batches"
_SYNCHRONOUS = "take a synchronous schedule, without post_validation"
_NEAR = "let the plan commit, and offload no weights"
_UNGUARDED = "guards keep copies of steps that all ranks agree on, of weights that are near"

FITS: tuple[Misfit, ...] = (
    Misfit(
        "one copy of buffers",
        "replicas",
        _copies,
        "make the plan with 1 replica",
    ),
    Misfit(
        "compiled ops",
        "rounded messages",
        _always("compiled ops round in the last bit, and so would the wire"),
        "leave the wire as it is, or do not compile",
    ),
    Misfit(
        "divided micro-batches", "a window", _parts_with("an asynchronous schedule"), _OWN_BATCHES
    ),
    Misfit(
        "divided micro-batches", "rounded messages", _parts_with("rounded messages"), _OWN_BATCHES
    ),
    Misfit(
        "divided micro-batches",
        "sums in fewer bits",
        _parts_with_sums,
        _OWN_BATCHES,
    ),
    Misfit(
        "slices",
        "a window",
        _older("of which there are no slices"),
        "take a synchronous schedule, or leave all parameters whole",
    ),
    Misfit(
        "copies beside computes",
        "nothing far",
        _always("copies run beside computes, and there are none"),
        "offload something",
    ),
    Misfit(
        "far weights",
        "a window",
        _older("which cannot be in far memory"),
        "take a synchronous schedule, or offload the state only",
    ),
    Misfit(
        "far weights",
        "post-validation",
        _always("an update that may be undone needs its weights"),
        "clip before the update, or offload activations only",
    ),
    Misfit(
        "far weights of each replica",
        "replicas",
        _far_apart,
        "divide such stages among the replicas: shard them",
    ),
    Misfit(
        "far state",
        "post-validation",
        _always("an update that may be undone needs the optimizer's state"),
        "clip before the update, or do not offload the state",
    ),
    Misfit(
        "prefetch",
        "nothing to fetch",
        _prefetch,
        "shard or offload weights, or give 0",
    ),
    Misfit(
        "parts",
        "whole stages",
        _always("parts of stages, and none is divided"),
        "shard something, or no parts",
    ),
    Misfit(
        "shards",
        "one replica",
        _always("shards are divided among replicas, and there is one"),
        "give the plan 2 replicas or more",
    ),
    Misfit(
        "shards",
        "a window",
        _older("of which there are no shards"),
        "take a synchronous schedule, or replicate all stages",
    ),
    Misfit(
        "shards",
        "post-validation",
        _always("an update that may be undone cannot be that of a shard"),
        "clip before the update, or replicate all stages",
    ),
    Misfit(
        "unlike shares",
        "a schedule as it is",
        _unlike_shares,
        "give all replicas the same share, or name the builder of a synchronous schedule",
    ),
    *(
        Misfit("divided ops", other, _with_divided(words), _UNDIVIDED)
        for other, words in (
            ("a window", "weights of several versions"),
            ("post-validation", "updates that may be undone"),
            ("unlike shares", "unlike shares"),
            ("shards", "stages in shards"),
            ("anything far", "far memory"),
            ("slices", "parameters in slices"),
            ("rounded messages", "rounded messages"),
            ("sums in fewer bits", "sums in fewer bits"),
            ("compiled ops", "compiled ops"),
            ("commits", "steps that ranks commit"),
        )
    ),
    *(
        Misfit("sums that hold back", other, _held_with(words), hint)
        for other, words, hint in (
            ("a window", "gradients of older weights", _IN_HALVES),
            ("post-validation", "updates that may be undone", _IN_HALVES),
            ("shards", "sums of which each rank has a part", "replicate all stages"),
            ("far weights", "sums that are left in far memory", "offload no weights"),
            ("slices", "parameters in slices", "leave all parameters whole"),
            ("commits", "ranks that are lost with what they hold back", _IN_HALVES),
        )
    ),
    *(
        Misfit("averages of weights", other, _averaged_with(words), hint)
        for other, words, hint in (
            ("a window", "weights of several versions", _SUMMED),
            ("post-validation", "updates that may be undone after it", _SUMMED),
            ("shards", "stages of which no replica has all weights", "replicate all stages"),
            ("far weights", "weights in far memory behind their update", "offload no weights"),
            ("slices", "parameters in slices", "leave all parameters whole"),
            ("unlike shares", "replicas that count alike for unlike shares", _ALIKE),
            ("rounded messages", "rounded messages, which the proof makes of whole steps", _WHOLE),
            ("commits", "ranks that are lost with weights that nobody else has", _SUMMED),
        )
    ),
    *(
        Misfit("gradients that are served", other, _served_with(words), hint)
        for other, words, hint in (
            ("a window", "weights of several versions", _SUMMED),
            ("post-validation", "updates that may be undone", _SUMMED),
            ("ranks that divide a replica", "replicas of several ranks", _ALONE),
            ("shards", "stages of which no rank has all weights", "replicate all stages"),
            ("far weights", "weights in far memory", "offload no weights"),
            ("far state", "the optimizer's state in far memory", "offload activations only"),
            ("slices", "parameters in slices", "leave all parameters whole"),
            ("unlike shares", "ranks that count alike for unlike shares", _ALIKE),
            ("rounded messages", "rounded messages, which the proof makes of whole steps", _WHOLE),
            ("commits", "ranks that may be lost with the server", _SUMMED),
            ("a topology", "rounds of a sum, and it has none", _SERVERS),
        )
    ),
    Misfit(
        "a topology",
        "shards",
        _routed_with("stages in shards, of which each rank gets its own part and no more"),
        "replicate all stages, or leave topology out",
    ),
    Misfit(
        "a topology",
        "sums that have ways of their own",
        _own_way,
        "leave topology out, or take sums of whole numbers: delayed, rank, local, diloco, easgd",
    ),
    Misfit("commits", "a window", _updates_before, _SYNCHRONOUS),
    Misfit("commits", "post-validation", _updates_before, _SYNCHRONOUS),
    Misfit("a guard", "no commits", _always(_UNGUARDED), _NEAR),
    Misfit("a guard", "far weights", _always(_UNGUARDED), _NEAR),
)


def check_together(plan: "Plan") -> None:
    """Raise where a plan has two features that do not go together.

    Raises:   PlanError: it says which, and what to leave out.
    """
    for row in FITS:
        if FEATURES[row.one](plan) and FEATURES[row.other](plan):
            raise PlanError(row.why(plan), hint=row.hint)


# -- each field by itself -------------------------------------------------------------------------


def check_sizes(plan: "Plan") -> None:
    """Raise where stages, ranks and micro-batches are not those of one plan.

    Raises:   PlanError: it names the field and its value.
    """
    ends = [stage.cut for stage in plan.stages]
    if not ends or ends[-1] is not None or None in ends[:-1]:
        raise PlanError(f"stages end at {ends}; the last one ends at no cut point, others at one")
    cuts = plan.cuts
    if list(cuts) != sorted(set(cuts)) or min(cuts, default=0) < 0:
        raise PlanError(f"cuts {cuts} are not increasing numbers of cut points")
    ahead = plan.ahead
    if len(ahead) != plan.num_stages:
        raise PlanError(f"prefetch says {len(ahead)} of {plan.num_stages} stages")
    work = plan.num_stages * plan.num_micro_batches
    if work > _MOST_WORK:
        raise PlanError(f"{work} forwards of a pipeline; there cannot be more than {_MOST_WORK}")
    joined = plan.terms.joined
    if joined < 1 and joined * plan.step_micro_batches != int(joined * plan.step_micro_batches):
        message = f"{plan.step_micro_batches} micro-batches of {joined} are no whole ones"
        raise PlanError(message, hint="make the plan again with `penstock plan`")
    _check_copied_once(plan)
    servers = topology_of(plan.topology).size if _has_servers(plan) else 1
    if servers > plan.total_ranks:
        message = f"{servers} servers beside {plan.total_ranks} ranks"
        raise PlanError(message, hint="give each a rank of its own: fewer servers, or more ranks")


def check_schedule(plan: "Plan") -> None:
    """Raise where the schedule is not of what the plan has, or has no end of a step.

    Raises:   PlanError.
    """
    if plan.agreement.guard is not None:
        _check_guard(plan, plan.agreement.guard)
    sizes = plan.num_stages, plan.num_micro_batches
    if isinstance(plan.schedule, Recipe):
        plan.schedule.check(plan.num_stages)
        return
    if has_window(plan.schedule):
        message = f"{name_of(plan.schedule)} is written out for {plan.schedule.num_steps} steps"
        hint = "a plan holds one synchronous step; name the builder of an asynchronous schedule"
        raise PlanError(f"{message}, weights {plan.schedule.weight_rule.name}", hint=hint)
    try:
        built(plan.schedule, *sizes, num_ranks=plan.num_ranks)
    except ScheduleError as problem:
        raise PlanError(problem.message, hint=problem.hint) from problem


def _check_copied_once(plan: "Plan") -> None:
    """Raise where both the schedule and the plan copy the activations of a stage away."""
    for stage in sorted(copied_of(plan.schedule)):
        if stage < plan.num_stages and plan.stages[stage].far in ("activations", "both", "all"):
            message = f"{name_of(plan.schedule)} says what of stage {stage} is in far memory"
            raise PlanError(message, hint="offload nothing else, or the state")


def _check_guard(plan: "Plan", guard: Guarding) -> None:
    """Raise where no rank can keep a copy of what another one has."""
    if not 0 < guard.apart < plan.total_ranks:
        message = f"guard is {guard.every} steps, {guard.apart} ranks apart of {plan.total_ranks}"
        raise PlanError(message, hint="give 1 to one less than all ranks")
    unknown = [stage for stage in guard.shared if not 0 <= stage < plan.num_stages]
    if unknown:
        message = f"guard is of stages {', '.join(map(str, guard.shared))} of {plan.num_stages}"
        raise PlanError(message, hint="stages are numbered from 0")
