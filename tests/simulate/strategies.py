"""Programs and clusters of all sorts."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import ProgramError
from penstock.program.edges import Edge, TiedGroup
from penstock.program.lower import chain
from penstock.program.passes.shard import shard
from penstock.program.program import Code, Compute, Instruction, Program, Reshard, Unshard
from penstock.schedule import SCHEDULES, Action
from tests.program.lowering import lower_schedule


def edges_of(draw: st.DrawFn, num_stages: int) -> list[Edge]:
    """Return a chain, perhaps with a skip connection, and with sizes."""
    edges = list(chain(num_stages))
    if num_stages > 2 and draw(st.booleans()):
        edges += [Edge("F", 0, num_stages - 1), Edge("B", num_stages - 1, 0)]
    sizes = st.integers(0, 9)
    return [edge._replace(size_bytes=draw(sizes)) for edge in edges]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    num_stages, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    schedule = draw(st.sampled_from(SCHEDULES))(num_stages, num_micro_batches)
    tied = num_stages > 1 and not schedule.has_updates and draw(st.booleans())
    program = lower_schedule(
        schedule,
        edges=edges_of(draw, num_stages),
        tied=[TiedGroup("w", (0, num_stages - 1), draw(st.integers(0, 9)))] if tied else (),
        replicas=draw(st.integers(1, 3)),
        clip=not schedule.has_updates and draw(st.booleans()),
    )
    if not schedule.has_updates and draw(st.booleans()):
        with suppress(ProgramError):  # a gather behind a sum that waits for what is behind it
            return program.map_ranks(sharded)
    words = st.sampled_from(("replicate", "shard", "shard_keep"))
    if draw(st.booleans()):
        what = draw(st.lists(words, min_size=num_stages, max_size=num_stages))
        with suppress(ProgramError):  # it cannot be divided
            each = st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages)
            return shard(program, what, prefetch=draw(st.one_of(st.integers(0, 3), each)))
    return program


def sharded(code: Code) -> Iterator[Instruction]:
    """Gather the weights before each compute, and drop them after it."""
    for instruction in code:
        if isinstance(instruction, Compute):
            stage = instruction.action.stage
            yield from (Unshard(stage), instruction, Reshard(stage))
        else:
            yield instruction


positive = st.floats(0.1, 9.0)
perhaps = st.just(0.0) | st.floats(0.01, 2.0)
rates = st.just(float("inf")) | positive
links = st.builds(
    Link, perhaps, positive, perhaps, rates, perhaps, core_s=perhaps, core_bytes_per_s=rates
)


@st.composite
def clusters(draw: st.DrawFn, num_ranks: int, devices: tuple[str, ...] = ("d",)) -> Cluster:
    hosts: list[Host] = []
    while sum(host.num_devices for host in hosts) < num_ranks:
        region = draw(st.sampled_from(["east", "west"]))
        device = draw(st.sampled_from(devices))
        hosts.append(Host(f"h{len(hosts)}", device, draw(st.integers(1, 3)), region))
    kinds = tuple(DeviceKind(name, 1, (), 1.0) for name in devices)
    return Cluster(kinds, tuple(hosts), draw(links), draw(links), draw(links))


def random_seconds(seed: int) -> Callable[[Action], float]:
    """Return seconds that no two actions share, so that no two events are at one time."""
    return lambda action: random.Random(f"{seed} {action}").random() + 0.01


def one_host(num_ranks: int, link: Link) -> Cluster:
    """Return a cluster in which every message has a lane of its own pair of ranks."""
    return Cluster((DeviceKind("d", 1, (), 1.0),), (Host("h", "d", num_ranks),), link)


def hosts_of(num_ranks: int, each: int, link: Link) -> Cluster:
    """Return a cluster of hosts with `each` ranks; `link` is inside them and between them."""
    hosts = (Host(f"h{at}", "d", each) for at in range(num_ranks // each))
    return Cluster((DeviceKind("d", 1, (), 1.0),), tuple(hosts), link, link)


capacities = st.sampled_from([None, 0, 1, 2])
