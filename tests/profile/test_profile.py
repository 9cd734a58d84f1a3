"""The Profile as a noun: checks itself, prints itself, is saved and read back."""

import json
from pathlib import Path

import pytest

from penstock.errors import ProfileError
from penstock.profile import Profile
from penstock.profile.profile import CopyCost, ProfileBasis, UpdateCost
from tests.search.chains import with_costs

PROFILE = Profile(
    graph="0123456789abcdef",
    basis=ProfileBasis("a processor", "torch 2.13.0", "measured", 1),
    op_s=(0.0, 0.001, 0.0025),
    workspace_bytes=(0, 64, 0),
    call_s=1e-5,
    accumulate_s_per_byte=1e-10,
    update=UpdateCost(2e-10, 1e-4, 2.0, 0.5),
    copying=CopyCost(3e-10, 4e-10),
)


def test_profile_that_is_saved_is_read_back(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE


def test_micro_batch_takes_the_sum_of_its_ops() -> None:
    assert PROFILE.micro_batch_s == pytest.approx(0.0035)
    assert str(PROFILE) == (
        "Profile of graph 0123456789abcdef on a processor, measured: 3.50 ms per micro-batch"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op_s": (0.0,)}, "1 times, 3 workspaces"),
        ({"op_s": (0.0, -1.0, 0.0)}, "op_s holds -1.0; it must be 0 or more"),
        ({"op_s": (0.0, float("nan"), 0.0)}, "op_s holds nan"),
        ({"op_s": (0.0, float("inf"), 0.0)}, "op_s holds inf"),
        ({"workspace_bytes": (0, -4, 0)}, "workspace_bytes holds -4"),
        ({"call_s": -1.0}, "call_s holds -1.0"),
        ({"update_s": float("nan")}, "update_s holds nan"),
        ({"how": "guessed"}, "how is 'guessed', not one of measured, estimated"),
    ],
)
def test_profile_that_cannot_be_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        with_costs(PROFILE, **change)


def damaged(**change: object) -> str:
    return json.dumps({**PROFILE.to_json(), **change})


def without(name: str) -> str:
    content = PROFILE.to_json()
    del content[name]
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (damaged()[:-9], "is not readable JSON"),
        ("[]", "holds a list, not an object"),
        ("{}", "is JSON, but no profile"),
        (damaged(penstock="plan"), "is JSON, but no profile"),
        (without("op_s"), "is damaged"),
        (without("call_s"), "is damaged"),
        (damaged(colour="red"), "is damaged"),
        (damaged(op_s=3), "is damaged"),
        (damaged(op_s=["a", 1, 2]), "is damaged"),
        (damaged(call_s=None), "is damaged"),
        (damaged(op_s=[0.0, -1.0, 0.0]), "op_s holds -1.0"),
    ],
)
def test_damaged_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(path)
    assert str(path) in caught.value.message


def test_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nowhere\.json"):
        Profile.load(tmp_path / "nowhere.json")
