"""penstock schedule --find: what is found is what is written, and no longer than what there is."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.schedule import Schedule, Seconds, peak_activations, v_half, zb_v
from tests.cli.conftest import Call
from tests.schedule.brute import shortest
from tests.search.test_shortest import played_s

ASK = ("schedule", "--stages", 2, "--micro-batches", 3, "--seconds", "3:1,2,1")
TIMES = ((3.0, 1.0), (2.0, 2.0), (1.0, 1.0))  # the same


def test_exact_one_is_the_shortest_of_all_orders_and_its_file_is_it(call: Call, tmp_path: Path):
    path = tmp_path / "new" / "found.txt"
    for limit in (1, 2):
        done = call(*ASK, "--find", "exact", "--limit", limit, "--out", path, "--json")
        assert (done.code, done.err) == (0, f"wrote {path}\n")
        document = json.loads(done.out)
        assert document["step_s"] == shortest(2, 3, TIMES, limit=limit, split=True)
        assert document["step_s"] == pytest.approx(document["bound_s"], rel=1e-5)
        assert (document["is_proved"], document["limit"]) == (True, limit)
        assert document["copies"] == []
        made = Schedule.parse(path.read_text())
        assert [order.split() for order in made.orders.words()] == document["ranks"]
        assert max(peak_activations(made)) <= limit
        assert played_s(made, Seconds(*TIMES)) == document["step_s"]


def test_built_in_ones_stand_beside_it_the_best_first(call: Call):
    asked = (*ASK, "--find", "exact", "--limit", 2)
    known = json.loads(call(*asked, "--json").out)["built_in"]
    steps = [each["step_s"] for each in known]
    assert steps == sorted(steps)
    plain = next(each["step_s"] for each in known if each["name"] == "one_f_one_b")
    text = Schedule.parse(
        "rank 0  F0.0 F0.1 B0.0 F0.2 B0.1 B0.2\nrank 1  F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    )
    assert plain == played_s(text, Seconds(*TIMES))
    lines = call(*asked).out.splitlines()
    head = "2 stages on 2 ranks, 3 micro-batches, at most 2 activations on a rank; "
    assert lines[0] == f"{head}F 3 1 s, I 2 s, W 1 s, a message 0 s"
    least_s = shortest(2, 3, TIMES, limit=2, split=True)
    assert lines[3].split()[:4] == ["found", "(exact)", f"{least_s:g}", "s"]
    assert lines[4].split() == [known[0]["name"], f"{known[0]['step_s']:g}", "s"]
    assert "no schedule is shorter" in lines
    assert lines[-2].startswith("rank 0  F0 -  -  F1")  # a column a second


def test_annealed_one_has_the_stages_and_the_memory_of_the_one_that_is_named(
    call: Call, tmp_path: Path
):
    text, svg = tmp_path / "found.txt", tmp_path / "found.svg"
    sizes = ("--stages", 6, "--micro-batches", 6, "--within", 0, "--out", text, "--svg", svg)
    done = call("schedule", "zb_v", "--find", "anneal", *sizes, "--seconds", "1,1,1,1", "--json")
    document, seconds = json.loads(done.out), Seconds(message_s=1.0)
    made, published = Schedule.parse(text.read_text()), zb_v(6, 6)
    assert made.stage_ranks == published.stage_ranks
    assert max(peak_activations(made)) <= document["limit"] == max(peak_activations(published))
    assert document["step_s"] == played_s(made, seconds) < played_s(published, seconds)
    assert document["bound_s"] <= document["step_s"]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    sizes = ("--stages", 8, "--micro-batches", 8, "--within", 0)
    words = call("schedule", "v_half", "--find", "anneal", *sizes).out
    assert "no schedule with its stages on these ranks is below 51 s" in words


def test_annealing_begins_with_the_best_built_in_ones(call: Call):
    asked = ("schedule", "--stages", 3, "--micro-batches", 4, "--find", "anneal", "--within", 0)
    document = json.loads(call(*asked, "--seconds", "2,1,1", "--json").out)
    assert document["limit"] == 3
    assert document["step_s"] <= document["built_in"][0]["step_s"]


def test_exact_one_of_stages_in_waves_is_proved(call: Call, tmp_path: Path):
    path = tmp_path / "found.txt"
    sizes = ("--stages", 6, "--ranks", 3, "--micro-batches", 6, "--limit", 4, "--out", path)
    asked = ("schedule", "--find", "exact", *sizes, "--seconds", "2,2,2")
    document = json.loads(call(*asked, "--json").out)
    assert (document["step_s"], document["is_proved"]) == (82, True)  # 41 in the paper's seconds
    made = Schedule.parse(path.read_text())
    assert max(peak_activations(made)) == 4
    assert played_s(made, Seconds(2.0, 2.0, 2.0)) == 82
    assert "no schedule with its stages on these ranks is shorter" in call(*asked).out


def test_copies_to_the_host_are_listed_and_written(call: Call, tmp_path: Path):
    path = tmp_path / "found.txt"
    asked = ("schedule", "--find", "exact", "--stages", 2, "--micro-batches", 3, "--limit", 1)
    done = call(*asked, "--seconds", "2,1,1,0,1", "--out", path)
    assert "found (exact)  18 s  -14.3 % of the best built-in" in done.out
    assert "stage 0 micro-batch 0  to the host 2 to 3 s  back 6 to 7 s" in done.out
    document = json.loads(call(*asked, "--seconds", "2,1,1,0,1", "--json").out)
    assert (len(document["copies"]), document["run_s"]) == (3, 18.0)
    made = Schedule.parse(path.read_text())
    assert [row.split() for row in made.words()] == document["ranks"]
    assert (len(made.far), max(peak_activations(made))) == (6, 1)
    done = call("schedule", path, "--find", "anneal")
    assert (done.code, "makes no copies to the host" in done.err) == (2, True)


def test_orders_of_a_built_in_one_are_written(call: Call, tmp_path: Path):
    path = tmp_path / "v_half.txt"
    done = call("schedule", "v_half", "--stages", 4, "--micro-batches", 3, "--out", path)
    assert done.code == 0
    assert Schedule.parse(path.read_text()) == v_half(4, 3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--find", "exact", "--seconds", "1,2"], "--seconds 1,2 is not three to five numbers"),
        (
            ["--find", "exact", "--seconds", "1,2,x"],
            "--seconds 1,2,x has something that is not a number",
        ),
        (["--find", "exact", "--seconds", "1,2,1,1:2"], "is not three to five numbers"),
        (["--find", "exact", "--seconds", "1,2,-1"], "has a negative or infinite number"),
        (["--find", "exact", "--seconds", "1,2,nan"], "has a negative or infinite number"),
        (["--find", "exact", "--seconds", "1:2,2,1"], r"forward_s is (1.0, 2.0), for 4 stages"),
        (
            ["--find", "exact", "--ranks", "2", "--seconds", "1,1,2"],
            "puts one stage on each rank, not 4 on 2",
        ),
        (
            ["--find", "exact", "--ranks", "2", "--seconds", "1,1,1,1"],
            "puts one stage on each rank, not 4 on 2",
        ),
        (["zb_h1", "--find", "exact"], "starts from no schedule, but zb_h1 is named"),
        (["--find", "exact", "--micro-batches", "151"], "4 stages x 151 micro-batches: too many"),
        (["--find", "anneal", "--seconds", "1,1,1,0,1"], "makes no copies to the host"),
        (["--find", "anneal", "--limit", "1", "--ranks", "3"], "no built-in schedule holds"),
        (["gpipe", "--find", "anneal", "--limit", "2"], "a rank holds 8 activations of 2"),
        (["pipedream", "--find", "anneal"], "pipedream is of several steps"),
        (["zb_h1", "--limit", "3"], "--limit without --find"),
        (["--within", "3"], "--within without --find"),
        (["--out", "x"], "--out writes one schedule"),
    ],
)
def test_what_cannot_be_is_one_line_and_a_hint(call: Call, flags: list[str], words: str):
    done = call("schedule", *flags)
    assert done.code == 2
    first, *rest = done.err.splitlines()
    assert first.startswith("error: ")
    assert words in first
    assert [line[:6] for line in rest] == ["hint: "]
