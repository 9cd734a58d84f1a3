"""Run a job by a program that was lowered from a plan: examined and proved, unless told not to."""

from penstock.choose.run_windows import check_early
from penstock.errors import JobError, RunError
from penstock.examine.buffer_terms import check_chosen
from penstock.examine.examine import examine
from penstock.examine.learning_rate import replayed
from penstock.graph.traced_graph import capture_of
from penstock.job import Job
from penstock.plan.of_plan import origin_of
from penstock.program.program import Program
from penstock.prove.prove import Planned, lacks_memory, steps_to_prove
from penstock.prove.prove import prove as prove_planned
from penstock.runtime.launch import Launcher, run_processes
from penstock.runtime.run import Outcome
from penstock.runtime.run import run as run_stages

_MEND = "fix that; `check=False` runs it without checking"


def run(
    program: Program,
    job: Job,
    *,
    num_steps: int | None = None,
    launcher: Launcher = run_processes,
    check: bool = True,
) -> Outcome:
    """Train `num_steps` steps (default: the job's) and return timeline, losses and weights.

    Every rank is a process of this host; `launcher=run_threads` makes it a thread of this process.
    check:    whether the job is examined first, and two steps are compared with the plain loop.
    Raises:   ProgramError: the program was not lowered from a plan.
              PlanError: a buffer that forward writes cannot be what plan and job say.
              GraphError: the job traces to another graph.  RunError: a rank failed.
              JobError, RunError: the plan would train something else than the plain loop.
    """
    origin, job = origin_of(program), replayed(job)
    check_chosen(origin.plan, job, origin.graph)
    check_early(origin.plan)
    captured, _ = capture_of(origin.graph, job)
    steps = job.num_steps if num_steps is None else num_steps
    if check:
        _check(Planned(job, captured, origin.plan), steps, launcher)
    return run_stages(
        program,
        captured,
        origin.stages,
        job,
        num_steps=steps,
        launcher=launcher,
        compiled=origin.plan.terms.compiled,
    )


def _check(planned: Planned, num_steps: int, launcher: Launcher) -> None:
    found = examine(planned.job)
    if problem := found.one_process or found.no_plan or found.failed:
        message = found.failed or f"a plan would train something else: {problem}"
        raise JobError(message, hint=_MEND)
    if lacks_memory(planned):
        return
    steps = steps_to_prove(0, num_steps, averages=planned.plan.averages)
    proof = prove_planned(planned, steps, launcher=launcher)
    if proof.problem:
        raise RunError(f"this plan would train something else: {proof}", hint=_MEND)
