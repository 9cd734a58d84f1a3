"""Workloads of the field as examples: each is what its paper says, on data that it makes itself."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples import disruptions, experts, fluid, labels, meta, neighbours
from penstock.graph.split import split
from penstock.graph.trace import capture
from penstock.job import Job, load_job
from penstock.plan import plan_by_hand
from penstock.prove.prove import Planned, prove
from penstock.transport.threads import ThreadTransport
from tests.parity.training import Run, train


def fitted(job: Job, steps: int) -> nn.Module:
    """Return the job's model after some steps of a plain loop."""
    torch.manual_seed(job.seed)
    model = job.model()
    updates = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in islice(job.data(0), steps):
        updates.zero_grad()
        loss = job.loss(model, batch)
        (loss if isinstance(loss, Tensor) else loss[0]).backward()
        updates.step()
    return model


def of_two_replicas(job: Job) -> Run:
    """Return a run of two replicas, each with half of a step's micro-batches."""
    made, count = capture(job), job.micro_batches // 2
    options = {"num_micro_batches": count, "num_ranks": 1, "replicas": 2, "clip": job.awaits_all}
    plan = plan_by_hand(made.graph, (), "one_f_one_b", **options)
    return Run(plan.changed(sums=job.sums), job, made)


# A surrogate of a solver


def test_the_solver_keeps_all_dye_and_spreads_it() -> None:
    batch = fluid.sample(3)
    before, after = batch["dye"], batch["after"]
    torch.testing.assert_close(after.mean((1, 2)), before.mean((1, 2)), atol=1e-5, rtol=0)
    assert (after.square().mean((1, 2)) < before.square().mean((1, 2))).all()
    assert ((after - before).square().mean((1, 2)) > 0.01).all()


def test_the_flow_nowhere_piles_up() -> None:
    flow = fluid.sample(3)["flow"]
    along_y, _ = fluid.gradient(flow[:, 0])
    _, along_x = fluid.gradient(flow[:, 1])
    assert float((along_y + along_x).abs().max()) < 1e-4


def test_a_still_fluid_spreads_as_each_wave_does() -> None:
    """The discrete Laplacian scales a wave by 2 * (cos - 1) in each direction, the midpoint rule
    by 1 + z + z^2 / 2 a step.
    """
    at = 2 * torch.pi * torch.arange(fluid.CELLS, dtype=torch.float64) / fluid.CELLS
    wave = torch.cos(2 * at)[None, :, None].expand(1, -1, fluid.CELLS)
    z = fluid.STEP_S * fluid.DIFFUSION * fluid.CELLS**2 * 2 * (torch.cos(2 * at[1]) - 1)
    still = torch.zeros(1, 2, fluid.CELLS, fluid.CELLS, dtype=torch.float64)
    expected = wave * (1 + z + z**2 / 2) ** 5
    torch.testing.assert_close(fluid.solved(wave, still, 5), expected)


def test_halving_the_steps_of_the_solver_changes_little(monkeypatch) -> None:
    batch = fluid.sample(5)
    monkeypatch.setattr(fluid, "STEP_S", fluid.STEP_S / 2)
    finer = fluid.solved(batch["dye"], batch["flow"], 2 * fluid.SOLVER_STEPS)
    change = (batch["after"] - batch["dye"]).norm()
    assert float((finer - batch["after"]).norm() / change) < 0.02


def test_a_surrogate_that_changes_nothing_has_error_1_and_training_makes_it_less() -> None:
    batch = fluid.sample(fluid.HELD_OUT)

    def error(model: nn.Module) -> float:
        off, whole = fluid.metrics(model, batch)["error"]
        return float(off / whole)

    still, trained = fluid.Surrogate(), fitted(fluid.job(), 40)
    with torch.no_grad():
        for weight in still.out.parameters():
            weight.zero_()
        assert error(still) == pytest.approx(1.0)
        assert error(trained) < 0.8


# Experts that never meet


def test_the_true_velocity_is_the_mean_over_paths_through_a_place() -> None:
    """By weights of importance, without the formula: each noise and goal that meet there count."""
    place, time = torch.tensor([[0.9, 0.4]]), torch.tensor([[0.6]])
    generator = torch.Generator().manual_seed(0)
    blobs = torch.randint(experts.BLOBS, (1_000_000,), generator=generator)
    goal = experts.centres()[blobs]
    goal = goal + experts.SPREAD * torch.randn(len(blobs), 2, generator=generator)
    noise = (place - time * goal) / (1 - time)  # that this goal is reached from through the place
    weight = torch.softmax(-noise.square().sum(1) / 2, 0)
    mean = (weight[:, None] * (goal - noise)).sum(0)
    torch.testing.assert_close(experts.true_velocity(place, time)[0], mean, atol=0.02, rtol=0.02)


def test_velocities_of_perfect_experts_and_a_perfect_router_add_up_to_the_true_one() -> None:
    owner = experts.expert_of(torch.arange(experts.BLOBS))

    class Perfect(nn.Module):
        def __init__(self, expert: int) -> None:
            super().__init__()
            self.mine = owner == expert

        def forward(self, into: Tensor) -> Tensor:
            share, velocity = experts.blob_parts(into[:, :2], into[:, 2:])
            share = share * self.mine
            return ((share / share.sum(1, keepdim=True))[..., None] * velocity).sum(1)

    def router(into: Tensor) -> Tensor:
        share, _ = experts.blob_parts(into[:, :2], into[:, 2:])
        return torch.stack([share[:, owner == e].sum(1) for e in range(experts.EXPERTS)], 1).log()

    place, time, _, _ = experts.paths(7, tuple(range(experts.BLOBS)))
    place, time = place.double(), (time.double() * 0.8)
    summed = experts.combined([Perfect(e) for e in range(experts.EXPERTS)], router, place, time)
    torch.testing.assert_close(summed, experts.true_velocity(place, time))


def test_an_expert_sees_its_own_clusters_only() -> None:
    for number in range(experts.EXPERTS):
        into = next(experts.expert(number).data(0))["into"]
        late = into[into[:, 2] > 0.97]
        near = torch.cdist(late[:, :2], experts.centres()).argmin(1)
        assert set(experts.expert_of(near).tolist()) == {number}


def test_experts_learn_and_a_random_division_learns_less() -> None:
    steps, count = 120, experts.EXPERTS
    router = fitted(experts.router(), steps)
    off: list[float] = []
    for at_random in (False, True):
        made = [fitted(experts.expert(number, at_random), steps) for number in range(count)]
        with torch.no_grad():
            off.append(experts.distance(partial(experts.combined, made, router)))
    assert off[0] < off[1] < 1


# A generator for each label


def test_a_label_is_trained_on_points_of_its_own() -> None:
    for number in range(labels.LABELS):
        points = torch.cat([batch["real"] for batch in islice(labels.label(number).data(0), 20)])
        angle = torch.tensor(2 * torch.pi * number / labels.LABELS)
        centre = 2 * torch.stack([angle.cos(), angle.sin()])
        torch.testing.assert_close(points.mean(0), centre, atol=0.1, rtol=0)


def test_neither_of_a_pair_learns_from_the_others_loss() -> None:
    job = labels.label(1)
    model = job.model()
    batch = next(job.data(0))
    _, parts = job.loss(model, batch)
    parts["judged"].backward(retain_graph=True)
    assert all(weight.grad is None for weight in model["maker"].parameters())
    model.zero_grad(set_to_none=True)
    parts["fooled"].backward()
    assert all(weight.grad is None for weight in model["judge"].parameters())


# A recurrent net in 16 bits


def some_moments(start: int, loud: int | None = None) -> Iterator[disruptions.Batch]:
    """Yield shots from the middle on, for a short while; one micro-batch may count much more."""
    for number in itertools.count(start):
        batch = {name: each[:, 28:40] for name, each in disruptions.shots(number).items()}
        yield {**batch, "counts": batch["counts"] * (1e4 if number == loud else 1.0)}


@cache
def short_alarm(bits: Literal["bfloat16", "float16"] | None) -> Run:
    return of_two_replicas(replace(disruptions.alarm(bits), data=some_moments))


def test_a_lost_plasma_is_warned_of_and_leaves_no_signal() -> None:
    batch = disruptions.shots(1)
    warn, there = batch["warn"], batch["counts"].bool()
    lost = ~there[:, -1]
    assert 0 < lost.sum() < len(lost)
    assert not warn[~lost].any()
    assert (warn.sum(1)[lost] == disruptions.AHEAD).all()
    for shot in lost.nonzero()[:, 0].tolist():
        (last, *_) = (~there[shot]).nonzero()[0].tolist()
        assert warn[shot, last - disruptions.AHEAD : last].all()
        assert not batch["signals"][shot, last:].any()


def test_the_rate_is_a_workers_own_times_their_number_and_no_more_than_the_most() -> None:
    rates = [disruptions.rate(0, workers) for workers in (1, 2, 3, 4, 100)]
    assert rates == pytest.approx([2e-3, 4e-3, 6e-3, 6e-3, 6e-3])
    assert disruptions.rate(disruptions.EPOCH, 1) == pytest.approx(0.8 * 2e-3)
    job = disruptions.alarm(None, workers=2)
    assert job.micro_batches == 2
    assert job.learning_rate is not None
    assert job.learning_rate(0) == pytest.approx(4e-3)


@pytest.mark.parametrize("bits", ["bfloat16", "float16"])
def test_workers_in_16_bits_do_what_the_plain_loop_does(bits) -> None:
    run = short_alarm(bits)
    proof = prove(Planned(run.job, run.captured, run.plan), (0, 1))
    assert proof.problem == ""
    assert f"rounds what ranks sum to {bits}" in str(proof)


def test_in_16_bits_it_learns_as_in_32(tmp_path) -> None:
    losses: dict[str, float] = {}
    for bits in (None, "bfloat16", "float16"):
        run = short_alarm(bits)
        steps = train(run, tmp_path / str(bits), (1,) * 60).steps
        losses[str(bits)] = sum(step.loss for step in steps[-5:]) / 5
        assert losses[str(bits)] < 0.6 * steps[0].loss
    assert losses["bfloat16"] == pytest.approx(losses["None"], rel=0.02)
    assert losses["float16"] == pytest.approx(losses["None"], rel=0.005)


def test_half_as_many_bytes_go_from_worker_to_worker(tmp_path, monkeypatch) -> None:
    sent: list[int] = []

    def swap(self, gives, takes, ranks, own=ThreadTransport.swap) -> None:
        sent.extend(part.nbytes for at, part in enumerate(gives) if ranks[at] != self.rank)
        own(self, gives, takes, ranks)

    def gather(self, whole, cuts, ranks, own=ThreadTransport.all_gather) -> None:
        at = ranks.index(self.rank)
        sent.append((len(ranks) - 1) * (cuts[at + 1] - cuts[at]) * whole.itemsize)
        own(self, whole, cuts, ranks)

    monkeypatch.setattr(ThreadTransport, "swap", swap)
    monkeypatch.setattr(ThreadTransport, "all_gather", gather)
    totals: list[int] = []
    for bits in (None, "float16"):
        run = short_alarm(bits)
        if bits is None:
            run = run._replace(plan=run.plan.changed(topology="ring"))
        sent.clear()
        train(run, tmp_path / str(bits), (1,))
        totals.append(sum(sent))
    assert totals[0] == 2 * totals[1] > 0


def test_a_step_that_overflows_at_one_worker_is_left_out_by_both(tmp_path) -> None:
    """Only a micro-batch of the second worker is loud; the step after it is taken by both."""
    run = short_alarm("float16")
    job = replace(run.job, data=partial(some_moments, loud=7), learning_rate=lambda step: 1e-3)
    weights: list[dict[str, Tensor]] = []
    for steps in (1, 2, 3):
        done = train(run._replace(job=job), tmp_path / str(steps), (1,) * steps)
        names = [name for name in done.weights if name.startswith("weights/")]
        weights.append({name: done.weights[name] for name in names})
    assert [step.figures["left_out"] for step in done.steps] == [0, 1, 0]
    scales = [step.figures["loss_scale"] for step in done.steps]
    assert scales == [2.0**16, 2.0**16, 2.0**15]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in names)
    assert not any(torch.equal(weights[1][name], weights[2][name]) for name in names)


# A graph network with sampled neighbours


@pytest.fixture
def near_store(monkeypatch):
    """Let the store answer at once."""
    monkeypatch.setattr(neighbours, "REQUEST_S", 0.0)
    monkeypatch.setattr(neighbours, "BYTES_PER_S", torch.inf)


def test_drawn_nodes_are_neighbours_and_each_is_drawn_about_as_often() -> None:
    first, of, _ = neighbours.graph()
    node = int((first.diff() == 12).nonzero()[0])
    beside = of[first[node] : first[node + 1]]
    generator = torch.Generator().manual_seed(0)
    drawn = neighbours.graph().drawn(torch.full((3, 5), node), 2000, generator)
    assert drawn.shape == (3, 5, 2000)
    assert set(drawn.flatten().tolist()) == set(beside.tolist())
    assert node in beside
    for other in beside.unique().tolist():
        share = float((beside == other).float().mean())
        assert float((drawn == other).float().mean()) == pytest.approx(share, rel=0.1)


def test_edges_go_both_ways() -> None:
    first, of, _ = neighbours.graph()
    source = torch.arange(neighbours.NODES).repeat_interleave(first.diff())
    there, back = source * neighbours.NODES + of, of * neighbours.NODES + source
    assert torch.equal(there.sort()[0], back.sort()[0])


@pytest.mark.usefixtures("near_store")
@pytest.mark.parametrize("room", [0, 700, neighbours.NODES])
def test_a_cache_changes_what_is_fetched_and_no_number(room: int) -> None:
    row_bytes = 4 * neighbours.D
    held = neighbours.features(room * row_bytes + row_bytes - 1)
    assert len(held.rows) == room
    counts = neighbours.graph().first.diff()
    hot = set(counts.argsort(descending=True, stable=True)[:room].tolist())
    for number in (0, 5):
        nodes = neighbours.sampled(number)
        batch = neighbours.batch_of(nodes, room * row_bytes + row_bytes - 1)
        for name, part in zip(("own", "near", "far"), nodes, strict=True):
            assert torch.equal(batch[name], neighbours.stored()[part])
        wanted = {node for part in nodes for node in part.flatten().tolist()}
        assert float(batch["fetched"]) == pytest.approx(len(wanted - hot) * row_bytes / 1e3)


def test_a_layer_means_over_neighbours() -> None:
    torch.manual_seed(0)
    model = neighbours.Sage().double()
    own, near, far = (torch.randn(*shape, 64).double() for shape in ((2,), (2, 3), (2, 3, 4)))

    def mixed(layer: nn.Module, node: Tensor, others: list[Tensor]) -> Tensor:
        mean = sum(others, torch.zeros(())) / len(others)
        return layer.own.weight @ node + layer.own.bias + layer.near.weight @ mean

    for seed, scores in enumerate(model(own, near, far)):
        around = [
            mixed(model.first, near[seed, at], [*far[seed, at]]).clamp(min=0) for at in range(3)
        ]
        middle = mixed(model.first, own[seed], [*near[seed]]).clamp(min=0)
        torch.testing.assert_close(scores, mixed(model.second, middle, around))


@pytest.mark.usefixtures("near_store")
def test_replicas_with_and_without_a_cache_are_the_plain_loop(tmp_path) -> None:
    losses, fetched = [], []
    for job in (neighbours.job(), neighbours.uncached()):
        run = of_two_replicas(job)
        proof = prove(Planned(run.job, run.captured, run.plan), (0, 3))
        assert proof.problem == ""
        steps = train(run, tmp_path / str(len(losses)), (1,) * 10).steps
        losses.append([step.loss for step in steps])
        fetched.append([step.figures["fetched"] for step in steps])
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert all(kept < 0.7 * whole for kept, whole in zip(*fetched, strict=True))


# Meta-learning with a divided table


def test_a_task_is_of_one_user_and_no_record_is_in_two() -> None:
    records = meta.log()
    tasks = meta.users(0, meta.USERS - meta.HELD_OUT).tasks
    assert all(len(set(records.user[task].tolist())) == 1 for task in tasks)
    assert all(len(task) == meta.SUPPORT + meta.QUERY for task in tasks)
    for task in tasks[:5]:
        assert torch.equal(task, task.sort()[0])  # as the log has them
    used = torch.cat(tasks)
    assert len(used.unique()) == len(used)
    whose = records.user[used].unique()
    per_user = records.user.bincount() // (meta.SUPPORT + meta.QUERY)
    assert len(tasks) == int(per_user[: meta.USERS - meta.HELD_OUT].sum())
    assert int(whose.max()) < meta.USERS - meta.HELD_OUT
    held_out = torch.cat(meta.users(meta.USERS - meta.HELD_OUT, meta.USERS).tasks)
    assert int(records.user[held_out].min()) >= meta.USERS - meta.HELD_OUT


def whole_table_loss(weights: dict[str, Tensor], task: Tensor) -> Tensor:
    """Return the loss of MAML whose inner step changes the whole table, records one by one."""
    records = meta.log()

    def judged(weights: dict[str, Tensor], part: Tensor) -> Tensor:
        terms = []
        for record in part.tolist():
            rows = [weights["table.weight"][row] for row in records.fields[record].tolist()]
            x = torch.cat([*rows, records.numbers[record].double()])
            x = F.silu(weights["dense.0.weight"] @ x + weights["dense.0.bias"])
            x = weights["dense.2.weight"] @ x + weights["dense.2.bias"]
            sign = 2 * records.liked[record].double() - 1
            terms.append(F.softplus(-sign * x[0]))
        return torch.stack(terms).mean()

    inner = judged(weights, task[: meta.SUPPORT])
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    moved = {
        name: weight - meta.INNER_RATE * slope
        for (name, weight), slope in zip(weights.items(), slopes, strict=True)
    }
    return judged(moved, task[meta.SUPPORT :])


def test_a_look_up_of_the_rows_of_a_task_is_maml_on_the_whole_table() -> None:
    torch.manual_seed(0)
    model = meta.Recommender().double()
    held = meta.users(0, meta.USERS - meta.HELD_OUT)
    batch = {n: v.double() if v.is_floating_point() else v for n, v in held[3].items()}
    found = meta.loss(model, batch)
    found.backward()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = whole_table_loss(weights, held.tasks[3])
    torch.testing.assert_close(found, expected)
    slopes = torch.autograd.grad(expected, list(weights.values()))
    for own, slope in zip(model.parameters(), slopes, strict=True):
        torch.testing.assert_close(own.grad, slope)


def test_ranks_with_half_of_the_rows_each_are_one_process_over_the_same_tasks(tmp_path) -> None:
    job = meta.job()
    made, options = capture(job), {"num_ranks": 1, "replicas": 2, "clip": False}
    made = split(made, {"table.weight": 2})
    table = [at for at, point in enumerate(made.graph.cut_points) if "table" in point.name]
    options = {"shard": ("shard", "shard", "replicate"), **options}
    plan = plan_by_hand(made.graph, table, "breadth_first", num_micro_batches=2, **options)
    run = Run(plan, job, made)
    proof = prove(Planned(run.job, run.captured, run.plan), (0, 3))
    assert proof.problem == ""
    found = train(run, tmp_path, (1,) * 5).weights
    torch.manual_seed(run.job.seed)
    model = run.job.model()
    updates, tasks = run.job.optimizer(model.parameters()), run.job.data(0)
    for _ in range(5):
        updates.zero_grad()
        for batch in islice(tasks, meta.TASKS):
            (meta.loss(model, batch) / meta.TASKS).backward()
        updates.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[f"weights/{name}"], weight.detach(), atol=2e-5, rtol=1e-4)


def test_who_is_known_by_his_support_is_judged_better_than_a_stranger() -> None:
    job = meta.job()
    torch.manual_seed(job.seed)
    model = job.model()
    updates, tasks = job.optimizer(model.parameters()), job.data(0)
    for _ in range(60):
        updates.zero_grad()
        for batch in islice(tasks, meta.TASKS):
            meta.loss(model, batch).backward()
        updates.step()
    right: dict[str, float] = {}
    for batch in meta.validation():
        for name, (count, _) in meta.metrics(model, batch).items():
            right[name] = right.get(name, 0.0) + float(count)
    assert right["known"] > 1.1 * right["strange"]


@pytest.mark.parametrize(
    "name",
    [
        "fluid.py",
        "experts.py:expert_2",
        "labels.py:label_3",
        "disruptions.py:bfloat16",
        "neighbours.py:uncached",
    ],
)
def test_jobs_are_found_by_their_names(name: str) -> None:
    assert load_job(f"examples/{name}").num_steps > 0


@pytest.mark.long
def test_weights_of_labels_are_the_same_however_many_are_trained_at_once(tmp_path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import penstock as ps

    weights: list[list[Tensor]] = []
    for at_once in (1, 2):
        train = partial(labels.trained, tmp_path / str(at_once), steps=3)
        with ThreadPoolExecutor(at_once) as pool:
            for run in pool.map(train, range(2)):
                model = labels.nets()
                ps.load_weights(model, run)
                weights.append([*model.state_dict().values()])
    assert all(map(torch.equal, weights[0] + weights[1], weights[2] + weights[3]))
