"""What a job's code reads beyond its source is noted, by whatever way it reads."""

import json
import os
import pickle
import sqlite3
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.choose.store import keep, kept, key_of
from penstock.errors import JobError
from penstock.examine.examine import examine
from penstock.examine.surroundings import NOTES, is_as_then, noting
from penstock.job import load_job
from penstock.processes.child import in_a_fork
from tests.choose.test_store import Note

JOB = """
import torch, penstock as ps
def data(start):
    while True:
        yield torch.ones(2, 3)
def job():
    {inside}
    return ps.Job(lambda: torch.nn.Linear(3, 1), lambda m, b: m(b).mean(), data, torch.optim.SGD)
"""


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch, tmp_path):
    monkeypatch.setattr(NOTES, "values", {})
    monkeypatch.setattr(NOTES, "lines", {})
    monkeypatch.setattr(NOTES, "_own", set())
    monkeypatch.setattr(NOTES, "_made", set())
    monkeypatch.setattr(NOTES, "written", {})
    monkeypatch.setenv("CONFIG", "off")
    monkeypatch.chdir(tmp_path)


def loaded(tmp_path, top, inside="pass"):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(top) + JOB.format(inside=inside))
    with noting():
        return load_job(str(path))


def read() -> set[str]:
    """Return what is noted, but for the script itself."""
    return {what for what in NOTES.taken() if not what.endswith("script.py")}


# -- environment ----------------------------------------------------------------------------------

READS = {
    "get": "import os; A = os.environ.get('CONFIG')",
    "index": "import os; A = os.environ['CONFIG']",
    "in": "import os; A = 'CONFIG' in os.environ",
    "getenv": "import os; A = os.getenv('CONFIG', 'on')",
    "imported": "from os import environ; A = environ.get('CONFIG')",
    "bytes": "import os; A = os.environb[b'CONFIG']",
    "through Python": "import os; A = os.path.expandvars('$CONFIG')",
    "setdefault": "import os; A = os.environ.setdefault('CONFIG', 'on')",
    "a copy": "import os; A = dict(os.environ)",
    "by a prefix": "import os; A = {k: v for k, v in os.environ.items() if k[:4] == 'CONF'}",
    "parser": """
    import argparse, os
    parser = argparse.ArgumentParser()
    parser.add_argument('--lr', default=os.environ.get('CONFIG'))
    A = parser.parse_args()
    """,
}


@pytest.mark.parametrize("read", READS)
def test_a_variable_that_the_script_reads_is_noted_with_its_value(read, tmp_path, monkeypatch):
    loaded(tmp_path, READS[read])
    values = NOTES.taken()
    assert is_as_then(values)
    monkeypatch.setenv("CONFIG", "on")
    if read == "in":
        monkeypatch.delenv("CONFIG")
    assert not is_as_then(values)
    monkeypatch.setenv("CONFIG", "off")
    assert is_as_then(values)


def test_what_nobody_reads_is_not_noted_nor_what_the_script_sets(tmp_path, monkeypatch):
    loaded(tmp_path, "import os; os.environ['CONFIG'] = 'on'; A = os.environ['CONFIG']")
    assert not read()
    loaded(tmp_path, "A = 1", "import os; A = os.environ['CONFIG']")
    assert type(os.environ).__name__ == "_Environ"


def test_values_are_not_written_down(tmp_path, monkeypatch):
    monkeypatch.setenv("CONFIG", "a secret")
    loaded(tmp_path, READS["get"])
    assert "secret" not in json.dumps(NOTES.taken())
    assert NOTES.lines["environment CONFIG"][1] == 1


def test_what_python_and_torch_read_for_themselves_does_not_count(tmp_path):
    loaded(tmp_path, "import tempfile, torch.utils.cpp_extension, numpy.testing, logging")
    assert {what.partition(" ")[0] for what in read()} <= {"environment"}  # of what is imported
    assert not any("TORCH" in what or "CUDA" in what for what in read())


# -- files ----------------------------------------------------------------------------------------


def as_json(path, value):
    path.write_text(json.dumps(value))


def as_array(path, value):
    with path.open("wb") as file:
        np.save(file, np.array(value))


def as_base(path, value):
    path.unlink(missing_ok=True)
    base = sqlite3.connect(path)
    base.execute("create table rows (k integer)")
    base.execute("insert into rows values (?)", (value,))
    base.commit()
    base.close()


FILES = {
    "json": (as_json, "import json; A = json.load(open('config'))"),
    "pathlib": (as_json, "from pathlib import Path; A = Path('config').read_text()"),
    "codecs": (as_json, "import codecs; A = codecs.open('config', encoding='utf8').read()"),
    "ini": (as_json, "import configparser; A = configparser.RawConfigParser().read('nowhere')"),
    "array": (as_array, "import numpy as np; A = np.load('config')"),
    "mapped": (as_array, "import numpy as np; A = np.load('config', mmap_mode='r')"),
    "torch": (
        lambda path, value: torch.save(value, path),
        "import torch; A = torch.load('config')",
    ),
    "pickle": (
        lambda path, value: path.write_bytes(pickle.dumps(value)),
        "import pickle; A = pickle.load(open('config', 'rb'))",
    ),
    "descriptor": (as_json, "import os; A = os.read(os.open('config', os.O_RDONLY), 9)"),
    "exec": (lambda path, value: path.write_text(f"A = {value}"), "exec(open('config').read())"),
    "base": (
        as_base,
        "import sqlite3; A = sqlite3.connect('config').execute('select k from rows')",
    ),
    "is there": (as_json, "import os; A = os.path.exists('other')"),
    "how long": (as_json, "import os; A = os.path.getsize('config')"),
    "listed": (as_json, "import glob; A = sorted(glob.glob('*.txt'))"),
    "walked": (as_json, "from pathlib import Path; A = [*Path('.').rglob('*.txt')]"),
}
CHANGES = {
    "ini": lambda path: (path.parent / "nowhere").write_text("[a]"),
    "is there": lambda path: (path.parent / "other").touch(),
    "listed": lambda path: (path.parent / "b.txt").touch(),
    "walked": lambda path: (path.parent / "b.txt").touch(),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_the_script_reads_is_noted_by_its_content(kind, tmp_path):
    write, read = FILES[kind]
    path = tmp_path / "config"
    write(path, 3)
    loaded(tmp_path, read)
    values = NOTES.taken()
    assert is_as_then(values)
    CHANGES.get(kind, lambda path: write(path, 14))(path)
    assert not is_as_then(values)


def test_a_long_file_counts_by_what_it_begins_and_ends_with_and_when_it_was_written(tmp_path):
    path = tmp_path / "config"
    path.write_bytes(b"0" * 3 * 2**20)
    loaded(tmp_path, "A = open('config', 'rb'); A.close()")
    values = NOTES.taken()
    assert is_as_then(values)
    with path.open("r+b") as file:
        file.seek(2**20)
        file.write(b"1")
    os.utime(path, (1, 1))
    assert not is_as_then(values)


def test_a_log_is_no_input(tmp_path):
    loaded(tmp_path, "with open('log', 'a') as log: log.write('begun')")
    assert not read()


# -- later ---------------------------------------------------------------------------


def test_what_the_function_reads_that_makes_the_job_is_noted_and_only_then(tmp_path):
    (tmp_path / "config").write_text("1")
    (tmp_path / "beside_it.py").write_text("def made(): return open('config').close()")
    late = """
    import os
    def late():
        import beside_it
        beside_it.made()
        return os.environ.get('CONFIG')
    """
    loaded(tmp_path, late)
    assert not read()
    loaded(tmp_path, textwrap.dedent(late), "late()")
    assert {"environment CONFIG", f"file {tmp_path / 'config'}"} <= read()


def test_examining_tells_what_data_model_and_loss_have_read(tmp_path):
    (tmp_path / "config").write_text("1")
    (tmp_path / "aside.py").write_text("WIDE = 1")
    job = loaded(tmp_path, "import os")

    def data(start):
        import aside  # pyright: ignore

        while True:
            with open("config") as config:
                yield torch.ones(2, 3) * int(config.read()) * aside.WIDE

    def model():
        assert os.environ.get("CONFIG")
        return torch.nn.Linear(3, 1)

    assert not examine(replace(job, data=data, model=model)).failed
    names = {f"file {tmp_path / 'config'}", f"file {tmp_path / 'aside.py'}", "environment CONFIG"}
    assert names <= read()


def counts_in_json(path):
    count = json.loads(path.read_text())
    path.write_text(json.dumps(count + 1))
    return count


def fades(path):
    rows = np.memmap(path, np.uint8, "r+")
    rows[0] = rows[0] % 199 + 1
    return int(rows[0])


def grows(path):
    with path.open("a") as log:
        log.write("1")
    return len(path.read_text())


def counts_in_a_base(path):
    base = sqlite3.connect(path)
    base.execute("update rows set k = k + 1")
    base.commit()
    (count,) = base.execute("select k from rows").fetchone()
    base.close()
    return count


def job_that_reads(tmp_path, look):
    def data(start):
        while True:
            yield torch.ones(2, 3) * look(tmp_path / "config")

    return replace(loaded(tmp_path, "A = 1"), data=data)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("look", [counts_in_json, fades, grows, counts_in_a_base])
@pytest.mark.sampled(2)
def test_a_file_that_the_job_reads_and_changes_is_refused_with_the_line(look, tmp_path):
    (as_base if look is counts_in_a_base else as_json)(tmp_path / "config", 3)
    job = job_that_reads(tmp_path, look)
    with pytest.raises(JobError, match=r"test_surroundings.py:\d+ writes into .*config, which"):
        examine(job)
    assert not examine(job, check=False).failed


def counts_files(path):
    count = len(list(path.parent.iterdir()))
    (path.parent / f"{count}.row").touch()
    return 1.0 + count


def makes_what_is_not_there(path):
    folder = path.parent / "cache"
    folder.mkdir(exist_ok=True)
    if not list(folder.iterdir()):
        for number in range(3):
            (folder / f"{number}.row").touch()
    return float(len(list(folder.iterdir())))


def test_a_folder_that_the_job_lists_and_adds_to_is_refused_with_the_line(tmp_path):
    job = job_that_reads(tmp_path, counts_files)
    with pytest.raises(JobError, match=r"test_surroundings.py:\d+ adds to .*, which it reads"):
        examine(job)
    assert not examine(job, check=False).failed
    assert not examine(job_that_reads(tmp_path, makes_what_is_not_there)).failed


def test_files_that_a_loss_leaves_and_counts_are_refused(tmp_path):
    """The loss is examined in a fork of the process that examines."""
    (tmp_path / "rows").mkdir()

    def loss(model, batch):
        return model(batch).square().mean() * counts_files(tmp_path / "rows" / "0.row")

    with pytest.raises(JobError, match="adds to"):
        examine(replace(loaded(tmp_path, "A = 1"), loss=loss))


def test_a_file_that_was_made_while_the_job_was_loaded_is_there_like_any_other(tmp_path):
    made = "from pathlib import Path; Path('config').write_text('3')"
    data = job_that_reads(tmp_path, fades).data
    job = replace(loaded(tmp_path, made), data=data)
    with pytest.raises(JobError, match="writes into"):
        examine(job)


def only_logs(path):
    with path.open("a") as log:
        log.write("1")
    return 1.0


def only_maps(path):
    return float(np.memmap(path, np.uint8, "r+")[0])


def makes_when_missing(path):
    cache = path.with_suffix(".npy")
    if not cache.exists():
        np.save(cache, np.ones(3))
    return float(np.load(cache, mmap_mode="r+")[0])


def begins_anew(path):
    path.write_text(f"7{path.stat().st_mtime_ns}")
    return float(path.read_text()[0])


@pytest.mark.parametrize("look", [only_logs, only_maps, makes_when_missing, begins_anew])
def test_a_file_that_is_only_written_or_made_by_the_job_itself_is_none_of_it(look, tmp_path):
    as_json(tmp_path / "config", 3)
    assert not examine(job_that_reads(tmp_path, look)).failed


def test_functions_of_python_are_themselves_again_afterwards(tmp_path):
    before = open, os.open, os.stat, os.listdir, os.scandir

    def look(beat):
        with noting():
            assert os.stat in os.supports_follow_symlinks
            assert open(__file__).close() is None
        return (open, os.open, os.stat, os.listdir, os.scandir) == before

    assert in_a_fork(look, 30)
    with pytest.raises(ZeroDivisionError), noting():
        raise ZeroDivisionError
    assert (open, os.open, os.stat, os.listdir, os.scandir) == before


# -- what was kept --------------------------------------------------------------------------------


def test_each_configuration_finds_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for value in ("off", "on"):
        monkeypatch.setenv("CONFIG", value)
        NOTES.values.clear()
        job = loaded(tmp_path, READS["get"])
        key = key_of(job, "script.py")
        assert kept(Note, key, "examined") is None
        keep(key, "examined", {"problem": value})
    for value in ("off", "on", "off"):
        monkeypatch.setenv("CONFIG", value)
        assert kept(Note, key, "examined") == Note(value)
    monkeypatch.setenv("CONFIG", "else")
    assert kept(Note, key, "examined") is None


def test_ranks_that_are_started_otherwise_have_another_key(tmp_path, monkeypatch):
    job = loaded(tmp_path, "A = 1")
    keys = {key_of(job, "a")}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    for world in "2", "4":
        monkeypatch.setenv("WORLD_SIZE", world)
        keys.add(key_of(job, "a"))
    assert len(keys) == 3


def test_another_version_of_what_is_imported_has_another_key(tmp_path, monkeypatch):
    job = loaded(tmp_path, "import os, safetensors as st\nfrom tqdm.auto import tqdm")
    key = key_of(job, "a")
    assert key == key_of(job, "a")
    for name in ("safetensors", "tqdm"):
        module = __import__(name)
        with monkeypatch.context() as patched:
            patched.setattr(module, "__version__", "0")
            assert key_of(job, "a") != key
