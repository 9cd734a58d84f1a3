"""Options: one table, read from Python, flags, texts and files alike."""

import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.cli import main
from penstock.cli.flags import BY_COMMAND, TRAIN, flag_of, in_flags, listed, moved, typed
from penstock.cli.options import asked
from penstock.errors import PlanError
from penstock.rules.rule import Rule
from penstock.training.options import OPTIONS, Options, asked_for, options_in, said, word_of

DOCS = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_page_lists_every_option_with_how_it_is_said_and_what_it_is():
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(OPTIONS)
    names = [row.split("`")[1] for row in rows]
    assert sorted(names) == sorted(OPTIONS)
    for name, row in zip(names, rows, strict=True):
        said_as = flag_of(name) if name in TRAIN else f"{name}="
        assert row.split("`")[3].startswith(said_as)
        assert row.endswith(f"| {OPTIONS[name].help} |")


def test_every_option_is_listed_once_under_its_subject(capfd):
    assert main(["train", "--options-help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    words = [line.split()[0].partition("=")[0] for line in lines if line.startswith("  ")]
    assert sorted(words) == sorted(flag_of(name) if name in TRAIN else name for name in OPTIONS)
    subjects = [line for line in lines if line.endswith(":")]
    assert len(subjects) == len({option.subject for option in OPTIONS.values()})


def test_every_option_is_a_keyword_of_train_and_help_shows_it():
    keywords = inspect.signature(ps.train).parameters
    assert set(OPTIONS) <= set(keywords)
    assert all(keywords[name].kind == inspect.Parameter.KEYWORD_ONLY for name in OPTIONS)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_shows_ten_flags_beside_those_of_every_command(command, capfd):
    assert main([command, "--help"]) == 0
    rows = [line for line in capfd.readouterr().out.splitlines() if line.startswith("  -")]
    flags = [row.split()[0] for row in rows]
    assert len([flag for flag in flags if flag not in HELP]) == 10
    assert {"--set", *map(flag_of, BY_COMMAND[command])} <= set(flags)


HELP = "--options-help", "-h,", "--json"  # of every command, but for the first


def test_keywords_are_those_of_the_table():
    assert list(OPTIONS) == list(Options.__annotations__)
    assert not Options.__required_keys__


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("steps=200", ("num_steps", 200)),
        ("num_steps = 200", ("num_steps", 200)),
        ("check=no", ("check", False)),
        ("checkpoint-every=10m", ("checkpoint_every", "10m")),
        ("until_loss=2.5", ("until_loss", 2.5)),
        ("weights=a=b", ("weights", "a=b")),
        ("rules=rules.toml", ("rules", "rules.toml")),
    ],
)
def test_a_text_names_an_option(text, row):
    assert said(text) == row


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("steps", "--set steps has no value", "write --set steps=VALUE"),
        ("steps=many", "--set steps is 'many', not a whole number", "steps: "),
        ("ranks=0", "--set ranks is '0', not at least 1", "ranks: "),
        ("strct=true", "--set: there is no option strct", "did you mean strict?"),
        ("strict=maybe", "--set strict is 'maybe', not true or false", "strict: "),
        ("objective=joy", "--set objective is 'joy', not time or cost", "objective: "),
    ],
)
def test_a_text_that_says_none_is_refused_with_what_would(text, message, hint):
    with pytest.raises(PlanError) as refusal:
        said(text)
    assert refusal.value.message == message
    assert hint in refusal.value.hint


def test_what_was_asked_for_is_said_without_its_defaults():
    asked = {"num_steps": 8, "strict": False, "check": False, "trial": True, "out": "runs/one"}
    asked |= {"memory": (3, 4), "cluster": Path("here.toml"), "ranks": None, "sums": "int8"}
    asked |= {"rules": [Rule("keep", "*")]}
    assert asked_for(asked) == {
        "num_steps": 8,
        "check": False,
        "memory": "3,4",
        "cluster": "here.toml",
        "sums": "int8",
        "rules": "Rule",
    }


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
    flags: dict[str, object] = {"num_steps": 3, "ranks": None}
    options = asked({**flags, "sets": ["steps=2", "ranks=2"]}, file=file)
    assert options == {"num_steps": 3, "ranks": 2, "stages": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("leave out plan, stages", "leave out plan, stages"),
        ("as one stage: stages=1.", "as one stage: --set stages=1."),
        ('keep the newest: keep="1"', "keep the newest: --set keep=1"),
        ("num_steps=N resume=True goes on", "--steps N --resume goes on"),
        ("begin it anew: forget_state=True", "begin it anew: --set forget_state=true"),
        ("`ps.train(job, stages=1)`, or ranks=2", "`ps.train(job, stages=1)`, or --ranks 2"),
        ("round_robin(ranks=1-2, x=3): ranks=3", "round_robin(ranks=1-2, x=3): --ranks 3"),
        ("without a plan (eager=True)", "without a plan (--set eager=true)"),
        ("set micro_batches=4, or Job.ranks=2", "set micro_batches=4, or Job.ranks=2"),
    ],
)
def test_a_hint_is_told_in_the_words_of_the_command_line(text, expected):
    assert in_flags(text) == expected


def test_a_hint_names_the_flag_of_the_command_that_is_told():
    assert in_flags("as one stage: stages=1", "check") == "as one stage: --stages 1"
    told = in_flags('say job="JOB" and token_file="a/b.json", then give yes=True', "join")
    assert told == "say --job JOB and --token-file a/b.json, then give --yes"


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--tls"], "--tls is now --set tls=true"),
        (["--no-check"], "--no-check is now --set check=false"),
        (["--trial"], "--trial is now --set trial=true"),
        (["--audit", "100%,stop"], "--audit is now --set audit=100%,stop"),
        (["--stages=2"], "--stages is now --set stages=2"),
        (["--with", "a b.toml"], "--with is now --set rules='a b.toml'"),
        (["--from"], "--from is now --set weights=PATH"),
    ],
)
def test_a_flag_of_before_is_refused_with_its_new_place(words, place, capfd):
    assert main(["train", "nothing.py", *words]) == 2
    assert capfd.readouterr().err.splitlines()[0] == f"error: {place}"


@pytest.mark.parametrize("word", ["--trail", "--no-audit", "--num-steps"])
def test_what_was_never_a_flag_is_refused_as_such(word, capfd):
    assert main(["train", "nothing.py", word]) == 2
    assert "no such option" in capfd.readouterr().err


def test_a_flag_of_before_is_no_flag_of_a_command_that_cannot_take_it(capfd):
    assert main(["plan", "nothing.py", "--tls"]) == 2
    assert "no such option" in capfd.readouterr().err
    assert main(["plan", "nothing.py", "--set", "stagez=1"]) == 2


def test_an_option_that_a_command_does_not_take_is_refused():
    with pytest.raises(PlanError, match="--set tls: this command takes no such option"):
        asked({"sets": ["tls=true"]}, BY_COMMAND["plan"])


def _values(name):
    option = OPTIONS[name]
    if option.words:
        return st.sampled_from(option.words)
    least = option.least or 0
    texts = st.text("abcz019%,./", min_size=1, max_size=9)
    kinds = {
        bool: st.booleans(),
        int: st.integers(int(least), 10**6),
        float: st.floats(-1e6, 1e6, allow_nan=False),
        str: texts,
    }
    return kinds[option.kind]


FEW = settings(max_examples=25)  # each has most of the options
CHOSEN = st.fixed_dictionaries({}, optional={name: _values(name) for name in OPTIONS})


@FEW
@given(CHOSEN)
def test_an_option_is_the_same_however_it_is_said(tmp_path_factory, options):
    sets = [f"{word_of(name)}={value}" for name, value in options.items()]
    assert asked({"sets": sets}) == options

    file = tmp_path_factory.mktemp("options") / "mine.toml"
    rows = [f"{word_of(name)} = {_toml(value)}" for name, value in options.items()]
    file.write_text("\n".join(["[train]", *rows]))
    assert options_in(file) == options

    flags = {name: value for name, value in options.items() if name in TRAIN}
    others = [f"{name}={value}" for name, value in options.items() if name not in TRAIN]
    assert asked({**flags, "sets": others}) == options


def _toml(value):
    return str(value).lower() if isinstance(value, bool) else repr(value)


@FEW
@given(CHOSEN)
def test_what_a_person_is_told_to_type_says_the_option(options):
    for name, value in options.items():
        words = typed(name, str(value)).split(" ", 1)
        if words[0] == "--set":
            assert said(words[1]) == (name, value)
        else:
            assert words[0] == flag_of(name)
            assert OPTIONS[name].kind is bool or words[1] == str(value)


def test_python_is_told_of_keywords_and_never_of_flags(tmp_path):
    with pytest.raises(PlanError) as refusal:
        ps.train("nothing.py", eager=True, offload="all", out=tmp_path, listener=None)
    assert str(refusal.value) == "eager trains without a plan"
    assert "--" not in refusal.value.hint
    assert "post_validation" in refusal.value.hint


def test_a_keyword_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(PlanError, match="there is no option rank") as refusal:
        ps.train("nothing.py", rank=2, listener=None)  # type: ignore[call-arg]
    assert refusal.value.hint.startswith("did you mean ranks?")
    with pytest.raises(PlanError, match="there is no option steps") as refusal:
        ps.train("nothing.py", steps=2, listener=None)  # type: ignore[call-arg]
    assert refusal.value.hint == "in Python it is num_steps"


def test_a_list_of_some_options_has_their_subjects_alone():
    lines = listed(["tls", "num_steps"]).splitlines()
    assert [line for line in lines if line.endswith(":")] == [
        "Machines that come and go:",
        "Run:",
    ]
    assert moved("--nothing", []) is None
