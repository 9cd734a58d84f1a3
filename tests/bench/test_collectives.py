"""bench.collectives: the fit finds the link that made the figures, and rows say what was fitted."""

import json
import subprocess
import sys

import pytest

from bench.collectives import ALGORITHMS, FITTED, SIZES, formula_s, rows_of, show
from penstock.cluster import Link

LINKS = {"shared_memory": Link(15e-6, 4e9), "gloo": Link(150e-6, 1e9)}
RANKS, CORES = (2, 3, 4, 8), 2
FIGURES = {
    (name, n, size_bytes): formula_s(ALGORITHMS[name], n, size_bytes, link, CORES)
    for name, link in LINKS.items()
    for n in RANKS
    for size_bytes in SIZES
}


def test_fit_finds_the_link_that_made_the_figures():
    rows, links = rows_of(FIGURES, RANKS, CORES)
    for name, link in LINKS.items():
        assert links[name].latency_s == pytest.approx(link.latency_s, rel=1e-4)
        assert links[name].bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-4)
    assert max(abs(row["error"]) for row in rows) < 0.1


def test_rows_say_what_was_fitted_and_are_json(capsys):
    rows, links = rows_of({key: 1.1 * s for key, s in FIGURES.items()}, RANKS, CORES)
    assert json.loads(json.dumps(rows)) == rows
    fitted = {(row["ranks"], row["size_bytes"]) for row in rows if row["fitted"]}
    assert fitted == {(n, size_bytes) for n in (2, 4) for size_bytes in FITTED}
    show(rows, links, CORES)
    assert capsys.readouterr().out.count("*") == 8


def test_ranks_without_a_core_of_their_own_take_turns():
    times = [formula_s("ring", 4, 2**20, LINKS["gloo"], cores) for cores in (1, 2, 4, 8)]
    assert times[0] == 2 * times[1] == 4 * times[2] == 4 * times[3]


@pytest.mark.long
def test_one_rank_is_refused():
    command = [sys.executable, "-m", "bench.collectives", "--ranks", "1", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--ranks 1" in done.stderr
