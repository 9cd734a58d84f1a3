"""The byte-level GPT: a plain module, data by index, text split by file, honest facts."""

import ast
import inspect
import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import gpt
from penstock.job import load_job
from tests.draws import examples

FILE = Path(__file__).parents[2] / "examples" / "gpt.py"


def test_file_gives_its_job_without_a_name() -> None:
    assert load_job(str(FILE)).num_steps == gpt.STEPS


def test_model_has_3_to_10_million_parameters() -> None:
    with torch.device("meta"):
        size = sum(weight.numel() for weight in gpt.GPT().parameters())
    assert 3_000_000 <= size <= 10_000_000


def test_module_says_no_word_of_penstock() -> None:
    for part in (gpt.Block, gpt.GPT):
        names = {
            node.id
            for node in ast.walk(ast.parse(inspect.getsource(part)))
            if isinstance(node, ast.Name)
        }
        assert "ps" not in names
        assert "penstock" not in inspect.getsource(part).lower()


def test_untrained_model_knows_nothing() -> None:
    torch.manual_seed(0)
    loss = gpt.loss(gpt.GPT(), next(gpt.data(0)))
    assert loss.item() == pytest.approx(math.log(gpt.VOCABULARY), abs=0.2)


def test_prediction_does_not_see_later_bytes() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(width=32, heads=2, blocks=2)
    bytes_BT = next(gpt.data(0))["bytes"]
    later = bytes_BT.clone()
    later[:, 20:] = 0
    assert torch.allclose(model(bytes_BT)[:, :20], model(later)[:, :20], atol=1e-6)
    assert not torch.allclose(model(bytes_BT)[:, 20:], model(later)[:, 20:], atol=1e-6)


def test_small_model_learns_more_than_byte_counts() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(width=64, heads=2, blocks=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in islice(gpt.data(0), 150):
        optimizer.zero_grad()
        gpt.loss(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [gpt.loss(model, batch).item() for batch in islice(gpt.validation(), 32)]
    assert sum(losses) / len(losses) < gpt.facts()["unigram_entropy_nats"]


@examples(8)
@given(st.integers(0, 10**9), st.integers(0, 5))
def test_micro_batch_depends_on_its_index_alone(start: int, more: int) -> None:
    there = list(islice(gpt.data(start), more + 1))[more]
    here = next(gpt.data(start + more))
    assert all(there[key].equal(here[key]) for key in there)


def test_neighbouring_micro_batches_differ() -> None:
    first, second = islice(gpt.data(7), 2)
    assert not first["bytes"].equal(second["bytes"])


def test_target_is_the_next_byte() -> None:
    batch = next(gpt.data(5))
    assert batch["bytes"].shape == (gpt.WINDOWS_PER_MICRO_BATCH, gpt.WINDOW)
    assert batch["next_bytes"][:, :-1].equal(batch["bytes"][:, 1:])


def test_validation_is_always_the_same_and_of_the_shape_of_training() -> None:
    first, again = list(gpt.validation()), list(gpt.validation())
    assert len(first) == len(again) == gpt.VALIDATION_MICRO_BATCHES
    assert all(a["bytes"].equal(b["bytes"]) for a, b in zip(first, again, strict=True))
    assert {batch["bytes"].shape for batch in first} == {next(gpt.data(0))["bytes"].shape}


def test_text_is_split_by_file_one_in_ten(tmp_path: Path, monkeypatch) -> None:
    for number in range(25):
        (tmp_path / f"m{number:02}.py").write_text(f"{number:02}")
    for folder in ("site-packages", "test", "deep/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "left_out.py").write_text("xx")
    monkeypatch.setattr(gpt.sysconfig, "get_path", lambda name: str(tmp_path))
    train, validation = gpt.text.__wrapped__()
    assert bytes(validation.tolist()) == b"001020"
    assert len(train) == 2 * 22


def test_entropy_is_that_of_the_byte_counts_of_the_validation_text(monkeypatch) -> None:
    text = (torch.zeros(1, dtype=torch.uint8), torch.tensor([1, 1, 2, 3], dtype=torch.uint8))
    monkeypatch.setattr(gpt, "text", lambda: text)
    facts = gpt.facts()
    assert facts["unigram_entropy_bits"] == pytest.approx(1.5)
    assert facts["unigram_entropy_nats"] == pytest.approx(1.5 * math.log(2))


def test_rate_rises_to_the_peak_then_falls_to_a_tenth() -> None:
    rates = [gpt.learning_rate(step) for step in range(gpt.STEPS + 1)]
    peak = gpt.WARM_UP_STEPS - 1
    assert rates[peak] == max(rates) == 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert gpt.learning_rate(gpt.STEPS + gpt.STEPS // 3) == pytest.approx(0.1)
