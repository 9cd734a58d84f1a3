"""Simulate a program by a profile: the stages that it was lowered from are priced first."""

from penstock.cluster import Cluster
from penstock.profile import Profile
from penstock.program.lower_plan import schedule_of
from penstock.program.of_plan import origin_of
from penstock.program.program import Program
from penstock.schedule import weight_copies
from penstock.simulate.costs import Costs, Memory
from penstock.simulate.prepare import Seconds
from penstock.simulate.price import costs_of, memory_of
from penstock.simulate.recorded import Recorded
from penstock.simulate.simulate import simulate as simulate_costs
from penstock.timeline import Timeline


def simulate(
    program: Program,
    seconds: Profile | Costs | Recorded | Seconds,
    cluster: Cluster | None = None,
    *,
    memory: Memory | None = None,
    spans: bool = True,
) -> Timeline:
    """Return the timeline of one window of `program`, in seconds from its start.

    seconds:  a profile of the graph that the program was lowered with (then the bytes held are
              known too), a table of costs, a function of the action, or what was recorded of a run.
    Without a `cluster`, messages and collectives take no time.
    Raises:   ProgramError: a profile, but the program was not lowered from a plan.
              ProfileError: the profile is of another graph.
              ClusterError: too few ranks, or no link where a message goes.
    """
    if not isinstance(seconds, Profile):
        return simulate_costs(program, seconds, cluster, memory=memory, spans=spans)
    plan, graph, stages = origin_of(program)
    alive = weight_copies(schedule_of(plan, num_steps=program.num_steps))
    costs = costs_of(graph, stages, seconds, alive)
    held = memory or memory_of(graph, stages, seconds, program, alive)
    return simulate_costs(program, costs, cluster, memory=held, spans=spans)
