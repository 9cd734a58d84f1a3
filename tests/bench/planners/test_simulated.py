"""planners.problem and planners.simulated: seconds, bytes and refusals, by definition."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planners.problem import Assignment, Problem
from bench.planners.simulated import simulated
from penstock.errors import PlanError
from penstock.schedule import find
from penstock.search.transformer.partition import Chain, Kind
from tests.bench.planners.problems import alike, everything, problems
from tests.draws import examples

SCHEDULES = ("one_f_one_b", "gpipe", "zb_h1", "zb_h2", "dapple")


def price(problem, group, layers):
    """Return the seconds of F and B of layers, shared out over a group."""
    kinds = [problem.kinds[problem.kind_of[device]] for device in group]
    return max(sum(kind.layer_s[slice(*layers)]) for kind in kinds) / len(group)


def link(problem, a, b):
    return min(problem.bytes_per_s[a][b], problem.bytes_per_s[b][a])


def message(problem, senders, receivers, end):
    """Return the seconds of a message, cut so small that every part has one owner on each side."""
    parts = len(senders) * len(receivers)
    size = problem.chain.sent_bytes[end - 1] / parts
    out = dict.fromkeys((*senders, *receivers), 0.0)
    for part in range(parts):
        a, b = senders[part // len(receivers)], receivers[part // len(senders)]
        for device in (a, b):
            out[device] += size / link(problem, a, b)
    return max(out.values())


def ring(problem, group, layers):
    r, weights = len(group), sum(problem.chain.weight_bytes[slice(*layers)])
    slowest = min((link(problem, group[k], group[k - 1]) for k in range(r)), default=1)
    return 2 * (r - 1) / r * weights / slowest if r > 1 else 0.0


def reference(problem, assignment):
    """Return the seconds of a step: every rank walks through its order as far as it can."""
    made = find(assignment.schedule)(len(assignment.ends), problem.num_micro_batches)
    spans = list(zip((0, *assignment.ends), assignment.ends, strict=False))
    home = [made.rank_of(stage, 0) for stage in range(len(spans))]
    groups = [assignment.groups[rank] for rank in home]
    work = [price(problem, group, span) for group, span in zip(groups, spans, strict=True)]
    done, clock = {}, [0.0] * made.num_ranks
    at = [0] * made.num_ranks
    orders = list(made.orders)
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, stage, m = order[at[rank]]
                side = "F" if kind == "F" else "I"
                other = stage - 1 if kind == "F" else stage + 1
                ready = 0.0
                if kind != "W" and 0 <= other < len(spans):
                    if (side, other, m) not in done:
                        break
                    border = min(stage, other)
                    wire = message(problem, groups[border], groups[border + 1], spans[border][1])
                    ready = done[side, other, m] + (wire if home[other] != rank else 0.0)
                seconds = work[stage] * (2 / 3 if kind == "B" else 1 / 3)
                clock[rank] = max(clock[rank], ready) + seconds
                if kind != "W":
                    done[side, stage, m] = clock[rank]
                at[rank] += 1
    for stage, rank in enumerate(home):
        clock[rank] += ring(problem, groups[stage], spans[stage])
    return max(clock)


def held(problem, assignment, rank):
    """Return the most bytes on a device of a group, walking through its order."""
    made = find(assignment.schedule)(len(assignment.ends), problem.num_micro_batches)
    chain, most, now = problem.chain, 0.0, 0.0
    spans = list(zip((0, *assignment.ends), assignment.ends, strict=False))
    states = sum(
        sum(chain.state_bytes[slice(*span)])
        for stage, span in enumerate(spans)
        if made.rank_of(stage, 0) == rank
    )
    for kind, stage, _ in made.orders[rank]:
        one = sum(chain.kept_bytes[slice(*spans[stage])]) / len(assignment.groups[rank])
        now += {"F": one, "I": 0.0, "B": -one, "W": -one}[kind]
        most = max(most, now)
    return states + most


def check(problem, assignment):
    (found,) = simulated(problem, [assignment])
    assert found.assignment == assignment
    assert found.step_s == pytest.approx(reference(problem, assignment), rel=1e-9)
    lacks = 0.0
    for rank, group in enumerate(assignment.groups):
        bytes_held = held(problem, assignment, rank)
        assert found.peak_bytes[rank] == pytest.approx(bytes_held, rel=1e-9)
        for device in group:
            room = problem.kinds[problem.kind_of[device]].memory_bytes
            lacks = max(lacks, bytes_held - room)
    assert found.excess_bytes == pytest.approx(lacks, rel=1e-6, abs=1e-6)
    assert found.fits == (lacks <= 1e-9)


@examples(20)
@given(problems(), st.data())
def test_step_and_bytes_are_those_of_walking_through_the_orders(problem, data):
    options = list(everything(problem, data.draw(st.sampled_from(SCHEDULES))))
    check(problem, data.draw(st.sampled_from(options)))


@examples(12)
@given(problems(layers=(6, 8), devices=(3, 3)), st.sampled_from(["interleaved", "zb_v"]), st.data())
def test_two_stages_on_a_group_are_counted_together(problem, schedule, data):
    groups = data.draw(st.sampled_from([((0,), (1, 2)), ((2,), (0,), (1,)), ((1,),)]))
    cuts = data.draw(
        st.lists(
            st.integers(1, len(problem.chain) - 1),
            min_size=2 * len(groups) - 1,
            max_size=2 * len(groups) - 1,
            unique=True,
        )
    )
    check(problem, Assignment((*sorted(cuts), len(problem.chain)), groups, schedule))


def test_many_are_what_each_is_alone():
    problem = alike((1, 2, 3), 3, sent=(1, 2, 3), weights=(1, 1, 1))
    options = [one for name in SCHEDULES for one in everything(problem, name)]
    assert simulated(problem, options) == [simulated(problem, [one])[0] for one in options]


def test_one_device_takes_its_micro_batches_one_after_the_other():
    (found,) = simulated(alike((1, 2), 1, m=5), [Assignment((2,), ((0,),))])
    assert found.step_s == pytest.approx(15)


def test_replicas_share_the_work_and_sum_at_the_end():
    """4 micro-batches of 6 s on three devices; then 2 * 2/3 of 9 bytes."""
    problem = alike((6,), 3, weights=(9,), m=4)
    (found,) = simulated(problem, [Assignment((1,), ((0, 1, 2),))])
    assert found.step_s == pytest.approx(4 * 2 + 12)


@pytest.mark.parametrize(
    ("groups", "seconds"),
    [
        (((0,), (1,)), 6.0),
        (((0,), (1, 2)), 6.0),  # all from one device
        (((0, 1), (2, 3)), 3.0),  # half from each
        (((0, 1), (2, 3, 4)), 3.0),  # a third and a sixth from each
    ],
)
def test_message_goes_in_contiguous_shares(groups, seconds):
    problem = alike((0, 0), 5, sent=(6, 0), m=1)
    (found,) = simulated(problem, [Assignment((1, 2), groups)])
    assert found.step_s == pytest.approx(2 * seconds)  # and back


def test_slower_direction_of_a_link_counts():
    chain = Chain((0, 0), (6, 0))
    problem = Problem(chain, (Kind(2, (0, 0)),), ((1.0, 2.0), (3.0, 1.0)), 1)
    (found,) = simulated(problem, [Assignment((1, 2), ((0,), (1,)))])
    assert found.step_s == pytest.approx(2 * 6 / 2)


@examples(12)
@given(problems(memory=(math.inf,)), st.data())
def test_schedules_made_for_the_seconds_are_no_slower_than_1f1b(problem, data):
    """On what they are made for: the mean message."""
    one = data.draw(st.sampled_from(list(everything(problem))))
    count = problem.num_devices
    even = Problem(
        Chain(problem.chain.weight_bytes, (0,) * len(problem.chain)),
        problem.kinds, ((1.0,) * count,) * count, problem.num_micro_batches,
    )  # fmt: skip
    names = ("one_f_one_b", "list_schedule", "zb_greedy")
    options = [Assignment(one.ends, one.groups, name) for name in names]
    plain, listed, split = (found.step_s for found in simulated(even, options))
    assert listed <= plain * (1 + 1e-9)
    assert split <= plain * (1 + 1e-9)


def test_schedule_made_for_the_seconds_keeps_to_the_memory():
    """Two stages, room for three activations: GPipe would hold eight."""
    chain = Chain((0, 0), (100, 0), (0, 0), (1, 1))
    links = ((1.0, 1.0), (1.0, 1.0))
    for room in (3, 4, 8):
        problem = Problem(chain, (Kind(2, (3, 3), room),), links, 8)
        for name in ("list_schedule", "zb_greedy"):
            (found,) = simulated(problem, [Assignment((1, 2), ((0,), (1,)), name)])
            assert found.fits
            assert max(found.peak_bytes) <= room


def test_outcome_prints_what_it_takes_and_what_lacks():
    problem = alike((1, 1), 2, weights=(2**30, 2**30), m=1, memory=2**29, bytes_per_s=2.0**30)
    (found,) = simulated(problem, [Assignment((1, 2), ((0,), (1,)))])
    assert str(found) == "2.00 s, 1.00 GiB, 512 MiB too much: one_f_one_b  0-0 on 0 | 1-1 on 1"
    two = Assignment((1, 2, 3, 4), ((0, 1), (2,)), "interleaved")
    assert str(two) == "interleaved  0-0 | 1-1 | 2-2 | 3-3 on ranks 0,1 | 2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bytes_per_s": ((1.0,),)}, r"2 devices, links of \[1\]"),
        ({"bytes_per_s": ((1.0, 0.0), (1.0, 1.0))}, "from device 0 to 1 has 0.0 bytes/s"),
        ({"hosts": (0,)}, "hosts of 1"),
        ({"num_micro_batches": 0}, "0 micro-batches"),
        ({"kinds": (Kind(2, (1.0,)),)}, r"seconds of \[1\] layers, the chain has 2"),
        ({"kinds": ()}, "0 devices"),
    ],
)
def test_problem_that_cannot_be_is_refused(change, words):
    given_ = {"chain": Chain((0, 0), (0, 0)), "kinds": (Kind(2, (1.0, 1.0)),)}
    given_ |= {"bytes_per_s": ((1.0, 1.0), (1.0, 1.0)), "num_micro_batches": 1}
    with pytest.raises(PlanError, match=words):
        Problem(**(given_ | change))


@pytest.mark.parametrize(
    ("ends", "groups", "words"),
    [
        ((1, 1), ((0,), (1,)), "before layers"),
        ((0, 2), ((0,), (1,)), "before layers"),
        ((), (), "before layers"),
        ((1, 2), ((0,), ()), "groups of devices"),
        ((1, 2), ((0, 1), (1,)), "groups of devices"),
    ],
)
def test_assignment_that_cannot_be_is_refused(ends, groups, words):
    with pytest.raises(PlanError, match=words):
        Assignment(ends, groups)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        (Assignment((1,), ((0,),)), r"before layers \(1,\)"),
        (Assignment((1, 2), ((0,),)), "on 1 groups"),
        (Assignment((2,), ((0,),), "list_schedule"), None),
        (Assignment((1, 2), ((0,),), "list_schedule"), "on 1 groups"),
        (Assignment((1, 2), ((0,), (1,)), "chimera"), "several ranks"),
    ],
)
def test_assignment_that_does_not_go_with_the_problem_is_refused(assignment, words):
    problem = alike((1, 1), 2)
    if words is None:
        assert simulated(problem, [assignment])[0].fits
        return
    with pytest.raises(PlanError, match=words):
        simulated(problem, [assignment])
