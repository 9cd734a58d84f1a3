"""huggingface/transformers, language-modeling/run_mlm.py: words masked as batches are put together.

The collator is that of the script, DataCollatorForLanguageModeling, without a tokenizer.
"""

import torch
from drawn import words
from transformers import BertConfig, BertForMaskedLM, set_seed

import penstock as ps

mask_token_id, vocabulary, text = 16, 17, words(640)
train_dataset = [{"input_ids": text[i : i + 10].tolist()} for i in range(0, 640, 10)]


def mask_tokens(samples):
    inputs = torch.tensor([sample["input_ids"] for sample in samples])
    labels = inputs.clone()
    masked_indices = torch.bernoulli(torch.full(labels.shape, 0.3)).bool()
    masked_indices[:, 0] = True
    labels[~masked_indices] = -100
    indices_replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & masked_indices
    inputs[indices_replaced] = mask_token_id
    return {"input_ids": inputs, "labels": labels}


set_seed(0)
sizes = {"vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 32}
config = BertConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
training_args = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "max_steps": 20,
    "adam_epsilon": 1e-4,
    "report_to": "none",
    "use_cpu": True,
}


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """Masks drawn by the collator; labels counted over all micro-batches of a step."""
    model = BertForMaskedLM(config)
    return ps.from_transformers(model, train_dataset, training_args, collate=mask_tokens)
