"""Replan over links: messages that take longer, or less, change the plan, not what it trains."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import penstock as ps
from penstock.checkpoints import checkpoint, control
from penstock.cluster import Cluster, DeviceKind, Host, Link, machine
from penstock.gauge import hosts
from penstock.gauge.hosts import Compared, Seat
from penstock.gauge.links import PAYLOADS
from penstock.pilot.moved_links import relinked
from penstock.pilot.replan_log import replans_in
from penstock.plan import Plan
from penstock.runtime import sampler
from penstock.runtime.rank import Rank
from penstock.training import torchrun
from tests.runtime.as_torchrun import as_torchrun
from tests.search.chains import with_costs

LAYERS, MICRO_BATCHES = 6, 8
PRODUCT_S, DELAY_S = 0.5, 20.0  # on the clock that is said


def batches(start: int) -> Iterator[Tensor]:
    number = start
    while True:
        made = torch.Generator().manual_seed(number)
        yield torch.randn(2, 8, generator=made, dtype=torch.float64)
        number += 1


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS))).double()


JOB = ps.Job(
    model=model,
    loss=lambda model, batch: model(batch).square().mean(),
    data=batches,
    optimizer=lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    micro_batches=MICRO_BATCHES,
)


def plain(num_steps: int) -> dict[str, Tensor]:
    """Return the weights of the loop that a script would have."""
    own, data = model(), batches(0)
    optimizer = torch.optim.SGD(own.parameters(), 0.1, momentum=0.9)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            (own(next(data)).square().mean() / MICRO_BATCHES).backward()
        optimizer.step()
    return {f"weights/{name}": value.detach() for name, value in own.named_parameters()}


class FarHosts:
    """Two hosts of this one, with a clock of their own: what is sampled and measured is said here.

    Up to a step messages between them take a moment, from then on they are late, or the other way.
    """

    def __init__(self, since: int, *, is_slower: bool) -> None:
        self.since, self.is_slower, self.step, self.is_again = since, is_slower, 0, False

    @property
    def late_s(self) -> float:
        """Return the seconds that a message takes now."""
        return DELAY_S if (self.step >= self.since) is self.is_slower else 1e-6

    def install(self, patched: pytest.MonkeyPatch) -> None:
        run, measured = Rank.run, torchrun.measured_as

        def noting(rank: Rank, calls, first_step: int):
            self.step, self.is_again = first_step, rank.first_edge > 0
            return run(rank, calls, first_step)

        def known(kind, captured, job, cluster, listener):
            found = measured(kind, captured, job, cluster, listener)
            nodes, joined = captured.graph.nodes, MICRO_BATCHES // job.micro_batches
            op_s = (joined * PRODUCT_S if "mm" in node.target else 0.0 for node in nodes)
            nothing = dict.fromkeys(("call_s", "accumulate_s_per_byte", "update_s"), 0.0)
            return with_costs(found, op_s=tuple(op_s), **nothing)

        def told(own: sampler.Sampler, *, is_last: bool = False) -> sampler.Samples:
            is_moved = self.step >= self.since and not self.is_again
            pace = 1.0 if not is_moved else 3.0 if self.is_slower else 1 / 3
            return sampler.Samples((), 32, 64, 64, 0.0, 1.0, 0, pace, pace, int(is_moved))

        def compared(transport, pair, first_edge=0):
            transport.barrier()
            return [self.late_s] * 2

        def probed(transport, pair):
            transport.barrier()
            rows = [[size, *[self.late_s] * 3, 0.0] for size in PAYLOADS]
            return [rows, [1.0, 1.0, 1.0, 1.0, 1.0, 0.0], True]

        def seat(name: str, region: str) -> Seat:
            node = os.environ["GROUP_RANK"]
            return Seat(f"key {node}", f"node{node}", region)

        alone = machine.detect()._replace(cores=1)  # a search is made between two steps
        patched.setattr("penstock.cluster.cluster.detect", lambda: alone)
        patched.setattr(hosts, "probe", probed)
        patched.setattr(hosts, "compare", compared)
        patched.setattr(hosts, "seat_here", seat)
        patched.setattr(hosts, "benchmark", partial(hosts.Benchmark, 1e-11, 1e-10, 1e-6))
        patched.setattr(torchrun, "measured_as", known)
        patched.setattr(sampler, "_SHARE", 0)  # every step
        patched.setattr(sampler.Sampler, "told", told)
        patched.setattr(sampler.Sampler, "step_s", property(lambda own: told(own).step_s))
        patched.setattr(Rank, "run", noting)
        patched.setattr(control, "_LOOK_S", 0.001)


@pytest.fixture(autouse=True)
def _profiles_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train(folder: Path, num_steps: int) -> int:
    about = {"ranks": 2, "stages": 2, "schedule": "one_f_one_b", "check": False, "out": folder}
    ps.train(JOB, num_steps=num_steps, **about)
    return 0


def trained(folder: Path, tmp_path: Path, num_steps: int) -> None:
    """Train in two ranks, each a host; the weights are those of the plain loop."""
    done = as_torchrun(partial(train, folder, num_steps), tmp_path, nodes=2)
    assert [code for code, _, _ in done] == [0, 0], done
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    state = checkpoint.load(newest)
    assert state.step == num_steps
    for key, value in plain(num_steps).items():
        torch.testing.assert_close(state.tensors[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_slower", [True, False])
@pytest.mark.sampled(2)
def test_links_that_move_change_how_many_messages_there_are_and_not_the_batch(
    tmp_path, monkeypatch, is_slower
):
    """Noticed by the pace of steps, measured by all ranks, planned for; to the same weights."""
    since, folder = 6, tmp_path / "run"
    FarHosts(since, is_slower=is_slower).install(monkeypatch)
    trained(folder, tmp_path, 40)
    (made,) = replans_in(folder)
    assert since <= made.step < 40
    ((a, b, times),) = made.links
    assert (a, b, times > 1) == ("node0", "node1", is_slower)
    assert made.after_s < 0.9 * made.before_s
    plan = Plan.load(folder / "plan.json")
    assert plan.terms.joined * plan.step_micro_batches == MICRO_BATCHES
    assert (plan.terms.joined > 1) is is_slower
    words = f"messages from node0 to node1 {times:.3g} times what they took"
    assert words in made.why
    assert words in next(d.why for d in plan.decisions if d.what == "replanned")
    (pair,) = Cluster.load(folder / "cluster.toml").pairs
    assert pair.latency_s == pytest.approx(DELAY_S if is_slower else 1e-6)


@st.composite
def moves(draw):
    amounts, rates = st.floats(1e-5, 1e-2), st.floats(1e6, 1e10)
    old = Link(draw(amounts), draw(rates), draw(st.floats(0, 1e-4)), draw(st.floats(1e9, 1e11)))
    return old, Link(draw(amounts), draw(rates), old.overhead_s, old.copy_bytes_per_s)


@given(moves())
def test_link_is_as_payloads_say_once_they_are_half_as_long_again(case):
    old, now = case
    kind = DeviceKind("d", 1, (), 1.0)
    cluster = Cluster((kind,), (Host("a", "d", 1), Host("b", "d", 2)), inside=old, between=old)

    def takes(link: Link, size: int) -> float:
        return link.latency_s + size / link.bytes_per_s + 2 * link.end_s(size)

    small, large = (takes(now, size) for size in PAYLOADS)
    found = relinked(cluster, [Compared((0, 1), small, large)])
    times = [takes(now, size) / takes(old, size) for size in PAYLOADS]
    if max(times) < 1.499 and min(times) > 1 / 1.499:
        assert found.moved == ()
        assert found.cluster == cluster
    elif max(times) > 1.501 or min(times) < 1 / 1.501:
        ((_, _, told),) = found.moved
        assert told == pytest.approx(times[-1])
        link = found.cluster.link(0, 1)
        for size in PAYLOADS:
            assert takes(link, size) == pytest.approx(takes(now, size), rel=1e-6)
        assert found.cluster.link(1, 2) == old
        again = relinked(found.cluster, [Compared((0, 1), small, large)])
        assert again.moved == ()
