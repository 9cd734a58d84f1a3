"""penstock fleet volatile: what it says, as words and as JSON, and what it refuses."""

import json
import math

import pytest

BIDS = ("--busy", "1", "--deadline", "2")


@pytest.fixture
def prices(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("seconds,usd_per_hour\n3600,0.9\n7200,0.5\n3600,0.3\n")
    return path


def test_variance_of_ranks_that_come_and_go_is_said(call):
    done = call("fleet", "volatile", "--ranks", "2", "--survival", "0.5", "--json")
    found = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert found.keys() == {"ranks", "survival", "inverse", "penalty", "tries_per_step"}
    assert found["inverse"] == pytest.approx(5 / 6)
    assert found["penalty"] == pytest.approx(5 / 6)
    assert found["tries_per_step"] == pytest.approx(4 / 3)


def test_steps_growth_and_bids_are_added_where_they_are_asked_for(call, prices):
    descent = "--descent", "1,0.9,0.01", "--target", "0.1"
    asked = "fleet", "volatile", "--ranks", "4", "--survival", "0.5", *descent
    done = call(*asked, "--prices", prices, *BIDS, "--json")
    found = json.loads(done.out)
    assert found["descent"]["steps"] >= found["descent"]["steps_if_all_stay"] > 0
    assert found["descent"]["growth"]["rank_steps"] <= 4 * found["descent"]["steps"]
    assert next(iter(found["bids"])) == "one"
    assert found["bids"]["one"]["high_usd"] == 0.5
    for one in found["bids"].values():
        assert one["seconds"] <= 7200
        assert one["usd"] <= found["bids"]["one"]["usd"] * (1 + 1e-9)
    words = call(*asked, "--prices", prices, *BIDS)
    assert f"{found['descent']['steps']} steps to the error" in words.out
    assert "1.73 usd" in words.out


@pytest.mark.parametrize(
    ("ranks", "descent", "target"), [(8, "1,0.99,0.01", "0.3"), (3, "1,0.9,0.05", "0.4")]
)
def test_growth_asks_for_no_more_ranks_than_there_are(call, ranks, descent, target):
    asked = "--survival", "0.7", "--descent", descent, "--target", target
    growth = json.loads(call("fleet", "volatile", "--ranks", ranks, *asked, "--json").out)[
        "descent"
    ]["growth"]
    last = growth["first"] * growth["factor"] ** (growth["steps"] - 1)
    assert growth["first"] <= math.ceil(last - 1e-9) <= ranks


def test_bids_that_cannot_be_in_time_are_said_to_be_late(call, prices):
    asked = "--busy", "3", "--deadline", "2"
    done = call("fleet", "volatile", "--ranks", "2", "--prices", prices, *asked)
    assert done.out.count("not in time") == 4


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (["--ranks", "0"], "0 ranks train nothing"),
        (["--ranks", "2", "--survival", "1.5"], "the chance that a rank is there is 1.5"),
        (["--ranks", "2", "--target", "0.1"], "--descent is missing"),
        (["--ranks", "2", "--busy", "1"], "--prices and --deadline is missing"),
        (["--ranks", "2", "--descent", "1,2", "--target", "1"], "not three numbers"),
        (["--ranks", "1", "--descent", "1,0.9,1", "--target", "0.1"], "is never reached"),
        (["--ranks", "2", "--prices", "none.csv", *BIDS], "cannot read table none.csv"),
    ],
)
def test_what_cannot_be_is_refused(call, wrong, error):
    assert error in call("fleet", "volatile", *wrong).refusal(2)[0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("price\n1\n", "has the columns price"),
        ("usd_per_hour,seconds\n0.1,-5\n", "row 2: seconds is '-5'"),
        ("usd_per_hour,seconds\n0.1,1\nfree,1\n", "row 3: usd_per_hour is 'free'"),
        ("usd_per_hour,seconds\n", "are no distribution"),
    ],
)
def test_table_of_prices_that_is_wrong_is_refused_with_the_row(call, tmp_path, text, error):
    path = tmp_path / "prices.csv"
    path.write_text(text)
    refused = call("fleet", "volatile", "--ranks", "2", "--prices", path, *BIDS).refusal(2)
    assert error in refused[0]
