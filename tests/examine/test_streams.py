"""A job that reads a pipe which all its processes share is refused by its name."""

import os
import subprocess

import pytest
import torch

import penstock as ps
from penstock.errors import JobError
from penstock.examine.examine import examine
from penstock.examine.surroundings import NOTES, noting
from penstock.job import load_job

JOB = """
import subprocess, sys, torch, penstock as ps
{top}
def data(start):
    {inside}
    for line in {source}:
        yield torch.ones(2, 3) * float(line.strip() or 0)
def job():
    return ps.Job(lambda: torch.nn.Linear(3, 1), lambda m, b: m(b).mean(), data, torch.optim.SGD)
"""
SEQ = "subprocess.Popen(['seq', '1', '9000'], stdout=subprocess.PIPE, text=True)"


def loaded(tmp_path, monkeypatch, source, top="", inside="pass") -> ps.Job:
    monkeypatch.setattr(NOTES, "values", {})
    monkeypatch.setattr(NOTES, "pipes", set())
    path = tmp_path / "script.py"
    path.write_text(JOB.format(source=source, top=top, inside=inside))
    with noting():
        return load_job(str(path))


@pytest.mark.parametrize(
    ("top", "source", "name"),
    [
        (f"WORDS = {SEQ}", "WORDS.stdout", "the pipe WORDS of script.py"),
        (f"HELD = [{SEQ}]", "HELD[0].stdout", "a pipe that was opened before"),
        ("", "sys.stdin", "standard input"),
    ],
)
def test_a_job_that_reads_a_shared_stream_is_refused_and_has_lost_nothing(
    top, source, name, tmp_path, monkeypatch
):
    job = loaded(tmp_path, monkeypatch, source, top)
    with pytest.raises(JobError, match="forked have in common") as caught:
        examine(job)
    assert f"the job reads {name}, " in caught.value.message
    assert "open it inside `data`" in caught.value.hint
    if top:
        assert float(next(iter(job.data(0)))[0, 0]) == 1.0
        module = job.data.__globals__
        started: subprocess.Popen[str] = module.get("WORDS") or module["HELD"][0]
        started.kill()
        with started:
            pass


def test_a_pipe_that_data_opens_itself_is_its_own(tmp_path, monkeypatch):
    inside = f"words = {SEQ.replace(', text=True', '')}.communicate()[0].split()[start:]"
    job = loaded(tmp_path, monkeypatch, "words", inside=inside)
    assert examine(job).failed == ""
    assert isinstance(next(iter(job.data(0))), torch.Tensor)


QUEUE = "import multiprocessing; Q = multiprocessing.get_context('fork').SimpleQueue(); Q.put(1)"
TURNS = "import os, select; TOLD, TELL = os.pipe2(os.O_NONBLOCK); os.write(TELL, b'!!!!')"


def test_a_queue_that_blocks_is_a_stream_too(tmp_path, monkeypatch):
    job = loaded(tmp_path, monkeypatch, "iter(lambda: str(Q.get()), 'x')", QUEUE)
    with pytest.raises(JobError, match="forked have in common"):
        examine(job)
    assert float(next(iter(job.data(0)))[0, 0]) == 1.0
    job.data.__globals__["Q"].close()


@pytest.mark.parametrize(
    ("top", "inside"),
    [
        ("import os; TOLD, TELL = os.pipe()", "pass"),
        (TURNS, "select.select([TOLD], [], [], 0)[0] and os.read(TOLD, 1)"),
        (
            f"import os; {SEQ.replace('subprocess', 'WORDS = subprocess', 1)}",
            "WORDS.stdout.close(); globals().setdefault('HELD', [open(__file__) for _ in '123'])",
        ),
    ],
)
def test_a_pipe_that_is_not_read_or_brings_nothing_is_not_refused(
    top, inside, tmp_path, monkeypatch
):
    job = loaded(tmp_path, monkeypatch, "['1'] * 99", top, inside)
    assert examine(job).failed == ""
    for name in ("TOLD", "TELL"):
        if name in job.data.__globals__:
            os.close(job.data.__globals__[name])
    if "WORDS" in job.data.__globals__:
        job.data.__globals__["WORDS"].communicate()
