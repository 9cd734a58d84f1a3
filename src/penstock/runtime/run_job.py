"""Run a job by a program that was lowered from a plan."""

from penstock.graph.traced import capture_of
from penstock.job import Job
from penstock.program.of_plan import origin_of
from penstock.program.program import Program
from penstock.runtime.buffers import check_chosen
from penstock.runtime.launch import Launcher, run_processes
from penstock.runtime.run import Outcome
from penstock.runtime.run import run as run_stages


def run(
    program: Program,
    job: Job,
    *,
    num_steps: int | None = None,
    launcher: Launcher = run_processes,
) -> Outcome:
    """Train `num_steps` steps (default: the job's) and return timeline, losses and weights.

    Every rank is a process of this host; `launcher=run_threads` makes it a thread of this process.
    Raises:   ProgramError: the program was not lowered from a plan.
              PlanError: a buffer that forward writes cannot be what plan and job say.
              GraphError: the job traces to another graph.  RunError: a rank failed.
    """
    origin = origin_of(program)
    check_chosen(origin.plan, job, origin.graph)
    captured, _ = capture_of(origin.graph, job)
    steps = job.num_steps if num_steps is None else num_steps
    return run_stages(program, captured, origin.stages, job, num_steps=steps, launcher=launcher)
