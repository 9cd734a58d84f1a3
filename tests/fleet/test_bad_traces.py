"""Damaged traces: each is read, replayed and resampled, or refused by an error with a hint."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.fleet import policies, read_market
from penstock.fleet.futures import resampled
from penstock.fleet.job_work import FleetJob, Speed
from penstock.fleet.look_ahead import look_ahead
from penstock.fleet.market import noticed, priced
from penstock.fleet.outcome import judged
from penstock.fleet.replay import Ruler
from penstock.fleet.spells import told

JOB = FleetJob(7200.0, (Speed(2, 1.0),), start_s=300.0, checkpoint_s=60.0)
DEADLINE_S = 4 * 3600.0
GREEDY = Ruler("greedy", policies.greedy)

COLUMNS = (
    "time_s", "time_ms", "time_h", "time", "date", "pool", "zone", "machines", "count", "usd_h",
    "on_demand_usd_h", "event", "machine", "lifetime_s", "ended_by", "colour", "",
)  # fmt: skip
CELLS = (
    "0", "1", "7", "60", "3600", "-1", "-0.5", "nan", "inf", "1e308", "1e18", "1e-300", "5e-324",
    "2021-01-01", "2021-01-01T12:00:00Z", "9999-12-31", "-", "", " ", "a", "zone", "add", "remove",
    "preempted", '"', "\x00", "1,2", "\u00e9", "0x10", "1_000",
)  # fmt: skip
numbers = st.one_of(
    st.integers(-2, 100),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(10**15, 10**400),
)


@st.composite
def tables(draw) -> bytes:
    """Draw CSV: known columns or others, cells that fit or do not, rows of other lengths."""
    header = draw(st.lists(st.sampled_from(COLUMNS), max_size=5))
    width = len(header) or draw(st.integers(1, 4))
    plain = st.sampled_from(CELLS[:5])
    cell = st.one_of(plain, plain, plain, st.sampled_from(CELLS))
    rows = draw(st.lists(st.lists(cell, min_size=width, max_size=width), max_size=8))
    if draw(st.integers(0, 9)) == 0:
        rows.append(draw(st.lists(cell, max_size=6)))
    lines = [",".join(row) for row in ([header] if header else []) + rows]
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    return end.join(lines).encode()


@st.composite
def lists(draw) -> bytes:
    """Draw JSON lines: events whose times and machines are what they should not be."""
    node = st.one_of(
        st.sampled_from("abc"), st.none(), numbers, st.lists(st.integers(), max_size=1)
    )
    event = st.tuples(
        numbers,
        st.one_of(st.sampled_from(["add", "remove", "no-op"]), st.none(), st.integers()),
        st.one_of(st.fixed_dictionaries({"nodes": st.lists(node, max_size=3)}), st.none(), node),
    )
    made = [json.dumps(one) for one in draw(st.lists(event, min_size=1, max_size=6))]
    return "\n".join(made).encode()


@st.composite
def markets(draw) -> bytes:
    """Draw CSV that is nearly always a market, of numbers as small and large as there are."""
    name = draw(st.sampled_from(["time_s", "time_ms", "time_d", "time"]))
    size = st.floats(0, 1e15, allow_subnormal=True)
    some = st.one_of(st.integers(0, 9).map(float), size, st.sampled_from([0.0, 2.0, 1e15]))
    times = st.one_of(
        st.integers(0, 10**6).map(float),
        st.floats(-1e15, 1e15),
        st.sampled_from([0.0, 1e-9, 0.1, 1e308]),
    )
    rows = draw(
        st.lists(st.tuples(times, st.sampled_from("ab"), some, some), min_size=1, max_size=6)
    )
    lines = [f"{name},pool,machines,usd_h", *(",".join(map(str, row)) for row in rows)]
    return "\n".join(lines).encode()


def used(path) -> None:
    """Do with a trace what the commands do."""
    market = noticed(priced(read_market(path), 3.0, 1.0), 30.0)
    told(market, 0, 2)
    futures = [*resampled(market, 2, seed=0, lasts_s=DEADLINE_S)]
    ahead = look_ahead(futures, JOB, deadline_s=DEADLINE_S)
    those = futures if market.laws else [market, *futures]
    for row in judged(those, JOB, [GREEDY, ahead], deadline_s=DEADLINE_S).rows:
        assert row.usd.middle >= 0


def refusal(path) -> PenstockError | None:
    try:
        used(path)
    except PenstockError as problem:
        return problem
    return None


@settings(max_examples=40)
@given(st.one_of(tables(), lists(), markets(), markets(), st.binary(max_size=60)))
@example(b"time_s,machines\n0,3\n")  # one row: it holds
@example(b"time_d,machines\n0,3\n470000,4\n")  # longer than anyone's patience
@example(b"time_s,machines\n0,3\n1,4\n")  # much shorter than a future
@example(b"time_s,machines,usd_h\n0,9,0\n60,9,0\n")  # for nothing
@example(b"time_s,machines\n0,1000000000000000\n3228,6\n")  # a checkpoint due in 1e-13 s
def test_damaged_trace_is_used_or_refused_with_a_hint(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "damaged.csv"
    path.write_bytes(content)
    problem = refusal(path)
    assert problem is None or (problem.hint and len(str(problem)) < 600)
