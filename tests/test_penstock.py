"""The package: its verbs, one per arrow of the design, each loaded when it is first used."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.device import Device
from penstock.errors import GraphError, PlanError, ProgramError
from penstock.runtime.launch import run_threads
from penstock.search import Fixed
from tests.cli import mlp

TWO_STAGES = Fixed(ranks=2, stages=2, schedule="one_f_one_b")


@pytest.fixture(scope="module")
def job() -> ps.Job:
    return mlp.job()


@pytest.fixture(scope="module")
def graph(job: ps.Job) -> ps.Graph:
    return ps.trace(job)


@pytest.fixture(scope="module")
def profile(graph: ps.Graph) -> ps.Profile:
    return ps.measure(graph)


@pytest.fixture(scope="module")
def plan(graph: ps.Graph, profile: ps.Profile) -> ps.Plan:
    return ps.search(graph, profile, ps.Cluster.here(2), fixed=TWO_STAGES)


def test_graph_of_the_package_is_the_traced_one_and_saves_as_any(
    graph: ps.Graph, tmp_path: Path
) -> None:
    graph.save(tmp_path / "graph.json")
    again = ps.Graph.load(tmp_path / "graph.json")
    assert type(again) is ps.Graph
    assert again.digest == graph.digest
    assert again.cut_points == graph.cut_points


def test_names_of_the_package_are_its_verbs_and_nouns() -> None:
    assert {*dir(ps)} == {*ps.__all__, "__version__"}


def test_noun_prints_itself_in_a_line_and_as_a_picture(
    graph: ps.Graph, profile: ps.Profile, plan: ps.Plan, job: ps.Job
) -> None:
    timeline = ps.simulate(ps.lower(plan, graph), profile, ps.Cluster.here(2))
    measured = ps.run(ps.lower(plan, graph), job, num_steps=3)
    for noun in (graph, profile, timeline, measured):
        assert "\n" not in repr(noun)
        assert len(repr(noun)) < 300
    assert timeline._repr_html_().startswith("<svg")  # pyright: ignore[reportPrivateUsage]
    assert measured._repr_html_().startswith("<svg")  # pyright: ignore[reportPrivateUsage]
    assert "3 steps" in repr(measured)
    told = ps.report(plan, timeline, measured)
    assert told._repr_html_().startswith("<iframe srcdoc=")  # pyright: ignore[reportPrivateUsage]


def test_graph_from_a_file_is_measured_with_its_job_only(
    graph: ps.Graph, job: ps.Job, tmp_path: Path
) -> None:
    graph.save(tmp_path / "graph.json")
    again = ps.Graph.load(tmp_path / "graph.json")
    with pytest.raises(GraphError, match=f"graph {graph.digest} does not know its job"):
        ps.measure(again)
    with pytest.raises(GraphError, match=rf"traces to graph \w+, not to {graph.digest}"):
        ps.measure(again, mlp.wider())
    assert ps.measure(again, job).graph == graph.digest


def test_measuring_leaves_the_number_of_threads_as_it_was(graph: ps.Graph) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ps.measure(graph)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_search_makes_the_step_of_the_graphs_job(graph: ps.Graph, profile: ps.Profile) -> None:
    here = ps.Cluster.here(1)
    plan = ps.search(graph, profile, here)
    assert (plan.num_micro_batches * plan.replicas, plan.agreement.clip) == (4, False)
    assert ps.search(graph, profile, here, micro_batches=2).num_micro_batches == 2
    clipping = ps.trace(replace(mlp.job(), clip_norm=1.0))
    assert ps.search(clipping, replace(profile, graph=clipping.digest), here).agreement.clip


def test_search_in_a_graph_from_a_file_needs_the_number_of_micro_batches(
    graph: ps.Graph, profile: ps.Profile, tmp_path: Path
) -> None:
    graph.save(tmp_path / "graph.json")
    again = ps.Graph.load(tmp_path / "graph.json")
    with pytest.raises(PlanError, match="how many micro-batches") as caught:
        ps.search(again, profile, ps.Cluster.here(1))
    assert "micro_batches=" in caught.value.hint
    assert ps.search(again, profile, ps.Cluster.here(1), micro_batches=4).num_micro_batches == 4


def test_simulated_program_gives_what_the_search_predicted(graph: ps.Graph) -> None:
    from penstock.timeline import peak_bytes, step_s

    cluster = ps.Cluster.here(2)
    profile = ps.estimate(graph, cluster)
    plan = ps.search(graph, profile, cluster, fixed=TWO_STAGES)
    timeline = ps.simulate(ps.lower(plan, graph), profile, cluster)
    assert plan.predicted is not None
    assert step_s(timeline) == plan.predicted.step_s
    assert peak_bytes(timeline) == plan.predicted.peak_bytes


def test_step_alone_takes_no_less_than_one_of_the_long_run_that_the_search_predicts(
    graph: ps.Graph, profile: ps.Profile, plan: ps.Plan
) -> None:
    from penstock.timeline import peak_bytes, step_s

    timeline = ps.simulate(ps.lower(plan, graph), profile, ps.Cluster.here(2))
    assert plan.predicted is not None
    assert step_s(timeline) >= plan.predicted.step_s
    assert peak_bytes(timeline) == plan.predicted.peak_bytes


def test_simulation_takes_seconds_of_actions_too() -> None:
    from penstock.schedule import gpipe
    from penstock.timeline import step_s

    timeline = ps.simulate(ps.lower(gpipe(2, 2)), lambda action: 1.0)
    assert step_s(timeline) == 6.0


def test_program_without_a_model_can_be_neither_priced_nor_run(
    job: ps.Job, profile: ps.Profile
) -> None:
    from penstock.schedule import gpipe

    program = ps.lower(gpipe(2, 2))
    for use in (lambda: ps.simulate(program, profile), lambda: ps.run(program, job)):
        with pytest.raises(ProgramError, match="does not know the stages") as caught:
            use()
        assert "lower(plan, graph)" in caught.value.hint


def test_plan_is_lowered_only_with_its_graph(graph: ps.Graph, plan: ps.Plan) -> None:
    with pytest.raises(ValueError, match=r"lower\(plan, graph\)"):
        ps.lower(plan)
    with pytest.raises(PlanError, match="the plan is for graph"):
        ps.lower(plan, ps.trace(mlp.wider()))
    assert ps.lower(plan, graph).num_ranks == 2


def test_plan_that_does_not_drain_is_lowered_for_a_window(graph: ps.Graph, plan: ps.Plan) -> None:
    never = plan.changed(schedule="double_buffered")
    with pytest.raises(PlanError, match="drains only at the end of a window") as caught:
        ps.lower(never, graph)
    assert "num_steps=8" in (caught.value.hint or "")
    assert ps.lower(never, graph, num_steps=8).num_steps == 8
    assert ps.lower(plan, graph).num_steps == 1


def test_run_trains_the_jobs_steps_and_is_reported_with_its_losses(
    graph: ps.Graph, job: ps.Job, plan: ps.Plan
) -> None:
    measured = ps.run(ps.lower(plan, graph), job, launcher=run_threads)
    assert [step.step for step in measured.steps] == [0, 1, 2, 3]
    page = ps.report(plan, None, measured)
    assert f"{measured.steps[-1].loss:.4g}"[:4] in page.html
    alone = ps.report(plan, None, measured.timeline)
    assert len(alone.html) < len(page.html)


def test_run_refuses_what_the_plan_would_not_train() -> None:
    from penstock.plan import plan_by_hand
    from tests.cli import odd

    for job, said in (
        (odd.anneals(), "calls"),
        (odd.ignores_start(), "micro-batch"),
        (odd.looks_across(), "the job's optimizer cannot be divided"),
    ):
        graph = ps.trace(job)
        plan = plan_by_hand(graph, [1], "one_f_one_b", num_micro_batches=4, clip=True)
        program = ps.lower(plan, graph)
        with pytest.raises(ps.PenstockError, match=said):
            ps.run(program, job, num_steps=2)
    unseen = ps.lower(plan_by_hand(graph, [], "one_f_one_b", num_micro_batches=4, clip=True), graph)
    assert ps.run(unseen, job, num_steps=1, launcher=run_threads, check=False).steps


def test_run_refuses_early_receives_where_messages_go_by_order(
    graph: ps.Graph, job: ps.Job, plan: ps.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ps.lower(plan.changed(early=2), graph)
    monkeypatch.setattr("penstock.device.here", lambda: Device("cuda"))
    with pytest.raises(PlanError, match="posted 2 computes early, and NCCL matches by order"):
        ps.run(program, job, launcher=run_threads)


def test_run_of_another_job_is_refused(graph: ps.Graph, plan: ps.Plan) -> None:
    with pytest.raises(GraphError, match="the job traces to graph"):
        ps.run(ps.lower(plan, graph), mlp.wider())


# The package itself


def test_every_name_is_there_and_listed() -> None:
    for name in ps.__all__:
        assert getattr(ps, name) is not None
        assert name in dir(ps)
    assert "__version__" in dir(ps)


def test_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'serch'"):
        ps.serch  # noqa: B018


def test_package_is_sent_to_other_processes_by_its_name() -> None:
    """An engine of tasks sends functions by value, and with them the modules that they name."""
    assert pickle.loads(pickle.dumps(ps)) is ps


@pytest.mark.parametrize("room", ["search", "simulate", "report"])
@pytest.mark.parametrize("first", ["room", "verb"])
@pytest.mark.sampled(2)
def test_verb_is_the_verb_whether_its_room_is_loaded_before_or_after(room: str, first: str) -> None:
    steps = [f"import penstock.{room}", f"verb = penstock.{room}"]
    steps = steps if first == "room" else ["import penstock", *reversed(steps)]
    check = f"assert callable(penstock.{room}) and callable(verb), penstock.{room}"
    more = f"from penstock.{room} import {room} as inner"
    program = "\n".join([*steps, check, more, "assert callable(inner)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_none_of_its_rooms() -> None:
    program = (
        "import sys, penstock\n"
        "rooms = [name for name in sys.modules if name.startswith('penstock.')]\n"
        "sys.exit(' '.join(rooms) or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_that_need_no_torch_load_none() -> None:
    program = (
        "import sys, penstock as ps\n"
        "ps.Job, ps.Cluster, ps.Graph, ps.Plan, ps.Profile, ps.Program, ps.Schedule, ps.Timeline\n"
        "ps.SCHEDULES, ps.load_job, ps.trace, ps.measure\n"
        "ps.search, ps.lower, ps.simulate, ps.report\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
