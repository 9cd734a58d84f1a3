"""Job: what it refuses, and every way in which text can fail to be one."""

import dataclasses
import functools
import multiprocessing
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import JobError
from penstock.job import Job, load_job


def make_job(**fields: object) -> Job:
    defaults = {
        "model": lambda: torch.nn.Linear(2, 1),
        "loss": lambda model, batch: model(batch).mean(),
        "data": lambda start: iter([torch.ones(1, 2)]),
        "optimizer": lambda weights: torch.optim.SGD(weights, lr=0.1),
    }
    return Job(**(defaults | fields))


# The record


def test_job_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_job().seed = 1  # type: ignore[misc]


def test_job_with_only_its_functions_has_the_documented_defaults() -> None:
    job = make_job()
    assert (job.micro_batches, job.num_steps, job.seed) == (8, 100, 0)
    assert job.clip_norm is job.validation is job.learning_rate is job.facts is job.autocast is None


@pytest.mark.parametrize("wrong", [(4, 2), (0, 2), 3, (1, 2, 3), (1.5, 2), (True, 2)])
def test_range_of_batches_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(JobError, match=r"Job\.batch_range is .*, no range of micro-batches"):
        make_job(batch_range=wrong)
    assert make_job(batch_range=(2, 2)).batch_range == (2, 2)


def test_class_of_a_module_is_a_function_that_builds_it() -> None:
    assert make_job(model=torch.nn.Identity).model is torch.nn.Identity


FUNCTIONS = (
    "model",
    "loss",
    "data",
    "optimizer",
    "validation",
    "learning_rate",
    "scheduler",
    "facts",
)


@pytest.mark.parametrize("field", FUNCTIONS)
def test_field_that_is_no_function_is_refused_with_its_name_value_and_a_hint(field: str) -> None:
    with pytest.raises(JobError, match=rf"Job\.{field} is the int 3, not a function") as caught:
        make_job(**{field: 3})
    assert f"{field}=" in caught.value.hint or f"def {field}" in caught.value.hint


@pytest.mark.parametrize(
    ("field", "wrong", "said"),
    [
        ("data", lambda: iter([]), r"data\(start\), and takes \(\): too many positional"),
        ("model", lambda width: None, r"model\(\), and takes \(width\): missing a required"),
        ("model", torch.nn.Linear, r"model\(\), and takes \(in_features"),
        ("loss", lambda batch: 0.0, r"loss\(model, batch\), and takes \(batch\): too many"),
        ("optimizer", lambda: None, r"optimizer\(parameters\), and takes \(\)"),
        ("optimizer", lambda p, *, lr: None, r"optimizer\(parameters\), .*required.*'lr'"),
        ("metrics", lambda model: {}, r"metrics\(model, batch\), and takes \(model\)"),
        ("validation", lambda start: [], r"validation\(\), and takes \(start\)"),
        ("learning_rate", lambda: 1.0, r"learning_rate\(step\), and takes \(\)"),
    ],
)
def test_function_that_does_not_take_what_it_is_given_is_refused(
    field: str, wrong: object, said: str
) -> None:
    with pytest.raises(JobError, match=rf"Job\.{field} is called as {said}") as caught:
        make_job(**{field: wrong})
    assert f"{field}=" in caught.value.hint or f"def {field}" in caught.value.hint


def test_loss_that_is_handed_on_takes_three() -> None:
    carry = {"seen": torch.zeros(1)}
    with pytest.raises(JobError, match=r"Job\.loss is called as loss\(model, batch, carry\)"):
        make_job(carry=carry)
    job = make_job(carry=carry, loss=lambda model, batch, carry: model(batch).mean())
    assert dataclasses.replace(job, num_steps=3).num_steps == 3


def test_what_a_function_that_wraps_another_takes_is_its_own() -> None:
    def of_two(start: int, more: int) -> Iterator[int]:
        return iter([start, more])

    @functools.wraps(of_two)
    def data(start: int) -> Iterator[int]:
        return of_two(start, 1)

    assert list(make_job(data=data, optimizer=torch.optim.Adam).data(3)) == [3, 1]


@pytest.mark.parametrize("field", FUNCTIONS[:4])
def test_required_function_cannot_be_none(field: str) -> None:
    with pytest.raises(JobError, match=rf"Job\.{field} is the NoneType None"):
        make_job(**{field: None})


def test_module_instead_of_a_function_that_builds_it_is_refused() -> None:
    with pytest.raises(JobError, match=r"Job\.model is the Linear Linear\(in_features=2"):
        make_job(model=torch.nn.Linear(2, 1))


@given(st.sampled_from(["micro_batches", "num_steps"]), st.integers(max_value=0))
def test_count_below_one_is_refused(field: str, value: int) -> None:
    with pytest.raises(JobError, match=rf"Job\.{field} is {value}, not a whole number of 1"):
        make_job(**{field: value})


@given(st.sampled_from(["micro_batches", "num_steps"]), st.integers(1))
def test_count_of_one_or_more_is_accepted(field: str, value: int) -> None:
    assert getattr(make_job(**{field: value}), field) == value


@pytest.mark.parametrize("field", ["micro_batches", "num_steps", "seed"])
@pytest.mark.parametrize("value", [True, 2.0, "2", b"2"])
def test_count_that_is_no_whole_number_is_refused(field: str, value: object) -> None:
    with pytest.raises(JobError, match=f"Job.{field} is {value!r}"):
        make_job(**{field: value})


def test_seed_may_be_zero_but_not_less() -> None:
    assert make_job(seed=0).seed == 0
    with pytest.raises(JobError, match="seed is -1"):
        make_job(seed=-1)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "1"])
def test_clip_norm_that_is_no_positive_number_is_refused(value: object) -> None:
    with pytest.raises(JobError, match="clip_norm"):
        make_job(clip_norm=value)


@pytest.mark.parametrize("value", [1, 0.5, None])
def test_clip_norm_may_be_positive_or_none(value: float | None) -> None:
    assert make_job(clip_norm=value).clip_norm == value


@pytest.mark.parametrize("value", ["bfloat16", "float16", None])
def test_autocast_is_accepted_if_torch_has_it(value: str | None) -> None:
    assert make_job(autocast=value).autocast == value


@pytest.mark.parametrize("value", ["bf16", "", torch.bfloat16])
def test_autocast_of_another_name_is_refused_with_the_names(value: object) -> None:
    with pytest.raises(JobError, match="autocast") as caught:
        make_job(autocast=value)
    assert '"bfloat16" or "float16"' in caught.value.hint


def test_long_value_is_shortened_to_one_line() -> None:
    with pytest.raises(JobError) as caught:
        make_job(model=["line\n"] * 1000)
    assert len(caught.value.message) < 120
    assert "\n" not in caught.value.message


# Text


HEAD = """\
import torch
import penstock as ps

def make(**fields):
    return ps.Job(model=lambda: torch.nn.Linear(2, 1), loss=lambda model, batch: model(batch).sum(),
        data=lambda start: iter([torch.ones(1, 2)]), optimizer=torch.optim.SGD, **fields)
"""
MAKE_JOB_LINES = HEAD.count("\n")


@pytest.fixture(autouse=True)
def unchanged_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        is_job = getattr(module.__spec__, "loader_state", None) == "a job"
        if is_job or getattr(module, "FOR_TEST", False):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path):
    def write(body: str, name: str = "file.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    return write


def refusal(text: object) -> JobError:
    with pytest.raises(JobError) as caught:
        load_job(str(text))
    assert caught.value.hint, "an error has a hint"
    assert "\n" not in caught.value.message
    return caught.value


ONE = "def {}(){}: return make(num_steps=7)\n"


@pytest.mark.parametrize(
    "body",
    [
        ONE.format("job", ""),
        ONE.format("main_job", ""),
        ONE.format("tiny_job", ""),
        ONE.format("anything", " -> ps.Job"),
        ONE.format("anything", " -> 'ps.Job'"),
        "from penstock import Job\n" + ONE.format("anything", " -> Job"),
        ONE.format("job", " -> ps.Job") + "def other() -> ps.Job: return make()\n",
        ONE.format("one", " -> ps.Job") + "def _private() -> ps.Job: return make()\n",
        ONE.format("one", " -> ps.Job") + "def helper(): return make()\n",
        "job = make(num_steps=7)\ndef helper(): return make()\n",
        "from functools import partial\njob = partial(make, num_steps=7)\n",
        "job = make()\n" + ONE.format("tiny_job", ""),
    ],
)
def test_file_without_a_name_gives_its_job(write, body: str) -> None:
    assert load_job(str(write(body))).num_steps == 7


def test_name_chooses_among_several(write) -> None:
    path = write("def a(): return make(num_steps=1)\ndef b(): return make(num_steps=2)\n")
    assert load_job(f"{path}:a").num_steps == 1
    assert load_job(f"{path}:b").num_steps == 2


def test_name_of_a_job_itself_is_that_job(write) -> None:
    assert load_job(f"{write('mine = make(num_steps=3)')}:mine").num_steps == 3


def test_job_imported_from_another_file_is_not_the_only_one(write) -> None:
    write("FOR_TEST = True\ndef elsewhere() -> ps.Job: return make(num_steps=1)\n", "beside.py")
    path = write("from beside import elsewhere\ndef here() -> ps.Job: return make(num_steps=2)\n")
    assert load_job(str(path)).num_steps == 2


def test_file_loaded_twice_is_run_twice(write) -> None:
    path = write("def job(): return make(num_steps=1)\n")
    assert load_job(str(path)).num_steps == 1
    path.write_text(path.read_text().replace("num_steps=1", "num_steps=22"))
    assert load_job(str(path)).num_steps == 22


def test_module_of_a_package_in_the_working_folder_gives_its_job(write, monkeypatch) -> None:
    path = write("FOR_TEST = True\ndef tiny(): return make(num_steps=5)\n", "pack_a/jobs.py")
    monkeypatch.chdir(path.parent.parent)
    assert load_job("pack_a.jobs:tiny").num_steps == 5


def test_missing_file_hints_at_the_nearest_name(write) -> None:
    path = write("", "gpt.py")
    error = refusal(path.with_name("gtp.py"))
    assert "gtp.py does not exist" in error.message
    assert error.hint == f"did you mean {path}?"


def test_missing_file_in_a_folder_of_others_lists_them(write) -> None:
    error = refusal(write("", "a.py").with_name("something_else.py"))
    assert "there are: a.py" in error.hint


def test_missing_folder_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "no") in refusal(tmp_path / "no" / "file.py").hint


def test_folder_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path} is a folder" in refusal(tmp_path).message


def test_file_that_is_not_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.txt").write_text("hello")
    assert "job.txt is not a Python file" in refusal(tmp_path / "job.txt").message


def test_missing_module_is_named_and_a_file_is_suggested() -> None:
    error = refusal("no_such_package.jobs:job")
    assert '"no_such_package"' in error.message
    assert '"no_such_package.jobs.py"' in error.hint


@pytest.mark.parametrize("text", ["", ":", ":job", "file.py:", "file.py:3", "file.py:a b"])
def test_text_that_cannot_name_a_job_is_refused_with_the_form(text: str) -> None:
    error = refusal(text)
    assert f'"{text}" names no job' in error.message
    assert "file.py:name" in error.hint


@given(st.text(max_size=30))
def test_any_text_gives_a_job_or_a_job_error(text: str) -> None:
    with pytest.raises(JobError):
        load_job(text)


def test_syntax_error_is_told_with_file_and_line(write) -> None:
    path = write("\ndef job(:\n    pass\n")
    assert refusal(path).message.startswith(f"{path}:{MAKE_JOB_LINES + 2}: SyntaxError: ")


def test_exception_while_loading_is_told_with_its_line(write) -> None:
    path = write("x = 1\ny = x / 0\n")
    expected = f"{path}:{MAKE_JOB_LINES + 2}: ZeroDivisionError: division by zero"
    assert refusal(path).message == expected


def test_exception_inside_the_function_is_told_with_its_last_line_in_the_users_code(write) -> None:
    path = write("def job():\n    return make(num_steps=int('many'))\n")
    assert refusal(path).message.startswith(f"{path}:{MAKE_JOB_LINES + 2}: ValueError: ")


def test_exception_inside_torch_is_told_with_the_users_line(write) -> None:
    path = write("def job():\n    return torch.nn.Linear(2, -1)\n")
    assert refusal(path).message.startswith(f"{path}:{MAKE_JOB_LINES + 2}: RuntimeError: ")


def test_job_error_inside_the_file_keeps_its_hint_and_gains_the_line(write) -> None:
    path = write("def job():\n    return make(micro_batches=0)\n")
    error = refusal(path)
    line = HEAD.splitlines().index("def make(**fields):") + 2
    expected = f"{path}:{line}: Job.micro_batches is 0, not a whole number of 1 or more"
    assert error.message == expected
    assert error.hint == "set micro_batches to 1 or more"


def test_message_of_several_lines_becomes_one(write) -> None:
    path = write("def job():\n    raise ValueError('one\\n  two')\n")
    assert refusal(path).message.endswith("ValueError: one two")


@pytest.mark.parametrize("body", ["raise SystemExit(3)", "def job(): raise SystemExit(3)"])
def test_file_that_exits_is_a_job_error(write, body: str) -> None:
    assert "SystemExit: 3" in refusal(write(body)).message


def test_keyboard_interrupt_is_not_swallowed(write) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_job(str(write("def job():\n    raise KeyboardInterrupt\n")))


def test_file_that_failed_to_load_leaves_no_module_behind(write) -> None:
    refusal(write("1 / 0\n"))
    assert "file" not in sys.modules


SQUARE = "def square(x): return x * x\ndef job(): return make()\n"


@pytest.mark.parametrize("name", ["rows.py", "rows-2.py", "deep/rows.py"])
@pytest.mark.sampled(2)
def test_what_a_file_defines_is_found_by_a_process_that_is_spawned(write, name: str) -> None:
    load_job(str(write(SQUARE, name)))
    square = sys.modules[Path(name).stem].square
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(square, (3,)) == 9


@pytest.mark.parametrize("name", ["json.py", "sys.py", "v1.2.py", "pytest.py"])
def test_file_named_as_another_module_takes_nobodys_place(write, name: str) -> None:
    before = sys.modules.get(Path(name).stem)
    assert load_job(str(write(SQUARE, name)))
    assert sys.modules.get(Path(name).stem) is before
    assert sys.modules[f"penstock_job_{Path(name).stem}"].square(2) == 4


def test_files_of_one_name_in_two_folders_are_two_jobs(write) -> None:
    one, other = (write(f"def job(): return make(num_steps={n})\n", f"{n}/file.py") for n in (3, 4))
    for path, steps in (one, 3), (other, 4), (one, 3):
        assert load_job(str(path)).num_steps == steps


def test_import_of_something_missing_inside_the_file_is_told_with_its_line(write) -> None:
    path = write("import no_such_thing\n")
    expected = f"{path}:{MAKE_JOB_LINES + 1}: ModuleNotFoundError: No module named 'no_such_thing'"
    assert refusal(path).message == expected


def test_import_of_something_missing_inside_a_module_is_told_with_its_line(
    write, monkeypatch
) -> None:
    path = write("import no_such_thing\n", "pack_b/jobs.py")
    monkeypatch.chdir(path.parent.parent)
    assert f"jobs.py:{MAKE_JOB_LINES + 1}: " in refusal("pack_b.jobs:job").message


def test_function_that_needs_arguments_is_refused(write) -> None:
    error = refusal(write("def job(size): return make()\n"))
    assert "missing 1 required positional argument: 'size'" in error.message
    assert "without arguments" in error.hint


def test_unknown_name_hints_at_the_nearest_function(write) -> None:
    path = write("def llama(): return make()\n")
    error = refusal(f"{path}:lama")
    assert error.message == f"{path} has no function lama"
    assert error.hint == f"did you mean {path}:llama?"


def test_unknown_name_far_from_all_lists_the_functions(write) -> None:
    assert (
        refusal(f"{write('def llama(): return make()')}:zzz").hint == "its functions: make, llama"
    )


def test_name_of_a_value_is_refused(write) -> None:
    assert "a value size" in refusal(f"{write('size = 3')}:size").message


def test_what_is_returned_must_be_a_job(write) -> None:
    path = write("def job(): return {'model': 1}\n")
    assert refusal(path).message == f"{path}:job returns the dict {{'model': 1}}, not a Job"


def test_several_jobs_without_a_name_are_listed(write) -> None:
    path = write("def b() -> ps.Job: return make()\ndef a() -> ps.Job: return make()\n")
    error = refusal(path)
    assert error.message == f"{path} has several jobs: b, a"
    assert error.hint == f"name one: {path}:b"


def test_file_without_a_job_lists_its_functions(write) -> None:
    error = refusal(write("def tiny(): return make()\n"))
    assert "no function called job" in error.message
    assert "its functions: make, tiny" in error.hint


def test_a_job_is_hashed_whatever_it_keeps() -> None:
    made = make_job()
    assert hash(made) == hash(dataclasses.replace(made, state={"chance": torch.Generator()}))
