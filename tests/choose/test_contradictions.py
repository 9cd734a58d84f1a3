"""Contradictions: what no plan has together is refused first, and nothing that some plan has."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.choose.contradictions import check_asked, check_given
from penstock.errors import PlanError
from penstock.job import Job
from penstock.search.search import search
from penstock.search.shapes import Fixed, RankExchange
from tests.search.chains import chain, cluster_of, profile_of

GRAPH = chain([3, 3, 3], [5, 6, 7])
PROFILE = profile_of(GRAPH, [1.0, 2.0, 1.0], far_s_per_byte=1e-3)


def fails(*words: object) -> object:
    raise AssertionError("the job was looked at")


def job_of(**words: object) -> Job:
    return ps.Job(fails, fails, fails, fails, micro_batches=4, **words)


@pytest.mark.parametrize(
    ("asked", "fixed", "commits", "why"),
    [
        ({"clip_norm": 1.0, "sums": "ssp:3"}, {"post_validation": True}, False, "may be undone"),
        ({"sums": "async"}, {"topology": "server:5"}, False, "5 servers beside 4 ranks"),
        ({"sums": "async"}, {"topology": "tree"}, False, "rounds of a sum"),
        ({"sums": "async"}, {"schedule": "pipedream"}, False, "weights of several versions"),
        ({"sums": "int8"}, {"schedule": "pipedream"}, False, "hold back"),
        ({}, {"schedule": "pipedream"}, True, "pipedream updates before"),
        ({"sums": "sign"}, {}, True, "ranks that are lost"),
        ({"sums": "backup:1"}, {}, True, "lost with the server"),
        ({}, {"schedule": "pipedream", "offload": "weights"}, False, "older weights"),
        ({"sums": "int8"}, {"topology": "tree"}, False, "sums by tree"),
        ({"sums": "int8"}, {"tensor": 2}, False, "sums in fewer bits"),
        ({}, {"schedule": "forward_only"}, False, "has no backward pass"),
    ],
)
def test_what_no_plan_has_together_is_refused_by_job_and_options_alone(
    asked, fixed, commits, why
) -> None:
    of_ranks = {name: fixed[name] for name in fixed if name in RankExchange._fields}
    others = {name: fixed[name] for name in fixed if name not in of_ranks}
    wanted = Fixed(**others, exchange=RankExchange(**of_ranks))
    with pytest.raises(PlanError, match=why):
        check_asked(job_of(**asked), wanted, 4, commits=commits)


def test_what_there_is_none_of_on_one_rank_goes_with_all() -> None:
    undone = Fixed(ranks=1, exchange=RankExchange(post_validation=True))
    check_asked(job_of(clip_norm=1.0, sums="ssp:3"), undone, 1)
    check_asked(job_of(sums="int8"), Fixed(), 1, commits=True)


def test_there_may_be_as_many_servers_as_ranks() -> None:
    check_asked(job_of(sums="async"), Fixed(exchange=RankExchange(topology="server:4")), 4)


def test_replicas_may_have_parts_of_their_weights_in_far_memory() -> None:
    check_asked(job_of(), Fixed(replicas=2, offload="all"), 2)


def test_plan_that_is_given_is_refused_where_its_steps_cannot_commit() -> None:
    words = {"graph": "", "num_ranks": 1, "replicas": 2, "num_micro_batches": 2}
    plan = ps.Plan.of(schedule="one_f_one_b", **words)
    check_given(plan)
    check_given(plan.changed(clip=True, post_validation=True))  # which an elastic run leaves out
    with pytest.raises(PlanError, match="ranks that are lost with what they hold back"):
        check_given(plan.changed(sums="int8"))


@settings(max_examples=40, deadline=None)
@given(
    sums=st.sampled_from([None, "bfloat16", "int8", "local:2", "ssp:1"]),
    clip=st.sampled_from([None, 1.0]),
    schedule=st.sampled_from([None, "gpipe", "pipedream", "interleaved"]),
    offload=st.sampled_from([None, "state", "all"]),
    topology=st.sampled_from([None, "tree", "server:2"]),
    replicas=st.sampled_from([None, 1, 2]),
    ranks=st.integers(1, 3),
    undone=st.booleans(),
    commits=st.booleans(),
)
def test_what_is_refused_is_refused_by_the_search_too(  # noqa: PLR0913 - what is drawn
    sums, clip, schedule, offload, topology, replicas, ranks, undone, commits
) -> None:
    fixed = Fixed(
        ranks, replicas, None, schedule, offload=offload, exchange=RankExchange(topology=topology)
    )
    exchange = fixed.exchange._replace(post_validation=undone and clip is not None)
    fixed = replace(fixed, exchange=exchange)
    job = job_of(clip_norm=clip, sums=sums)
    try:
        check_asked(job, fixed, ranks, commits=commits)
    except PlanError:
        with pytest.raises(PlanError):  # noqa: PT012 - by the search, or what comes after it
            plan = search(
                GRAPH,
                PROFILE,
                cluster_of(ranks),
                micro_batches=4,
                clip=clip is not None,
                fixed=fixed.as_in(job_of(sums=sums)),
            ).plan
            assert commits
            check_given(plan)
