"""Simulate a program by a profile: the stages that it was lowered from are priced first."""

from penstock.cluster.cluster import Cluster
from penstock.cluster.order import placed
from penstock.errors import ProfileError
from penstock.plan.of_plan import origin_of
from penstock.plan.plan import schedule_of
from penstock.profile.kinds import Profiles, as_tuple, places_of
from penstock.program.program import Program
from penstock.schedule.figures import weight_copies
from penstock.simulate.arrays import Seconds
from penstock.simulate.costs import Costs, Memory
from penstock.simulate.guards import with_guards
from penstock.simulate.price import by_rank, costs_of, held_of, memory_on, ways_of
from penstock.simulate.recorded import Recorded
from penstock.simulate.simulate import simulate as simulate_costs
from penstock.timeline.timeline import Timeline


def simulate(
    program: Program,
    seconds: Profiles | Costs | Recorded | Seconds,
    cluster: Cluster | None = None,
    *,
    memory: Memory | None = None,
    spans: bool = True,
) -> Timeline:
    """Return the timeline of one window of `program`, in seconds from its start.

    seconds:  a profile of the graph that the program was lowered with, or one for each kind of
              device (then the bytes held are known too); a table of costs; a function of the
              action; or what was recorded in a run.
    Without a `cluster`, messages and collectives take no time, and there is one profile.
    With one, its hosts are put in the order that the plan has.
    Raises:   ProgramError: a profile, but the program was not lowered from a plan.
              ProfileError: the profile is of another graph, or none is of a rank's device.
              ClusterError: too few ranks, or no link where a message goes.
    """
    if isinstance(seconds, Costs | Recorded) or callable(seconds):
        return simulate_costs(program, seconds, cluster, memory=memory, spans=spans)
    plan, graph, stages = origin_of(program)
    profiles, places = as_tuple(seconds), (0,) * program.num_ranks
    if cluster is not None:
        cluster = placed(cluster, plan.place.hosts)
        places = places_of(profiles, cluster, program.num_ranks)
    elif len(profiles) > 1:
        hint = "give the cluster too"
        raise ProfileError(f"{len(profiles)} profiles, but no cluster", hint=hint)
    schedule = schedule_of(plan, num_steps=program.num_steps)
    alive, ways = weight_copies(schedule), ways_of(schedule)
    ways = ways._replace(
        bits=program.graph.bits,
        compiled=plan.terms.compiled,
        sharded=plan.divided,
        far=plan.far,
        held_back=plan.sums_way,
    )
    costs = costs_of(graph, stages, profiles, alive, copies=plan.offloads, ways=ways)
    costs = by_rank(costs, profiles, program, places, (graph, stages))
    if memory is None:
        held = [
            held_of(graph, stages, profile, alive, copies=plan.offloads, ways=ways)
            for profile in profiles
        ]
        posted = plan.overlap.early > 0 or (cluster is not None and cluster.holds_receives)
        memory = memory_on(held, program, places, posted=posted)
    own = places, (graph, stages)
    costs, memory = with_guards(costs, memory, program, profiles, own)
    return simulate_costs(program, costs, cluster, memory=memory, spans=spans)
