"""The job's code finds in a forked process what it would find in a plain run."""

import fcntl
import gzip
import json
import multiprocessing
import os
import random
import sqlite3
import tarfile
import tempfile
import threading
import zipfile
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.processes.child import in_a_fork
from penstock.processes.inherited import own_positions
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.worker import RankResult

TEXT = "".join(f"line {k}\n" for k in range(2000))


# -- names ----------------------------------------------------------------------------------------


def names():
    workers = multiprocessing.get_context("fork").Process(target=int)
    return [
        multiprocessing.current_process().name,
        multiprocessing.parent_process() is None,
        multiprocessing.current_process().daemon,
        threading.current_thread().name,
        workers.name,
    ]


PLAIN = ["MainProcess", True, False, "MainThread", "ForkProcess-1"]


def test_a_check_has_the_names_of_a_plain_run():
    assert in_a_fork(lambda beat: names(), 30) == PLAIN


@pytest.mark.parametrize("launcher", [run_processes, run_threads])
def test_ranks_have_the_names_of_a_plain_run(launcher, tmp_path):
    def live(transport, report):
        (tmp_path / str(transport.rank)).write_text(json.dumps(names()))
        return RankResult(transport.rank, (), (), 0, (0.0,), 0.0, {})

    launcher(live, 2, lambda step: None)
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [each[0] for each in found] == ["MainProcess"] * 2
    assert [each[3] for each in found] == ["MainThread"] * 2
    if launcher is run_processes:
        assert found == [PLAIN] * 2


def test_pythons_generator_goes_on_in_a_check_from_where_it_was():
    random.seed(5)
    expected = random.Random(5).random()
    assert in_a_fork(lambda beat: random.random(), 30) == expected


# -- positions ------------------------------------------------------------------------------------


@contextmanager
def lines(folder: Path):
    (folder / "text").write_text(TEXT)
    with (folder / "text").open() as file:
        yield file


def raw(folder: Path):
    (folder / "text").write_text(TEXT)
    return (folder / "text").open("rb", buffering=0)


def compressed(folder: Path):
    with gzip.open(folder / "text.gz", "wt") as file:
        file.write(TEXT)
    return gzip.open(folder / "text.gz", "rt")


@contextmanager
def member_of_zip(folder: Path):
    with zipfile.ZipFile(folder / "text.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text", TEXT)
    with zipfile.ZipFile(folder / "text.zip") as archive, archive.open("text") as file:
        yield file


@contextmanager
def member_of_tar(folder: Path):
    (folder / "text").write_text(TEXT)
    with tarfile.open(folder / "text.tar", "w") as archive:
        archive.add(folder / "text", "text")
    with tarfile.open(folder / "text.tar") as archive:
        yield archive.extractfile("text")


@contextmanager
def without_a_name(folder: Path):
    with tempfile.TemporaryFile("w+", dir=folder) as file:
        file.write(TEXT)
        file.flush()
        file.seek(0)
        yield file


OPENED = {
    "text": lines,
    "raw": raw,
    "gzip": compressed,
    "zip": member_of_zip,
    "tar": member_of_tar,
    "temporary": without_a_name,
}


@pytest.mark.parametrize("kind", OPENED)
def test_what_one_process_reads_of_a_file_the_others_read_too(kind, tmp_path):
    with OPENED[kind](tmp_path) as file:
        start = file.read(40)
        rest = in_a_fork(lambda beat: str(file.read()), 30)
        again = in_a_fork(lambda beat: str(file.read()), 30)
        assert rest == again == str(file.read())
        assert len(start) == 40


@pytest.fixture
def file(tmp_path):
    with raw(tmp_path) as opened:
        yield opened


def test_ranks_seek_and_read_apart(file, tmp_path):
    turns = [multiprocessing.get_context("fork").Semaphore(int(rank == 0)) for rank in range(2)]

    def work(transport, report):
        own, other = turns[transport.rank], turns[1 - transport.rank]
        own.acquire()
        file.seek(100 * transport.rank)
        other.release()
        own.acquire()
        (tmp_path / str(transport.rank)).write_bytes(file.read(9))
        other.release()
        return RankResult(transport.rank, (), (), 0, (0.0,), 0.0, {})

    run_processes(work, 2, lambda step: None)
    found = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert found == [TEXT[:9], TEXT[100:109]]


def test_processes_that_a_rank_starts_to_read_ahead_have_positions_of_their_own(file):

    def read_ahead(beat):
        pid = os.fork()
        if not pid:
            file.read(500)
            os._exit(0)
        os.waitpid(pid, 0)
        return file.tell()

    assert in_a_fork(read_ahead, 30) == 0


def test_a_database_is_read_by_all(tmp_path):
    with closing(sqlite3.connect(tmp_path / "data.db")) as base:
        base.execute("create table rows (k integer)")
        base.executemany("insert into rows values (?)", [(k,) for k in range(5000)])
        base.commit()
        query = "select sum(k) from rows"
        assert in_a_fork(lambda beat: base.execute(query).fetchone(), 30) == [12497500]
        assert base.execute(query).fetchone() == (12497500,)


def test_number_and_flags_of_a_descriptor_stay(file):
    os.set_inheritable(file.fileno(), True)
    before = os.fstat(file.fileno())

    def look(beat):
        after = os.fstat(file.fileno())
        return [os.path.samestat(before, after), os.get_inheritable(file.fileno())]

    assert in_a_fork(look, 30) == [True, True]


def test_what_is_written_stands_one_after_the_other(tmp_path):
    with (tmp_path / "log").open("w") as log:

        def tell(beat):
            log.write("from a fork\n")
            log.flush()

        in_a_fork(tell, 30)
        in_a_fork(tell, 30)
    assert (tmp_path / "log").read_text() == "from a fork\n" * 2


def test_pipes_and_locked_files_are_left_alone(file, tmp_path):
    out, into = os.pipe()
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(7)
    os.write(into, b"word")
    own_positions()
    assert os.read(out, 4) == b"word"
    with (tmp_path / "text").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert file.tell() == 7
    os.close(out)
    os.close(into)
