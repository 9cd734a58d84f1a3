"""Fuse: compiles what a plan runs and measures it, so that its prediction is of what will run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.graph.graph import Graph
from penstock.graph.stages import Segment, SegmentKind
from penstock.job import Job
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.plan import Decision, Plan

if TYPE_CHECKING:
    from penstock.graph.trace import Capture
    from penstock.profile.profile import Profile


def known(
    job: Job, captured: "Capture", plan: Plan, profiles: "Sequence[Profile]"
) -> "tuple[Profile, ...]":
    """Return profiles that know the segments of a compiled plan, which are compiled for it.

    Compiled here, by the process whose children the ranks are, or before others look on disk.
    What is measured here is kept.  Estimates of other devices stay as they are.
    """
    from penstock.files import cache_folder
    from penstock.graph.fused_runs import fused_function_of

    for segment in segments_of_plan(plan, captured.graph)[1]:
        fused_function_of(segment, captured, folder=cache_folder("compiled"))
    return tuple(_known(job, captured, plan, profile) for profile in profiles)


def _known(job: Job, captured: "Capture", plan: Plan, profile: "Profile") -> "Profile":
    from penstock.files import cache_folder
    from penstock.graph.fused_runs import fused_function_of
    from penstock.profile.fused import measure_fused
    from penstock.profile.kept_profiles import keep_fused

    pairs, segments = segments_of_plan(plan, captured.graph)
    digests = {segment.digest for segment in segments}
    if not profile.basis.is_measured or digests <= {row.segment for row in profile.fused}:
        return profile
    fuse = partial(fused_function_of, folder=cache_folder("compiled"))
    rows = measure_fused(captured, job, stages_of(plan, captured.graph), pairs, fuse)
    others = tuple(row for row in profile.fused if row.segment not in digests)
    profile = replace(profile, fused=(*others, *rows))
    if (folder := cache_folder("profiles")) is not None:
        keep_fused(folder, captured, job, profile)
    return profile


def segments_of_plan(
    plan: Plan, graph: Graph
) -> tuple[list[tuple[int, SegmentKind]], list[Segment]]:
    """Return what a plan runs that has ops: stages and kinds, and the segments."""
    from penstock.runtime.worker import segments_of

    stages = stages_of(plan, graph).stages
    pairs: list[tuple[int, SegmentKind]] = [
        (stage, kind)
        for stage, kind in segments_of(lower_plan(plan, graph))
        if stages[stage].segment(kind).ops
    ]
    return pairs, [stages[stage].segment(kind) for stage, kind in pairs]


def usable(plan: Plan) -> Plan:
    """Return `plan`; not compiled, and it says why, where nothing can be compiled here."""
    if not plan.terms.compiled or not (why := no_compiler()):
        return plan
    others = (each for each in plan.decisions if each.what != "compiled")
    said = Decision("compiled", "no", "only choice", why)
    return plan.changed(compiled=False, decisions=(*others, said))


def no_compiler() -> str:
    """Return why nothing can be compiled for the device here; empty if it can."""
    from penstock._compat import why_no_compiler
    from penstock.device import here

    return why_no_compiler(here().place)
