"""karpathy/nanoGPT, train.py."""

import itertools
import math

import torch
from drawn import words
from torch import nn
from torch.nn import functional as F

import penstock as ps

batch_size, block_size, gradient_accumulation_steps = 4, 8, 4
learning_rate, min_lr, warmup_iters, lr_decay_iters = 1e-2, 1e-3, 3, 20
weight_decay, beta1, beta2, grad_clip, dropout = 1e-1, 0.9, 0.95, 1.0, 0.1
train_data = words(2000)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.resid_dropout, self.n_head = nn.Dropout(dropout), n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for t in self.c_attn(x).split(C, dim=2)
        )
        drop = dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd, bias=False), nn.LayerNorm(n_embd, bias=False)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, n_layer=2, n_head=2, n_embd=16, vocab_size=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd, bias=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.2 / math.sqrt(2 * n_layer))

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def get_batch(ix):
    x = torch.stack([train_data[i : i + block_size] for i in ix])
    y = torch.stack([train_data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def configure_optimizers(params):
    decay = [p for p in params if p.dim() >= 2]
    nodecay = [p for p in params if p.dim() < 2]
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": nodecay, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=1e-4)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


# -- the port --------------------------------------------------------------------------------------


def batches(start):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        yield get_batch(
            torch.randint(len(train_data) - block_size, (batch_size,), generator=source)
        )


def job() -> ps.Job:
    """Accumulated gradients, a rate by the step, clipping, a tied head, windows drawn at random."""
    return ps.Job(
        model=GPT,
        loss=lambda model, batch: model(*batch),
        data=batches,
        optimizer=configure_optimizers,
        learning_rate=lambda step: get_lr(step) / learning_rate,
        micro_batches=gradient_accumulation_steps,
        clip_norm=grad_clip,
    )
