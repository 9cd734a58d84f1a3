"""Fine-tuning a Llama by LoRA, in the shape of microsoft/LoRA and lit-gpt's finetune/lora.py."""

import math

import torch
from drawn import Drawn
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps


class LoRALinear(nn.Module):
    def __init__(self, linear, r=2, lora_alpha=4, lora_dropout=0.05):
        super().__init__()
        self.linear, self.scaling = linear, lora_alpha / r
        self.lora_dropout = nn.Dropout(lora_dropout)
        self.lora_A = nn.Parameter(torch.empty(r, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        lora = self.lora_dropout(x) @ self.lora_A.T @ self.lora_B.T
        return self.linear(x) + lora * self.scaling


def mark_only_lora_as_trainable(model):
    for name, p in model.named_parameters():
        p.requires_grad = "lora_" in name


def instruction(source):
    ids = torch.randint(0, 16, (10,), generator=source)
    prompt = int(torch.randint(2, 6, (), generator=source))
    labels = ids.clone()
    labels[:prompt] = -100
    return {"input_ids": ids, "labels": labels}


sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
loader = DataLoader(Drawn(instruction, 64), batch_size=4, drop_last=True)


def adapted():
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoRALinear(getattr(layer.self_attn, name)))
    mark_only_lora_as_trainable(model)
    return model


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """Frozen weights, adapters, prompts that are not counted; steps count by labels."""
    return ps.Job(
        model=adapted,
        loss=lambda model, batch: model(**batch).loss,
        data=ps.from_loader(loader),
        optimizer=lambda params: torch.optim.AdamW(
            [p for p in params if p.requires_grad], lr=1e-2, eps=1e-4
        ),
        micro_batches=4,
        weight=lambda batch: (batch["labels"][:, 1:] != -100).sum(),
    )
