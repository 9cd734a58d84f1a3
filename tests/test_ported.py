"""A job of what people have for transformers' Trainer: the same steps, options taken or refused."""

from itertools import islice

import pytest
import torch

import penstock as ps
from penstock.errors import JobError
from penstock.plan import plan_by_hand
from penstock.runtime.launch import run_threads
from penstock.runtime.validate import validated
from tests.parity.training import Run, difference, train

transformers = pytest.importorskip("transformers")
WORDS, TOKENS = 32, 8


def llama():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def samples(count=16):
    drawn = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        words = torch.randint(WORDS, (TOKENS,), generator=drawn).tolist()
        labels = [word if at < 2 + number % 6 else -100 for at, word in enumerate(words)]
        rows.append({"input_ids": words, "labels": labels, "comment": number})
    return rows


OPTIONS = {
    "output_dir": "x", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    "max_steps": 4, "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "seed": 5,
    "logging_steps": 1, "save_strategy": "no", "optim": "adamw_torch",
}  # fmt: skip


def trainers_loop(job, num_steps):
    """Return the weights as Trainer's own loop makes them, its loss given the labels of a step."""
    model, data = llama(), job.data.of(0)
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = transformers.get_scheduler("linear", optimizer, 2, num_steps)
    for _ in range(num_steps):
        batches = list(islice(data, 4))
        count = sum(batch["labels"][..., 1:].ne(-100).sum() for batch in batches)
        for batch in batches:
            model(**batch, num_items_in_batch=count).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {f"weights/{name}": p.detach() for name, p in model.named_parameters()}


def test_a_ported_job_by_stages_and_replicas_is_trainers_own_loop(tmp_path):
    job = ps.from_transformers(llama(), samples(32), OPTIONS)
    graph = ps.trace(job)
    plan = plan_by_hand(graph, [0], "gpipe", num_micro_batches=2, replicas=2, clip=True)
    found = train(Run(plan, job, graph.capture), tmp_path, (4,)).weights
    assert difference(found, trainers_loop(job, 4)) < 1e-4


def test_samples_lose_what_forward_does_not_take_and_validations_keep_their_last_batch():
    options = {**OPTIONS, "eval_strategy": "epoch", "per_device_eval_batch_size": 3}
    job = ps.from_transformers(llama(), samples(), options, validation=samples(4))
    assert set(next(job.data(0)).batch) == {"input_ids", "labels"}
    assert job.validate_every == 2
    assert [len(batch["labels"]) for batch in job.validation()] == [3, 1]
    assert validated(job, llama())["val_loss"] > 0
    assert (job.num_steps, job.micro_batches, job.clip_norm, job.seed) == (4, 4, 1.0, 5)
    epochs = ps.from_transformers(llama(), samples(), {**OPTIONS, "max_steps": -1})
    assert epochs.num_steps == 6


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({"lerning_rate": 1}, "has no lerning_rate", "did you mean learning_rate"),
        ({"fp16": True}, "fp16 is True, which has no counterpart", "bf16"),
        ({"deepspeed": "ds.json"}, "deepspeed is 'ds.json'", "a plan divides"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is 5.0", "make the job by hand"),
        ({"optim": "lomo"}, "optim is 'lomo', which is not taken over", "adamw_torch_fused"),
        ({"eval_strategy": "steps"}, "nothing to validate", "validation="),
        ({"per_device_train_batch_size": 3}, "has 1 samples, the others 3", "drop_last"),
        ({"gradient_accumulation_steps": 3}, "has 2 micro-batches, the others 3", "leave out 4"),
    ],
)
def test_options_without_a_counterpart_are_refused_by_name(options, words, hint):
    with pytest.raises(JobError, match=words) as caught:
        ps.from_transformers(llama(), samples(), {**OPTIONS, **options})
    assert hint in caught.value.hint


def test_what_is_no_arguments_is_refused():
    with pytest.raises(JobError, match="the arguments are a int"):
        ps.from_transformers(llama(), samples(), 3)


def test_a_missing_package_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(JobError, match="needs transformers, which is not installed"):
        ps.from_transformers(torch.nn.Linear(1, 1), samples())


@pytest.mark.filterwarnings("default")  # what peft says of itself
def test_a_model_with_adapters_by_peft_trains_them_alone(tmp_path):
    peft = pytest.importorskip("peft")

    def model():
        targets = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        return peft.get_peft_model(llama(), peft.LoraConfig(r=2, lora_dropout=0.0, **targets))

    rows = torch.tensor([row["input_ids"] for row in samples()])
    job = ps.Job(
        model=model,
        loss=lambda model, words: model(input_ids=words, labels=words).loss,
        data=ps.batches([{"words": row} for row in rows], 4, collate=_words),
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        micro_batches=2,
    )
    graph = ps.trace(job)
    program = ps.lower(plan_by_hand(graph, [0, 1], "gpipe", num_micro_batches=2), graph)
    ours = ps.run(program, job, num_steps=3, launcher=run_threads).weights
    theirs, before = plain_weights(job, 3), dict(model().named_parameters())
    adapters = {name for name, weight in before.items() if weight.requires_grad}
    assert len(adapters) == 8
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[f"weights/{name}"], weight, rtol=1e-4, atol=1e-6)
        assert torch.equal(weight, before[name]) == (name not in adapters)


def _words(rows):
    return torch.stack([row["words"] for row in rows])


def plain_weights(job, num_steps):
    """Return the weights of the plain loop."""
    torch.manual_seed(job.seed)
    model, data = job.model(), job.data(0)
    optimizer = job.optimizer(model.parameters())
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(job.micro_batches):
            (job.loss(model, next(data)) / job.micro_batches).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}
