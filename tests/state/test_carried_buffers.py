"""Parts that copies carry sum to what one place would have, in any order and by any copies."""

import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import PlanError
from penstock.graph.cut import cut
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.worker import Task
from penstock.schedule import Schedule, chimera, one_f_one_b
from penstock.state.carried_buffers import Carried, Carry, carries_of
from penstock.state.laws.buffers import BufferLaw, Laws
from penstock.transport import Transport
from penstock.transport.threads import thread_transports
from tests.draws import examples
from tests.parity.models import captured, job_of, plan_of
from tests.parity.training import listed
from tests.program.lowering import lower_schedule

COEFFICIENTS = (0.0, 0.25, 0.9, 1.0, 1.0, 0.0)
FIRST = torch.tensor(3.0), torch.tensor([1.0, -2.0]), torch.tensor(5.0)
NUMBERS = torch.tensor([7, -7]), torch.tensor(True)


def first() -> list[Tensor]:
    """Return a newest, two averages, a sum, a count of whole numbers and a flag."""
    floats = [value.double() for value in (FIRST[0], FIRST[1], FIRST[2], FIRST[1])]
    return [*floats, *(value.clone() for value in NUMBERS)]


def news(micro_batch: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(micro_batch)
    floats = [torch.randn(v.shape, generator=source).double() for v in first()[:4]]
    return [*floats, torch.tensor([micro_batch, 2]), torch.tensor(micro_batch % 3 == 0)]


def forward(tensors: list[Tensor], micro_batch: int) -> None:
    """Do what an op does: c * old + new."""
    for tensor, c, new in zip(tensors, COEFFICIENTS, news(micro_batch), strict=True):
        if c == 0.0:
            tensor.copy_(new)
        else:
            tensor.copy_(c * tensor + new if c < 1.0 else tensor + new)


class Copies:
    """Some copies and their threads' ends."""

    def __init__(self, count: int) -> None:
        ranks = tuple(range(count))
        self.held = [first() for _ in ranks]
        self.ends = thread_transports(count)
        self.carried = [
            Carried(lambda own=own: own, COEFFICIENTS, ranks, rank == 0)
            for rank, own in enumerate(self.held)
        ]

    def step(self, start: int, orders: list[list[int]]) -> None:
        for copy, own, order in zip(self.carried, self.held, orders, strict=True):
            copy.begin(start)
            for number in order:
                copy.before(number)
                forward(own, number)
                copy.after(number)

    def join(self, number: int) -> None:
        def one(carried: Carried, end: Transport) -> None:
            try:
                carried.join(number, end)
            except Exception as problem:
                end.abort(str(problem))
                raise

        with ThreadPoolExecutor(len(self.ends)) as pool:
            list(pool.map(one, self.carried, self.ends))


@examples(15)
@given(
    copies=st.integers(1, 4),
    steps=st.integers(1, 4),
    per_step=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_sum_of_parts_is_the_plain_recurrence(copies, steps, per_step, seed):
    chance, plain, many = random.Random(seed), first(), Copies(copies)
    for step in range(steps):
        numbers = list(range(step * per_step, (step + 1) * per_step))
        for number in numbers:
            forward(plain, number)
        chance.shuffle(numbers)
        orders: list[list[int]] = [[] for _ in range(copies)]
        for number in numbers:
            orders[chance.randrange(copies)].append(number)
        many.step(step * per_step, orders)
        if chance.random() < 0.5 or step == steps - 1:
            many.join((step + 1) * per_step)
            for own in many.held:
                pairs = list(zip(own, plain, strict=True))
                assert all(torch.equal(a, b) for a, b in [pairs[0], *pairs[4:]])
                assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in pairs)


def test_steps_that_are_left_out_between_two_sums_do_not_age_the_whole():
    many, plain = Copies(2), first()
    many.join(0)
    for number in (4, 40):
        many.step(number, [[number], [number + 1]])
        many.join(number + 2)
        forward(plain, number)
        forward(plain, number + 1)
    assert torch.allclose(many.held[1][1], plain[1], rtol=0, atol=1e-14)


def test_what_is_no_number_is_that_of_the_plain_loop():
    """An infinite old value is forgotten where c is 0, and not where it is not."""
    many = Copies(2)
    for own in many.held:
        own[0].fill_(math.inf)
        own[3].fill_(math.nan)
    many.step(0, [[1], [0]])
    many.join(2)
    assert torch.equal(many.held[0][0], news(1)[0])
    assert many.held[1][3].isnan().all()


def test_a_single_copy_in_order_multiplies_nothing(monkeypatch):
    one, plain = Copies(1), first()
    monkeypatch.setattr("penstock.state.carried_buffers._times", None)
    one.step(0, [[0, 1, 2]])
    one.join(3)
    for number in range(3):
        forward(plain, number)
    assert all(torch.equal(a, b) for a, b in zip(one.held[0], plain, strict=True))


# -- what has to be carried ----------------------------------------------------------------------


def carries(schedule: Schedule, laws: Laws | None, **options: object) -> dict[int, Carry]:
    made, replicas = captured("batch_norm", torch.float64), options.pop("replicas", 1)
    points = len(made.graph.cut_points)
    cuts = [points * at // schedule.num_stages for at in range(1, schedule.num_stages)]
    stages = cut(made.graph, cuts)
    job = job_of("batch_norm", torch.float64, **options)
    return carries_of([lower_schedule(schedule, replicas=replicas)], stages, made, job, laws)


def laws_of_norms() -> dict[str, BufferLaw]:
    model = captured("batch_norm", torch.float64).model
    return {name: BufferLaw(0.9) for name, _ in model.named_buffers()}


def test_groups_are_the_ranks_that_hold_a_stage():
    found = carries(chimera(2, 2), laws_of_norms(), replicas=2)
    assert {stage: carry.groups for stage, carry in found.items()} == {
        0: ((0, 1, 2, 3),),
        1: ((0, 1, 2, 3),),
    }
    found = carries(chimera(2, 2), laws_of_norms(), replicas=2, buffers="per replica")
    assert {carry.groups for carry in found.values()} == {((0, 1), (2, 3))}
    names = [name for carry in found.values() for name in carry.coefficients]
    assert sorted(names) == sorted(laws_of_norms())


def test_one_copy_in_order_carries_nothing_and_asks_for_no_law():
    nothing: Laws = {}
    assert carries(one_f_one_b(4, 3), nothing) == {}
    assert carries(one_f_one_b(2, 3), nothing, replicas=2, buffers="per replica") == {}


@pytest.mark.parametrize(
    ("law", "why"),
    [
        ({"norms.3.running_var": BufferLaw(None, "it squints")}, "it squints"),
        ({"norms.3.running_var": None}, "forward did not write it when it was tried"),
    ],
)
def test_a_buffer_without_a_law_is_refused_by_name(law, why):
    laws = {k: v for k, v in {**laws_of_norms(), **law}.items() if v is not None}
    with pytest.raises(PlanError) as caught:
        carries(one_f_one_b(1, 2), laws, replicas=2)
    assert caught.value.message == (
        f"buffer norms.3.running_var has to see every micro-batch in order ({why}), "
        "and stage 0 takes them on several ranks"
    )
    assert "one replica" in caught.value.hint


def test_ranks_that_sum_parts_are_known_beforehand_also_without_any_other_sum():
    made = captured("batch_norm", torch.float64)
    plan = plan_of(made.graph, "forward_only", 2, 2, replicas=2)
    job, stages = job_of("batch_norm", torch.float64), stages_of(plan, made.graph)
    windows = ((lower_plan(plan, made.graph), 0),)
    task = Task(made, stages, job, listed(windows), laws=laws_of_norms())
    assert task.groups == [(0, 1, 2, 3), (0, 2), (1, 3)]
    assert Task(made, stages, job, listed(windows), function_of=lambda *_: None).carries == {}
