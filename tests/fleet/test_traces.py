"""Traces: every form of one market reads alike; what is wrong is told with its row."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FleetError
from penstock.fleet import read_market
from penstock.fleet.market import only, priced, together

DATA = Path(__file__).parents[2].parent / "shared" / "data"


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


EVENTS = "0,add,a\n0,add,b\n60000,remove,a\n60000,add,c\n120000,remove,b\n"
FORMS = {
    "events": EVENTS,
    "named": "time_s,event,machine\n0,add,a\n0,add,b\n60,remove,a\n60,add,c\n120,remove,b\n",
    "counts": "0,2\n60000,2\n120000,1\n",
    "dated": "2021-12-10, 13:00:00, 2\n2021-12-10, 13:01:00, 2\n2021-12-10, 13:02:00, 1\n",
    "format": "time_min,pool,machines\n0,trace,2\n1,trace,2\n2,trace,1\n",
    "lines": '[0, "add", {"nodes": ["a", "b"]}]\n[60000, "no-op", {"nodes": []}]\n'
    '[60000, "remove", {"nodes": ["a"]}]\n[60000, "add", {"nodes": ["c"]}]\n'
    '[120000, "remove", {"nodes": ["b"]}]\n',
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_tells_the_same_market(tmp_path, form):
    market = read_market(written(tmp_path, FORMS[form]))
    assert market.names == ("trace",)
    assert market.times_s.tolist() == [0, 60, 120]
    assert market.machines[:, 0].tolist() == [2, 2, 1]
    lost = [0, 1, 1] if form in ("events", "named", "lines") else [0, 0, 1]
    assert market.gone[:, 0].tolist() == lost  # one came as another went
    assert market.until_s == 180
    assert np.isnan(market.usd_h).all()


def test_day_of_a_dated_trace_begins_at_midnight(tmp_path):
    assert read_market(written(tmp_path, FORMS["dated"])).starts_s == 13 * 3600
    assert read_market(written(tmp_path, FORMS["counts"])).starts_s == 0


def test_prices_hold_until_they_change_and_pools_are_machines_in_places(tmp_path):
    log = (
        "date,instance,region,ondemand_usd_h,spot_usd_h\n"
        "2023-05-08,a,east,4,1\n2023-05-10,a,west,5,2\n2023-05-11,a,east,4.5,1.5\n"
    )
    market = read_market(written(tmp_path, log))
    assert market.names == ("a/east", "a/west")
    assert [pool.usd_h for pool in market.pools] == [4.5, 5]
    assert market.usd_h.tolist() == [[1, 2], [1, 2], [1.5, 2]]
    assert market.machines.tolist() == [[np.inf, 0], [np.inf, np.inf], [np.inf, np.inf]]
    assert read_market(written(tmp_path, log), pools=("a/west",)).names == ("a/west",)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=30))
def test_rows_out_of_order_are_sorted_and_the_last_of_a_time_holds(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("trace")
    text = "time_s,machines\n" + "".join(f"{time},{count}\n" for time, count in rows)
    market = read_market(written(folder, text))
    held = dict(sorted(rows, key=lambda row: row[0]))  # the last of equal ones stays
    begin = min(held)
    assert dict(zip(market.times_s + begin, market.machines[:, 0], strict=True)) == held
    times = [time for time, _ in rows]
    assert bool(market.notes) == (times != sorted(times))


BAD = {
    "": "empty",
    "\n\n": "empty",
    "time_s,machines\n": "no rows",
    "time_s,machines\n0,1\n60,-1\n": "row 3: machines is '-1', below 0",
    "time_s,machines\n0,1\n60,\n": "row 3: machines is '', not a number",
    "time_s,machines\n0,1\n60,2,3\n": "row 3: 3 cells, not 2",
    "time_s,machines\n0,1\n\nx,2\n": "row 4: time_s is 'x', not a number",
    "time_s,machines\n0,1\nnan,2\n": "row 3: time_s is 'nan', not a number",
    "time_s,machines\n0,1\n60,2e15\n": "row 3: machines is '2e15', beyond 1e+15",
    "time_s,machines\n0,1\n60,inf\n": "row 3: machines is 'inf', not a number",
    "time_s,pool,usd_h\n0,a,1\n9,a,-0.5\n": "row 3: usd_h is '-0.5', below 0",
    "date,machines\n2021-13-01,4\n": "row 2: '2021-13-01' is no date",
    "machines,pool\n1,a\n": "row 1: no column of times among machines, pool",
    "time_s,colour\n1,red\n": "row 1: neither machines nor usd_h",
    "1,2,3,4\n": "row 1: 4 columns without a header",
    "0,add,a\n5,add,a\n": "row 2: add of 'a', which is there already",
    "0,add,a\n5,remove,b\n": "row 2: remove of 'b', which is not there",
    "0,add,a\n5,went,a\n": "row 2: event is 'went'",
    "[0, 1]\n": "row 1: not [time, event",
    "[0,\n": "row 1: no JSON",
    '[0, "no-op", {"nodes": []}]\n': "adds no machine",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_trace_is_refused_with_its_row(tmp_path, text):
    with pytest.raises(FleetError) as caught:
        read_market(written(tmp_path, text))
    assert BAD[text] in str(caught.value)
    assert "trace.csv" in str(caught.value)
    assert caught.value.hint


def test_binary_is_no_trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FleetError, match="no text"):
        read_market(path)


@pytest.mark.parametrize(
    ("text", "unit", "until_s"),
    [("0,1\n7000,2\n", "ms", 14), ("0,1\n7001,2\n", "s", 14002), ("0,1\n0.5,2\n", "h", 3600)],
)
def test_unit_that_is_not_said_is_taken_as_the_likeliest_and_noted(tmp_path, text, unit, until_s):
    path = written(tmp_path, text)
    market = read_market(path)
    assert market.until_s == until_s
    assert market.notes[0].endswith(f"taken as {unit}")
    assert read_market(path, unit="min").notes == ()
    with pytest.raises(FleetError, match="no unit of time"):
        read_market(path, unit="weeks")


LOGS = {
    "a log whose last row tells its end": ("0,1\n518400,0\n604800,0\n", 604800, 518400),
    "a log of two rows, of which the last tells the end": ("0,1\n604800,1\n", 604800, 604800),
    "a log of changes": ("0,0\n100,1\n700,0\n1000,1\n5000,0\n", 5000, 4600),
    "samples": ("0,1\n60,1\n120,0\n180,0\n240,1\n", 300, 180),
    "samples of which one is missing": ("0,1\n60,1\n120,0\n240,0\n300,1\n360,1\n", 420, 240),
}


@pytest.mark.parametrize("kind", LOGS)
def test_last_row_of_a_log_of_changes_counts_for_no_time(tmp_path, kind):
    rows, lasts_s, up_s = LOGS[kind]
    market = read_market(written(tmp_path, "time_s,machines\n" + rows))
    assert market.until_s == pytest.approx(lasts_s, abs=1)
    assert float(market.share_up(1)[0]) * market.until_s == pytest.approx(up_s, abs=1)


def test_samples_of_skypilot_are_read_as_they_are(tmp_path):
    text = '{"metadata": {"gap_seconds": 300, "zone": "x"}, "data": [0, 4, 4, 1, 1]}'
    market = read_market(written(tmp_path, text, "us-east-1f_v100_4.json"))
    assert market.names == ("us-east-1f_v100_4",)
    assert market.times_s.tolist() == [0, 300, 900]
    assert market.machines[:, 0].tolist() == [0, 4, 1]
    assert market.gone[:, 0].tolist() == [0, 0, 3]
    assert market.until_s == 1500


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"metadata": {"gap_seconds": 300}, "data": []}', "0 samples"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "0 s apart"),
        ('{"metadata": {"gap_seconds": 9}, "data": [1, -1]}', r"data\[1\] is -1"),
        ('{"metadata": {"gap_seconds": 9}, "data": [1, "a"]}', "damaged"),
        ('{"data": [1]}', "is not"),
        ('{"data": ', "no JSON"),
    ],
)
def test_samples_that_are_damaged_are_refused(tmp_path, text, why):
    with pytest.raises(FleetError, match=why):
        read_market(written(tmp_path, text, "trace.json"))


@pytest.mark.long
def test_a_million_rows_are_read(tmp_path):
    rows = "".join(f"{row},{row % 7}\n" for row in range(1_000_000))
    market = read_market(written(tmp_path, "time_s,machines\n" + rows))
    assert len(market.times_s) == 1_000_000
    assert market.machines.sum() == sum(row % 7 for row in range(1_000_000))


def test_markets_together_hold_what_each_offers(tmp_path):
    a = read_market(written(tmp_path, "time_s,pool,machines\n0,a,1\n10,a,0\n30,a,2\n"))
    b = read_market(written(tmp_path, "time_s,pool,machines\n0,b,5\n20,b,4\n"))
    both = together([a, b])
    assert both.times_s.tolist() == [0, 10, 20, 30]
    assert both.machines.tolist() == [[1, 5], [0, 5], [0, 4], [2, 4]]
    assert both.gone.tolist() == [[0, 0], [1, 0], [0, 1], [0, 0]]
    assert only(both, ("b",)).machines[:, 0].tolist() == [5, 5, 4, 4]
    with pytest.raises(FleetError, match="two pools"):
        together([a, a])
    with pytest.raises(FleetError, match="no pool 'c'"):
        only(both, ("c",))


def test_markets_together_end_where_the_first_of_them_does(tmp_path):
    a = read_market(written(tmp_path, "time_s,pool,machines\n0,a,1\n10,a,0\n40,a,2\n"))
    b = read_market(written(tmp_path, "time_s,pool,machines\n0,b,5\n20,b,4\n"))
    assert (b.until_s, together([a, b]).until_s) == (40, 40)
    assert together([a, b]).times_s.tolist() == [0, 10, 20]


def test_price_that_no_file_has_is_asked_for(tmp_path):
    market = read_market(written(tmp_path, "time_s,machines\n0,1\n"))
    with pytest.raises(FleetError, match="no price on demand"):
        priced(market, 0.0, 1.0)
    with pytest.raises(FleetError, match="no price of a preemptible"):
        priced(market, 3.0, 0.0)
    full = priced(market, 3.0, 1.0)
    assert (full.pools[0].usd_h, full.usd_h.tolist()) == (3.0, [[1.0]])


def test_public_traces_are_what_their_papers_say():
    if not (DATA / "bamboo").exists():
        pytest.skip("no ../shared/data: the traces of Bamboo and Parcae")
    market = read_market(DATA / "bamboo" / "p3-trace.csv")
    assert (market.machines.max(), market.gone.sum()) == (32, 167)
    assert market.until_s / 3600 == pytest.approx(11.37, abs=0.01)
    counts = read_market(DATA / "parcae" / "p3.csv")
    assert counts.machines.tolist() == market.machines.tolist()
    line = (DATA / "parcae" / "bert" / "trace_hh_55_65.txt").read_text().splitlines()[0]
    segment = read_market(DATA / "parcae" / "bert" / "trace_hh_55_65.txt")
    assert segment.machines[0, 0] == len(json.loads(line)[2]["nodes"])
    assert read_market(DATA / "bamboo" / "v100x1-east1c.txt").notes[0].endswith("sorted")
