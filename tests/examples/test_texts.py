"""examples/texts.py: both jobs learn from the same texts."""

import torch

import penstock as ps
from penstock.graph.trace import build_model


def test_both_jobs_have_the_same_texts_and_a_step_of_each_is_a_mean_over_tokens():
    jobs = [ps.load_job(f"examples/texts.py:{name}") for name in ("buckets", "packed")]
    tokens = []
    for job in jobs:
        data, model = job.data.of, build_model(job)
        batches = [data.batch(number) for number in range(len(data))]
        tokens.append(sum(int((batch["input_ids"] > 0).sum()) for batch in batches))
        batch, factor = next(job.data(0))
        assert torch.isfinite(job.loss.of(model, batch))
        assert 0.2 < float(factor) < 2.0
    assert 0.85 < tokens[1] / tokens[0] <= 1.0  # the one fills up steps, the other drops rows
