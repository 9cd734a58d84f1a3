"""The script on the page of jobs that are ported is a job as it stands."""

import re
from pathlib import Path

import pytest

import penstock as ps
from penstock.job import load_job

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "ported.md"


def test_the_script_of_the_page_makes_a_job_that_is_traced(tmp_path):
    script, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "ported_page.py"
    file.write_text(script)
    job = load_job(str(file))
    assert (job.micro_batches, job.num_steps) == (2, 10)
    assert len(ps.trace(job).gradients) > 10
