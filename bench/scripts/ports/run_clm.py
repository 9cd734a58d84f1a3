"""huggingface/transformers, examples/pytorch/language-modeling/run_clm.py, with its Trainer."""

from drawn import words
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import penstock as ps

block_size = 12


def group_texts(text):
    total_length = (len(text) // block_size) * block_size
    rows = [text[i : i + block_size].tolist() for i in range(0, total_length, block_size)]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


set_seed(0)
sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
model = LlamaForCausalLM(config)
training_args = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "max_steps": 20,
    "adam_epsilon": 1e-4,
    "report_to": "none",
    "use_cpu": True,
}


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """The options of TrainingArguments as they are."""
    return ps.from_transformers(model, group_texts(words(48 * block_size)), training_args)
