"""bench.pipeline gives what its docstring says, on a model that takes no time."""

import gc
from itertools import pairwise

import pytest
import torch

from bench import peer as peers
from bench.measure import Turns
from bench.ours import lowered
from bench.pipeline import Case, cases, difference, peak_of, rows_of, show, show_head, storages
from penstock.graph.trace import capture
from penstock.schedule import one_f_one_b
from tests.bench.test_models import MINI

TURNS = Turns(wanted=1, limit=1, block_s=0.0)
ASKED = {
    "model", "schedule", "micro_batches", "ours_s", "peer_s", "ratio", "bound_s", "over_bound",
    "ours_peak_bytes", "peer_peak_bytes", "ours_us_per_action", "peer_us_per_action",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "dual_pipe_v"])
def test_case_has_a_row_for_each_schedule_of_the_peer(schedule, capsys):
    (case,) = cases([MINI], [schedule], [4])
    rows = rows_of(case, TURNS)
    assert [row["peer"] for row in rows] == [peer.name for peer in peers.PEERS[schedule]]
    for row in rows:
        assert row.keys() >= ASKED
        assert (row["model"], row["schedule"], row["micro_batches"]) == ("mini", schedule, 4)
        assert row["ratio"] == row["ours_s"] / row["peer_s"]
        assert row["over_bound"] == row["ours_s"] / row["bound_s"]
        assert min(row["ours_peak_bytes"], row["peer_peak_bytes"]) > weights_bytes()
        assert row["gradients_difference"] <= 1e-6
    show_head()
    for row in rows:
        show(row)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows)
    assert all(len(a) == len(b) for a, b in pairwise(map(str.rstrip, lines[1:]))) or len(rows) > 1


def weights_bytes() -> int:
    """Return the bytes of the weights of the smaller half of the model."""
    halves = (peers.modules_of(MINI, 2, [stage])[0] for stage in (0, 1))
    return min(sum(p.numel() * p.element_size() for p in half.parameters()) for half in halves)


@pytest.mark.long
def test_different_gradients_stop_the_bench():
    case = Case(MINI, "gpipe", 2, lowered(capture(MINI.job()), MINI, "gpipe", 4))  # 4 of ours
    with pytest.raises(SystemExit, match=r"gradients of .*gpipe.* differ by"):
        rows_of(case, TURNS)


def test_difference_is_that_of_the_worst_parameter(tmp_path):
    one = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([2.0])}
    other = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([2.5])}
    for name, values in (("one", one), ("other", other)):
        torch.save({"a": values["a"]}, tmp_path / f"{name}.0")
        torch.save({"b": values["b"]}, tmp_path / f"{name}.1")
    assert difference(tmp_path, "one", "one") == 0.0
    assert difference(tmp_path, "one", "other") == pytest.approx(0.5 / 2.5)


def test_gradients_of_other_parameters_stop_the_bench(tmp_path):
    for name, key in (("one", "a"), ("other", "b")):
        for rank in (0, 1):
            torch.save({key: torch.ones(1)}, tmp_path / f"{name}.{rank}")
    with pytest.raises(SystemExit, match="gradients of other parameters"):
        difference(tmp_path, "one", "other")


def test_peak_is_what_stays_and_the_most_that_comes_on_top():
    gc.collect()
    stays: list[torch.Tensor] = []
    elsewhere = [torch.zeros(1000)]
    before = storages()

    def step() -> None:
        if not stays:
            stays.append(torch.zeros(256, 1024))
        first = torch.zeros(512, 1024)
        del first
        second = torch.zeros(128, 1024)
        del second

    assert peak_of(step, before) == 4 * 1024 * (256 + 512)
    assert len(elsewhere) == 1


def test_order_of_the_peers_loops_is_ours_and_of_its_lists_is_theirs():
    peer = peers.ONE_F_ONE_B
    assert peers.schedule_of(peer, None, 5) == one_f_one_b(2, 5)
