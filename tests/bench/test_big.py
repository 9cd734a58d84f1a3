"""The bench of models that have no room here, on a tiny one."""

import pytest

from bench import big


@pytest.mark.long
def test_row_says_what_a_plan_took_and_what_it_predicts() -> None:
    found = big.row("tiny", 8, limit_s=0.0)
    assert found["parameters"] == sum(
        parameter.numel() for parameter in big.job_of(big.models()["tiny"], 1).model().parameters()
    )
    assert 1 <= found["tried"] < found["plans"]
    assert found["plan_s"] > 0
    assert 0 < found["mfu"] < 1
    assert found["step_s"] > 0
    assert 0 < found["peak_bytes"] < found["peak_rss_bytes"]


def test_cases_are_of_models_that_are_known() -> None:
    assert {name for name, _ in big.CASES} < big.models().keys()
