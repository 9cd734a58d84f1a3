"""Options: one table, read from Python, flags, texts and files alike."""

from pathlib import Path

import pytest

import penstock as ps
from penstock.cli.options import asked
from penstock.errors import PlanError
from penstock.training.options import (
    OPTIONS,
    Options,
    flag_of,
    in_python,
    listed,
    options_in,
    said,
)

DOCS = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_page_lists_every_option_with_its_flag_and_what_it_is():
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(OPTIONS)
    for row, (name, option) in zip(rows, OPTIONS.items(), strict=True):
        assert row.startswith(f"| `{name}` | `{flag_of(name)}")
        assert row.endswith(f"| {option.help} |")


def test_every_option_is_listed_once_under_its_subject():
    lines = listed().splitlines()
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(flags) == sorted(map(flag_of, OPTIONS))
    subjects = [line for line in lines if line.endswith(":")]
    assert len(subjects) == len({option.subject for option in OPTIONS.values()})


def test_keywords_are_those_of_the_table():
    assert list(OPTIONS) == list(Options.__annotations__)
    assert not Options.__required_keys__


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("steps=200", ("num_steps", 200)),
        ("num_steps = 200", ("num_steps", 200)),
        ("check=no", ("check", False)),
        ("--checkpoint-every=10m", ("checkpoint_every", "10m")),
        ("until_loss=2.5", ("until_loss", 2.5)),
        ("from=a=b", ("weights", "a=b")),
        ("with=rules.toml", ("rules", "rules.toml")),
    ],
)
def test_a_text_names_an_option_by_keyword_or_flag(text, row):
    assert said(text) == row


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("steps", "--set steps has no value", "write --set steps=VALUE"),
        ("steps=many", "--set steps is 'many', not a whole number", "--steps"),
        ("ranks=0", "--set ranks is '0', not at least 1", "--ranks"),
        ("strct=true", "--set: there is no option strct", "did you mean strict?"),
        ("strict=maybe", "--set strict is 'maybe', not true or false", "--strict"),
        ("objective=joy", "--set objective is 'joy', not time or cost", "--objective"),
    ],
)
def test_a_text_that_says_none_is_refused_with_what_would(text, message, hint):
    with pytest.raises(PlanError) as refusal:
        said(text)
    assert refusal.value.message == message
    assert hint in refusal.value.hint


def test_a_file_gives_options_by_either_name(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[train]\nsteps = 7\ncheckpoint-every = 5\ntrial = false\nkeep = "3"\n')
    expected = {"num_steps": 7, "checkpoint_every": "5", "trial": False, "keep": "3"}
    assert options_in(file) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("steps = 7", "there is no table [train] in it"),
        ("[train]\nstep", "not readable TOML"),
        ("[train]\nstepz = 7", "there is no option stepz"),
        ("[train]\nresume = 1", "resume is 1, not true or false"),
        ("[train]\nranks = true", "ranks is True, not a text or a number"),
        ("[train]\nranks = 1.5", "ranks is 1.5, not a whole number"),
        ("[train]\nmemory = [1]", "memory is [1], not a text or a number"),
    ],
)
def test_a_file_that_holds_none_is_refused_with_its_name(tmp_path, content, message):
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises(PlanError) as refusal:
        options_in(file)
    assert str(file) in refusal.value.message
    assert message in refusal.value.message


def test_flags_count_before_texts_and_texts_before_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 1\nranks = 1\nstages = 1\n")
    flags = dict.fromkeys(OPTIONS) | {"num_steps": 3}
    options = asked(flags, ["steps=2", "ranks=2"], file)
    assert options == {"num_steps": 3, "ranks": 2, "stages": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("leave out --plan, --stages", "leave out plan, stages"),
        ("as one stage: --stages 1.", "as one stage: stages=1."),
        ("--mtbf 3h, or mtbf_s", "mtbf=3h, or mtbf_s"),
        ("left out (--no-check)", "left out (check=False)"),
        ("--steps N --resume goes on", "num_steps=N resume=True goes on"),
        ("--units is 5", "units is 5"),
        ('write --memory "60MiB"', 'write memory="60MiB"'),
        ("`penstock train --out DIR` or --out", "`penstock train --out DIR` or out"),
        ("--nproc-per-node 2", "--nproc-per-node 2"),
    ],
)
def test_messages_name_keywords_in_python(text, expected):
    assert in_python(text) == expected


def test_python_is_told_of_keywords_and_never_of_flags(tmp_path):
    with pytest.raises(PlanError) as refusal:
        ps.train("nothing.py", eager=True, offload="all", out=tmp_path, listener=None)
    assert str(refusal.value) == "eager=True trains without a plan"
    assert "--" not in refusal.value.hint
    assert "post_validation" in refusal.value.hint


def test_a_keyword_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(PlanError, match="there is no option rank") as refusal:
        ps.train("nothing.py", rank=2, listener=None)
    assert refusal.value.hint.startswith("did you mean ranks?")
