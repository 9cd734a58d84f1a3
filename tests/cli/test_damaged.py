"""Files that are not what they were: every command says which, where and what to do, or goes on.

Fields of every kind of file that a command reads are given other values, one at a time.  New ones
are tried by `pytest --hypothesis-profile default`.
"""

import contextlib
import copy
import io
import json
import os
import re
import shutil
import socket
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.checkpoints import checkpoint
from penstock.cli import main
from penstock.cluster import Cluster
from penstock.errors import ClusterError, EstimateError, PenstockError, ScheduleError, TimelineError
from penstock.estimate import read, shipped
from penstock.graph.graph import Graph
from penstock.plan import Plan
from penstock.profile import measure
from penstock.profile.kinds import load_profiles
from penstock.program.program import Program
from penstock.schedule import Schedule, one_f_one_b
from penstock.timeline import Timeline
from tests.cli.conftest import MLP

JOB = f"{MLP}:job"
GONE = "take the field away"
DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]
VALUES = (
    GONE,
    None,
    True,
    -1,
    0,
    3,
    10**9,
    10**19,
    10**400,
    -(10**30),
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\ud800",
    [],
    [1],
    ["a"],
    {},
    {"a": 1},
    DEEP,
)

# What Python says to programmers, and no person should have to read.
PYTHON = re.compile(
    r"Traceback|\.py:\d+|bug of Penstock|\w+Error|Warning|object is not|keyword argument|NoneType"
)
READ_BY = {
    "plan.json": (("simulate", "{run}/plan.json"), ("report", "{run}"), ("replay", "{run}")),
    "graph.json": (("simulate", "{run}/plan.json"),),
    "profile.json": (("simulate", "{run}/plan.json"),),
    "cluster.toml": (("simulate", "{run}/plan.json", "--json"),),
    "predicted.trace.json": (("report", "{run}"),),
    "measured.trace.json": (("report", "{run}"), ("replay", "{run}")),
    "metrics.jsonl": (("report", "{run}"),),
    "summary.json": (("report", "{run}"),),
    "job.json": (("export", "{run}", "--to", "{run}/a.safetensors", "--yes"),),
    "checkpoints/step-000004/state.json": (
        ("export", "{run}", "--to", "{run}/a.safetensors", "--job", JOB),
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two ranks, of which only the files matter."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measure, "_BUDGET_S", 0.0)
        patched.setenv("XDG_CACHE_HOME", str(folder.parent))
        options = ["--schedule", "one_f_one_b", "--set", "stages=2"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(["train", JOB, "--out", str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="module")
def work(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the run, to be changed and mended by every example."""
    return Path(shutil.copytree(run, tmp_path_factory.mktemp("work") / "run"))


def places(document: object, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value of a document, one for items of lists that are alike."""
    yield here
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*here, key))
    elif isinstance(document, list):
        for at in sorted({0, len(document) // 2, len(document) - 1} & set(range(len(document)))):
            yield from places(document[at], (*here, at))


def altered(document: Any, place: tuple[Any, ...], value: object) -> Any:
    if not place:
        return {} if value is GONE else value
    document = copy.deepcopy(document)
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    if value is GONE:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return document


def as_toml(value: Any, top: bool = True) -> str:
    if isinstance(value, dict) and top:
        return "".join(f"{key} = {as_toml(item, top=False)}\n" for key, item in value.items())
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return repr(value)
        case list():
            return f"[{', '.join(as_toml(item, top=False) for item in value)}]"
        case dict():
            pairs = (f"{json.dumps(k)} = {as_toml(v, top=False)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        case _:
            return json.dumps(value, ensure_ascii=False)


def parsed(name: str, content: bytes) -> Any:
    if name.endswith(".toml"):
        return tomllib.loads(content.decode())
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in content.splitlines()]
    return json.loads(content)


def written(name: str, document: Any) -> bytes:
    if name.endswith(".toml"):
        return as_toml(document).encode("utf-8", "surrogatepass")
    if name.endswith(".jsonl"):
        rows = document if isinstance(document, list) else [document]
        return "\n".join(map(json.dumps, rows)).encode()
    return json.dumps(document).encode()


def outcome(*arguments: str) -> tuple[int, str]:
    """Return exit code and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, err.getvalue()


def check_outcome(code: int, said: str) -> None:
    assert PYTHON.search(said) is None, said
    assert code in (0, 1, 2), said
    if code:
        heads = [line.partition(": ")[0] for line in said.splitlines()]
        assert (heads.count("error"), heads.count("hint")) == (1, 1), said


@pytest.mark.parametrize("name", READ_BY)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.sampled(3)
def test_a_field_of_another_value_is_told_or_does_no_harm(
    name: str, data: st.DataObject, run: Path, work: Path
) -> None:
    document = parsed(name, (run / name).read_bytes())
    place = data.draw(st.sampled_from(list(places(document))))
    value = data.draw(st.sampled_from(VALUES))
    command = data.draw(st.sampled_from(READ_BY[name]))
    (work / name).write_bytes(written(name, altered(document, place, value)))
    try:
        check_outcome(*outcome(*(word.format(run=work) for word in command)))
    finally:
        shutil.copy(run / name, work / name)


# -- files that are none -------------------------------------------------------------------------


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": lambda path: path.mkdir(),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: None,
    "empty": lambda path: path.touch(),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 9),
    "digits": lambda path: path.write_text(f'{{"penstock": {"1" * 5000}}}'),
    "deep": lambda path: path.write_text("[" * 100_000),
    "large": lambda path: (path.touch(), os.truncate(path, 100_000_000)),
    "text": lambda path: path.write_text("what a person writes\n"),
    "list": lambda path: path.write_text("[1, 2]"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", READ_BY)
def test_what_is_no_such_file_is_told_at_once(name: str, odd: str, run: Path, work: Path) -> None:
    (work / name).unlink()
    ODD[odd](work / name)
    try:
        code, said = outcome(*(word.format(run=work) for word in READ_BY[name][0]))
        check_outcome(code, said)
        may_be = ("metrics.jsonl", "empty"), ("predicted.trace.json", "nothing")
        assert code != 0 or (name, odd) in may_be, said
    finally:
        if (work / name).is_dir():
            (work / name).rmdir()
        else:
            (work / name).unlink(missing_ok=True)
        shutil.copy(run / name, work / name)


@pytest.mark.parametrize("name", [name for name in READ_BY if name != "metrics.jsonl"])
def test_a_mark_of_the_byte_order_does_no_harm(name: str, run: Path, work: Path) -> None:
    (work / name).write_bytes(b"\xef\xbb\xbf" + (run / name).read_bytes())
    code, said = outcome(*(word.format(run=work) for word in READ_BY[name][0]))
    shutil.copy(run / name, work / name)
    assert code == 0, said


LOADERS = (
    Plan.load,
    Graph.load,
    load_profiles,
    Cluster.load,
    Timeline.load,
    Schedule.load,
    Program.load,
    shipped.load,
    read,
)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__qualname__)
@pytest.mark.sampled(3)
def test_no_loader_waits_for_what_is_no_file(load, odd: str, tmp_path: Path) -> None:
    ODD[odd](tmp_path / "file")
    with pytest.raises(PenstockError) as caught:
        load(tmp_path / "file")
    assert caught.value.hint
    assert PYTHON.search(str(caught.value)) is None


@given(data=st.data())
def test_a_schedule_of_another_field_is_told_or_is_one(data, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("schedule") / "schedule.json"
    document = one_f_one_b(2, 3).to_json()
    place = data.draw(st.sampled_from(list(places(document))))
    path.write_bytes(written("", altered(document, place, data.draw(st.sampled_from(VALUES)))))
    with contextlib.suppress(ScheduleError):
        Schedule.load(path)


WORDS = (
    "",
    "rank",
    "rank -1",
    "rank 99999999999999999999 F0.0",
    "F0.99999999999999999999",
    "F-1.0",
    "\x00",
    "F0.0 " * 1000,
    "0F0",
    "9999999999F0",
    '"',
    "\ud800",
    "\u0661F\u0661",
)


@given(st.lists(st.sampled_from((*WORDS, *map(str, one_f_one_b(2, 2).orders))), max_size=5))
@example([str(one_f_one_b(2, 2))])
def test_text_of_a_schedule_is_told_or_is_one(lines) -> None:
    for parse in (Schedule.parse, Schedule.parse_torch_csv):
        with contextlib.suppress(ScheduleError):
            parse("\n".join(lines))


CELLS = ("", "-1", "0", "1e400", "nan", "inf", "text", "9" * 30, "9" * 5000, "1_0", "\x00", "None")


@given(data=st.data())
def test_a_cell_of_another_value_is_told_or_does_no_harm(data, tmp_path_factory) -> None:
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
    rows = page.partition("```csv\n")[2].partition("```")[0].strip().splitlines()
    head, cells = rows[0], rows[1].split(",")
    at = data.draw(st.integers(0, len(cells) - 1))
    cells[at] = data.draw(st.sampled_from(CELLS))
    path = tmp_path_factory.mktemp("csv") / "runs.csv"
    path.write_text(f"{head}\n{','.join(cells)}\n")
    check_outcome(*outcome("predict", str(path)))


def test_what_is_wrong_is_named(run: Path, tmp_path: Path) -> None:
    """With the field, what stands there and what should."""
    said = {
        "plan.json": (
            (("place", "replicas"), "two"),
            Plan.load,
            "place.replicas is 'two', not a whole number",
        ),
        "graph.json": ((("nodes", 3, 4), "4"), Graph.load, "nodes[3].shape is '4', not a list"),
        "profile.json": ((("op_s", 2), None), load_profiles, "op_s[2] is None, not a number"),
        "predicted.trace.json": (
            (("traceEvents", -1, "pid"), 10**19),
            Timeline.load,
            "].pid is 10000000000000000000, not a whole number",
        ),
    }
    for name, ((place, value), load, words) in said.items():
        document = parsed(name, (run / name).read_bytes())
        (tmp_path / name).write_bytes(written(name, altered(document, place, value)))
        with pytest.raises(PenstockError) as caught:
            load(tmp_path / name)
        assert words in str(caught.value)


def test_numbers_that_no_machine_has_are_refused(tmp_path: Path) -> None:
    text = Cluster.here(2)
    text.save(tmp_path / "c.toml")
    good = (tmp_path / "c.toml").read_text()
    for key in ("memory_bytes", "num_devices", "latency_s", "bytes_per_s"):
        huge = [] if key.endswith("_s") else ["10000000000000000000"]
        for value in (*huge, "1" + 400 * "0", "-1", "nan", '"4"', "[4]"):
            changed = re.sub(rf"^{key} = .*$", f"{key} = {value}", good, flags=re.MULTILINE)
            (tmp_path / "c.toml").write_text(changed)
            words = "devices" if key == "num_devices" else key
            with pytest.raises(ClusterError, match=words) as caught:
                Cluster.load(tmp_path / "c.toml")
            assert PYTHON.search(str(caught.value)) is None


@pytest.mark.parametrize("odd", ["pipe", "socket", "folder", "device"])
def test_weights_that_are_no_file_are_told_at_once(odd: str, run: Path, tmp_path: Path) -> None:
    from penstock.errors import CheckpointError

    place = Path(shutil.copytree(run / "checkpoints" / "step-000004", tmp_path / "step-000004"))
    (place / "rank-0.safetensors").unlink()
    ODD[odd](place / "rank-0.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors"):
        checkpoint.load(place)


def test_totals_that_are_not_those_of_the_spans_are_refused(run: Path, tmp_path: Path) -> None:
    document = parsed("x.json", (run / "measured.trace.json").read_bytes())
    changed = altered(document, ("otherData", "totals", "step_s"), 0)
    (tmp_path / "t.json").write_bytes(written("x.json", changed))
    with pytest.raises(TimelineError, match="step_s"):
        Timeline.load(tmp_path / "t.json")


def test_table_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "runs.csv")
    with pytest.raises(EstimateError, match="a pipe, not a file"):
        read(tmp_path / "runs.csv")
