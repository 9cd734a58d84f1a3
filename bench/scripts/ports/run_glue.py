"""huggingface/transformers, text-classification/run_glue_no_trainer.py: a loop with Accelerate."""

import torch
from drawn import Drawn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

import penstock as ps

max_train_steps, num_warmup_steps = 20, 2


def sentence(source):
    count = int(torch.randint(3, 11, (), generator=source))
    ids = torch.randint(1, 20, (10,), generator=source)
    mask = (torch.arange(10) < count).long()
    label = int(ids[0] > 9)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor(label)}


sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32}
config = BertConfig(num_hidden_layers=2, num_attention_heads=2, num_labels=2, **sizes)
train_dataloader = DataLoader(
    Drawn(sentence, 64), shuffle=True, batch_size=8, generator=torch.Generator().manual_seed(0)
)


# -- the port --------------------------------------------------------------------------------------


def optimizer(params):
    no_decay = ["bias", "LayerNorm.weight"]
    named, left = params.named(), lambda name: any(each in name for each in no_decay)
    groups = [
        {"params": [p for n, p in named if not left(n)], "weight_decay": 0.1},
        {"params": [p for n, p in named if left(n)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=5e-3, eps=1e-4)


def job() -> ps.Job:
    """Rows padded to one length, two steps accumulated, a linear schedule."""
    return ps.Job(
        model=lambda: BertForSequenceClassification(config),
        loss=lambda model, batch: model(**batch).loss,
        data=ps.from_loader(train_dataloader),
        optimizer=optimizer,
        scheduler=lambda made: get_scheduler("linear", made, num_warmup_steps, max_train_steps),
        micro_batches=2,
    )
