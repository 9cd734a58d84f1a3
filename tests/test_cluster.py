"""Cluster: ranks, links, seconds, file, and this machine."""

import doctest
import itertools
import math
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, HostPair, Link
from penstock.cluster.cluster import _here
from penstock.cluster.machine import Accelerator, Machine, detect, free_bytes
from penstock.errors import ClusterError
from penstock.units import GB, GiB

CPU = DeviceKind("cpu", 8 * GiB, (("float32", 1e11),), 2e10)
GPU = DeviceKind("gpu", 40 * GiB, (("float32", 2e13), ("bfloat16", 3e14)), 1.5e12, 3.5, True, 30.0)
NEAR, FAR, WIDE = Link(1e-6, 1e11), Link(1e-5, 1e10, 2e-6, 5e9, 0.1), Link(1e-2, 1e8)
HOSTS = (Host("a", "gpu", 2, "east"), Host("b", "cpu", 1, "east"), Host("c", "gpu", 2, "west"))
MIXED = Cluster((CPU, GPU), HOSTS, NEAR, FAR, WIDE)

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5).filter(str.isprintable)
amounts = st.floats(0, 1e15, allow_nan=False)
rates = st.floats(1e-3, 1e18)
links = st.builds(
    Link, amounts, rates | st.just(math.inf), amounts, rates | st.just(math.inf), amounts
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    kinds = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    pairs = st.lists(st.tuples(names, rates), max_size=3, unique_by=lambda pair: pair[0]).map(tuple)
    sizes = st.integers(1, 2**60)
    devices = [
        draw(
            st.builds(DeviceKind, st.just(k), sizes, pairs, rates, amounts, st.booleans(), amounts)
        )
        for k in kinds
    ]
    host_names = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    hosts = [
        draw(st.builds(Host, st.just(name), st.sampled_from(kinds), st.integers(1, 5), names))
        for name in host_names
    ]
    both = list(itertools.permutations(host_names, 2))
    chosen = draw(st.lists(st.sampled_from(both), unique=True)) if both else []
    pairs = tuple(HostPair(a, b, *astuple(draw(links))[:5]) for a, b in chosen)
    levels = (draw(st.none() | links) for _ in range(3))
    return Cluster(tuple(devices), tuple(hosts), *levels, pairs=pairs)


def test_pair_of_hosts_has_a_link_of_its_own_each_way_or_both():
    slow, fast = HostPair("a", "c", 0.5, 10.0), HostPair("b", "c", 0.0, 1e9)
    cluster = replace(MIXED, pairs=(slow, fast, HostPair("c", "a", 0.25, 20.0)))
    assert cluster.message_s(0, 3, 100) == 10.5
    assert cluster.message_s(3, 0, 100) == 5.25
    assert cluster.message_s(2, 3, 10**9) == cluster.message_s(3, 2, 10**9) == 1.0
    assert [cluster.link(0, b) for b in (1, 2)] == [NEAR, FAR]
    assert "  pair     a to c: 500 ms + 1e-08 GB/s" in str(cluster).splitlines()


def test_collective_is_over_the_worst_link_of_its_level():
    hosts = tuple(Host(name, "cpu", 1, "x") for name in "abc")
    speeds = {"ab": 9.0, "bc": 9.0, "ca": 9.0, "ba": 9.0, "cb": 3.0, "ac": 9.0}
    pairs = tuple(HostPair(*ends, 0.1, speed) for ends, speed in speeds.items())
    cluster = Cluster((CPU,), hosts, pairs=pairs)
    ring = cluster.all_reduce_s(90, (0, 1, 2), "ring")
    assert ring == pytest.approx(4 * (0.1 + 30 / 3.0))
    assert cluster.all_reduce_s(90, (0, 1)) == pytest.approx(2 * (0.1 + 45 / 9.0))


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ((HostPair("a", "z", 0, 1),), 'pair "a" to "z"'),
        ((HostPair("a", "a", 0, 1),), 'pair "a" to "a"'),
        ((HostPair("a", "b", 0, 1), HostPair("a", "b", 0, 2)), 'pair "a" to "b" is there twice'),
    ],
)
def test_pair_that_cannot_be_is_refused(pairs: tuple[HostPair, ...], says: str):
    with pytest.raises(ClusterError, match=says):
        replace(MIXED, pairs=pairs)


def test_ranks_may_each_have_memory_of_their_own(tmp_path):
    own = (DeviceKind("gpu", 90, (), 1.0), DeviceKind("cpu", 50, (), 1.0))
    each = replace(MIXED, devices=own).within((80, 99, 30, 60, 70))
    assert [each.memory_of(rank) for rank in range(5)] == [80, 90, 30, 60, 70]
    assert [each.within(65).memory_of(rank) for rank in range(5)] == [65, 65, 30, 60, 65]
    each.save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml") == each
    with pytest.raises(ClusterError, match="memory of 2 ranks, of 5"):
        MIXED.within((1, 2))
    with pytest.raises(ClusterError, match=r'host "a" has memory_bytes \[1\] of 2 devices'):
        Host("a", "gpu", 2, memory_bytes=(1,))


def test_ranks_are_numbered_host_by_host():
    assert MIXED.num_ranks == 5
    assert [MIXED.host_of(rank).name for rank in range(5)] == ["a", "a", "b", "c", "c"]
    assert [MIXED.device_of(rank).name for rank in range(5)] == ["gpu", "gpu", "cpu", "gpu", "gpu"]


@pytest.mark.parametrize("rank", [-1, 5])
def test_rank_that_is_not_there_is_refused(rank: int):
    with pytest.raises(ClusterError, match=f"rank {rank} is not in a cluster of 5 ranks"):
        MIXED.device_of(rank)


def test_link_goes_by_host_and_region():
    assert [MIXED.link(0, b) for b in (1, 2, 3)] == [NEAR, FAR, WIDE]
    assert MIXED.link(3, 4) == NEAR


def test_level_without_a_link_and_a_rank_with_itself_are_refused():
    with pytest.raises(
        ClusterError,
        match='ranks 1 and 2 on hosts "a" and "b" have no link: the cluster has none between',
    ):
        replace(MIXED, between=None).link(1, 2)
    with pytest.raises(ClusterError, match="rank 1 has no link to itself"):
        MIXED.link(1, 1)


def test_message_takes_latency_and_bytes_over_bandwidth():
    assert MIXED.message_s(0, 2, 10**6) == 1e-5 + 10**6 / 1e10
    assert MIXED.message_s(0, 0, 10**6) == 0.0
    assert FAR.end_s(10**6) == 2e-6 + 10**6 / 5e9
    assert NEAR.end_s(10**6) == 0.0


@given(st.integers(1, 5), st.integers(0, 10**12))
def test_all_reduce_is_the_ring_formula_over_its_slowest_link(n: int, size_bytes: int):
    slowest = [NEAR, FAR, WIDE, WIDE][n - 2]
    expected = (
        2 * (n - 1) * (slowest.latency_s + size_bytes / n / slowest.bytes_per_s) if n > 1 else 0.0
    )
    assert MIXED.all_reduce_s(size_bytes, range(n), "ring") == pytest.approx(expected, rel=1e-14)


def test_a_sum_costs_each_end_two_messages_for_each_other_rank():
    cluster = replace(MIXED, across=replace(WIDE, overhead_s=0.25))
    assert cluster.ends_s([0]) == cluster.ends_s([0, 1]) == 0.0  # no link, one that costs nothing
    assert cluster.ends_s([0, 2, 3]) == pytest.approx(2 * 2 * 0.25)
    more = cluster.sum_s(8, [0, 2, 3]) - cluster.all_reduce_s(8, [0, 2, 3], "ring")
    assert more == pytest.approx(2 * cluster.ends_s([0, 2, 3]))


def test_all_reduce_needs_a_link_between_ring_neighbours_only():
    with pytest.raises(ClusterError, match="none across"):
        replace(MIXED, across=None).all_reduce_s(8, [0, 3])
    with pytest.raises(ClusterError, match="none between"):
        replace(MIXED, between=None).all_reduce_s(8, [0, 1, 2])
    assert replace(MIXED, across=None).all_reduce_s(8, [0, 1, 2]) > 0


def test_messages_that_leave_or_reach_a_host_share_its_card_and_those_inside_share_nothing():
    assert MIXED.lanes(0, 1) == ()
    assert MIXED.lanes(0, 2) == (0, 3)
    assert MIXED.lanes(1, 4) == (0, 5)
    assert MIXED.lanes(4, 1) == (4, 1)


def test_rates_are_known_by_dtype():
    assert GPU.peak_flop_per_s("bfloat16") == 3e14
    with pytest.raises(
        ClusterError, match='device "cpu" has no FLOP/s for float16; known: float32'
    ):
        CPU.peak_flop_per_s("float16")


def test_cluster_prints_itself():
    assert str(MIXED) == "\n".join(
        (
            "5 ranks on 3 hosts, 14.00 usd/hour",
            "  device   cpu: 8.00 GiB at 20 GB/s, float32 0.1 TFLOP/s",
            "  device   gpu: 40.0 GiB at 1500 GB/s, float32 20 TFLOP/s, bfloat16 300 TFLOP/s,"
            " 3.5 usd/hour, preemptible with 30 s notice",
            "  host     a: ranks 0-1 on gpu, east",
            "  host     b: ranks 2-2 on cpu, east",
            "  host     c: ranks 3-4 on gpu, west",
            "  inside   1.00 us + 100 GB/s",
            "  between  10.0 us + 10 GB/s, each end 2.00 us + 5 GB/s, slows computes by 10 %",
            "  across   10.0 ms + 0.1 GB/s",
        )
    )


@given(clusters())
def test_ranks_of_all_hosts_are_all_ranks_in_order(cluster: Cluster):
    assert [r for host in cluster.hosts for r in cluster.ranks_on(host)] == [
        *range(cluster.num_ranks)
    ]
    for host in cluster.hosts:
        assert all(cluster.host_of(rank) == host for rank in cluster.ranks_on(host))


@given(clusters())
def test_file_gives_back_the_same_cluster(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster
):
    path = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    cluster.save(path)
    assert Cluster.load(path) == cluster
    assert str(Cluster.load(path)) == str(cluster)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cluster((), ()), "a cluster without hosts"),
        (lambda: Cluster((CPU, CPU), HOSTS), '2 devices are named "cpu"'),
        (lambda: Cluster((CPU, GPU), (HOSTS[0], HOSTS[0])), '2 hosts are named "a"'),
        (lambda: Cluster((CPU,), HOSTS), 'host "a" has devices "gpu", which are not described'),
        (lambda: Host("a", "gpu", 0), 'host "a" has 0 devices'),
        (lambda: Host("", "gpu", 1), "has the name ''"),
        (lambda: Host("a", "g\npu", 1), r"has the name 'g\\npu'"),
        (lambda: replace(CPU, memory_bytes=0), 'device "cpu" has memory_bytes = 0'),
        (lambda: replace(CPU, memory_bytes_per_s=-1.0), "memory_bytes_per_s = -1.0"),
        (lambda: replace(CPU, flop_per_s=(("float32", math.nan),)), "flop_per_s of float32 = nan"),
        (lambda: replace(CPU, usd_per_hour=-0.5), "usd_per_hour = -0.5"),
        (lambda: replace(CPU, notice_s=math.inf), "notice_s = inf"),
        (lambda: Link(-1e-6, 1e9), "link has latency_s = -1e-06"),
        (lambda: Link(math.inf, 1e9), "latency_s = inf"),
        (lambda: Link(0, 0), "bytes_per_s = 0"),
        (lambda: Link(0, 1, overhead_s=-1), "overhead_s = -1"),
        (lambda: Link(0, 1, copy_bytes_per_s=0), "copy_bytes_per_s = 0"),
        (lambda: Link(0, 1, slowdown=-0.1), "slowdown = -0.1"),
    ],
)
def test_impossible_cluster_is_refused_with_the_value(make: "type[Cluster]", says: str):
    with pytest.raises(ClusterError, match=says):
        make()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("latency_s", "latency"), "[inside]: latency is 1e-06, not a field that is known"),
        (("[inside]", "[near]"), 'the file has an unknown key "near"'),
        (("latency_s = 1e-06\n", ""), "[inside]: latency_s is missing"),
        (('device = "cpu"\n', ""), "[[host]] number 2: device is missing"),
        (("latency_s = 1e-06", "latency_s = -1e-06"), "[inside]: link has latency_s = -1e-06"),
        (
            ("latency_s = 1e-06", "latency_s = true"),
            "[inside]: latency_s is True, not a number",
        ),
        (
            ("num_devices = 1", "num_devices = 1.5"),
            "[[host]] number 2: num_devices is 1.5, not a whole number",
        ),
        (("num_devices = 1", "num_devices = 0"), '[[host]] number 2: host "b" has 0 devices'),
        (('name = "b"', "name = 7"), "[[host]] number 2: name is 7, not a text"),
        (('name = "b"', 'name = "a"'), '2 hosts are named "a"'),
        (("preemptible = true", 'preemptible = "yes"'), "is 'yes', not true or false"),
        (
            ('"float32" = 100000000000.0', '"float32" = "fast"'),
            "number 1: flop_per_s.float32 is 'fast', not a number",
        ),
        (
            ('flop_per_s = { "float32" = 100000000000.0 }', "flop_per_s = 1e11"),
            "flop_per_s is 100000000000.0, not a table",
        ),
        (("[inside]", "[[inside]]"), "not a table"),
        (("[inside]", "[inside"), "not readable TOML"),
    ],
)
def test_faulty_file_is_refused_with_its_place(tmp_path: Path, change: tuple[str, str], says: str):
    path = tmp_path / "c.toml"
    MIXED.save(path)
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_one_table_where_a_list_belongs_is_refused_with_a_hint(tmp_path: Path):
    (tmp_path / "c.toml").write_text("[host]\n")
    with pytest.raises(ClusterError, match="not a list of tables") as caught:
        Cluster.load(tmp_path / "c.toml")
    assert caught.value.hint == "write [[host]], not [host]"


def test_missing_file_and_file_that_is_no_text_are_refused(tmp_path: Path):
    with pytest.raises(ClusterError, match=r"cannot read cluster .*none\.toml: No such file"):
        Cluster.load(tmp_path / "none.toml")
    (tmp_path / "c.toml").write_bytes(b"\xff")
    with pytest.raises(ClusterError, match="not readable TOML"):
        Cluster.load(tmp_path / "c.toml")


def test_whole_numbers_stand_for_floats_in_a_file(tmp_path: Path):
    MIXED.save(tmp_path / "c.toml")
    text = (tmp_path / "c.toml").read_text()
    (tmp_path / "c.toml").write_text(text.replace("100000000000.0", "100000000000"))
    assert Cluster.load(tmp_path / "c.toml") == MIXED


def test_this_machine_is_a_cluster_whose_ranks_share_its_memory():
    machine = detect()
    cluster = Cluster.here(ranks=3)
    assert cluster.num_ranks == 3
    assert cluster.device_of(0).memory_bytes == machine.memory_bytes // 3
    assert cluster.message_s(0, 2, 0) > 0
    assert _here(Machine("m", 6, 2**30, ()), None).num_ranks == 6


def test_accelerators_give_one_rank_each_and_no_more():
    found = Accelerator("X", 80 * GB), Accelerator("X", 40 * GB)
    machine = Machine("m", 6, 2**30, found)
    cluster = _here(machine, None)
    assert cluster.device_of(0).copy_engine
    assert cluster.inside is not None
    assert str(cluster.inside) == "10.0 us + 20 GB/s, assumed"
    assert (cluster.num_ranks, cluster.device_of(1).name, cluster.device_of(1).memory_bytes) == (
        2,
        "X",
        40 * GB,
    )
    with pytest.raises(ClusterError, match="3 ranks on this machine; it has 2 accelerators"):
        _here(machine, 3)


def test_no_rank_on_this_machine_is_refused():
    with pytest.raises(ClusterError, match="0 ranks on this machine; there must be at least one"):
        Cluster.here(0)


def test_limits_of_a_container_are_found(tmp_path: Path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert detect(tmp_path)[1:3] == (1, 1048576)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert detect(tmp_path) == detect(tmp_path / "none")


def test_room_in_a_container_is_its_limit_less_what_it_uses_but_for_files_not_looked_at(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4000 kB\nMemAvailable:   3000 kB\n")
    assert free_bytes(meminfo, tmp_path / "none") == 3000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert free_bytes(meminfo, tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\nactive_file 7\n")
    assert free_bytes(meminfo, tmp_path) == 400_000


def test_detection_imports_no_torch():
    code = "from penstock.cluster import Cluster; Cluster.here(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"import sys; {code}"], check=True)


def test_examples_of_the_page_are_what_runs():
    page = Path(__file__).parents[1] / "docs" / "cluster.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0
