"""Rotary embeddings as public repositories write them: tables that forward makes anew.

The longest batch so far is known by its shape, or by `.item()` of its positions.
"""

import torch
from small import sgd
from torch import nn
from torch.nn import functional as F

import penstock as ps

WIDTH, HEADS, VOCAB, LENGTH = 16, 2, 32, 12


def tokens(start):
    while True:
        g = torch.Generator().manual_seed(start)
        x = torch.randint(0, VOCAB, (4, LENGTH), generator=g)
        yield {"input_ids": x, "position_ids": torch.arange(LENGTH).expand(4, -1).clone()}
        start += 1


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Cached(nn.Module):
    """Sines and cosines for so many places."""

    def __init__(self, dim, max_position=8, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._set_cos_sin_cache(max_position, inv_freq.device, torch.get_default_dtype())

    def _set_cos_sin_cache(self, seq_len, device, dtype):
        self.max_seq_len_cached = seq_len
        t = torch.arange(self.max_seq_len_cached, device=device, dtype=self.inv_freq.dtype)
        freqs = torch.outer(t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", emb.sin().to(dtype), persistent=False)

    def forward(self, x, seq_len):
        if seq_len > self.max_seq_len_cached:
            self._set_cos_sin_cache(seq_len, x.device, x.dtype)
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


class Dynamic(nn.Module):
    """Frequencies for the longest batch so far."""

    def __init__(self, dim, max_position=8, base=10000):
        super().__init__()
        self.dim, self.base = dim, base
        inv_freq = self.rope_init(max_position)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.original_inv_freq = self.inv_freq
        self.max_seq_len_cached = self.original_max_seq_len = max_position

    def rope_init(self, seq_len):
        base = self.base * (2 * max(seq_len, 8) / 8 - 1) ** (self.dim / (self.dim - 2))
        return 1.0 / (base ** (torch.arange(0, self.dim, 2).float() / self.dim))

    def _update(self, position_ids):
        seq_len = torch.max(position_ids) + 1
        if seq_len > self.max_seq_len_cached:
            self.register_buffer("inv_freq", self.rope_init(seq_len), persistent=False)
            self.max_seq_len_cached = seq_len
        if (
            seq_len < self.original_max_seq_len
            and self.max_seq_len_cached > self.original_max_seq_len
        ):
            self.register_buffer("inv_freq", self.original_inv_freq, persistent=False)
            self.max_seq_len_cached = self.original_max_seq_len

    @torch.no_grad()
    def forward(self, x, position_ids):
        self._update(position_ids)
        inv = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        freqs = (inv @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


class DynamicByItem(Dynamic):
    def _update(self, position_ids):
        seq_len = (torch.max(position_ids) + 1).item()
        if seq_len > self.max_seq_len_cached:
            self.inv_freq = self.rope_init(seq_len)
            self.max_seq_len_cached = seq_len


class Attention(nn.Module):
    def __init__(self, rotary, how):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rotary, self.how = rotary(WIDTH // HEADS), how

    def forward(self, x, position_ids):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.how == "ids":
            cos, sin = self.rotary(x, position_ids)
            cos, sin = cos[:, None], sin[:, None]
        elif self.how == "length":
            cos, sin = self.rotary(v, n)
            cos, sin = cos[position_ids][:, None], sin[position_ids][:, None]
        else:
            cos, sin = self.rotary(v, position_ids.max().item() + 1)
            cos, sin = cos[position_ids][:, None], sin[position_ids][:, None]
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, n, -1))


class Model(nn.Module):
    def __init__(self, rotary, how):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Attention(rotary, how) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids)
        return self.head(x)


def loss(model, batch):
    logits = model(**batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _job(rotary, how, data=tokens):
    return ps.Job(
        model=lambda: Model(rotary, how), loss=loss, data=data, optimizer=sgd, micro_batches=4
    )


def cached_by_length() -> ps.Job:
    """A table that is too short for the first batch is made anew, in another shape."""
    return _job(Cached, "length")


def cached_by_item() -> ps.Job:
    """The same; the length is that of the greatest position."""
    return _job(Cached, "item")


def dynamic() -> ps.Job:
    """The longest so far is kept as a tensor of the batch before: no plan, one process."""
    return _job(Dynamic, "ids")


def dynamic_item() -> ps.Job:
    """Frequencies follow the longest batch, which the first one is."""
    return _job(DynamicByItem, "ids")


def cached_long_by_item() -> ps.Job:
    """The table is long enough, which forward asks of each batch."""
    return _job(lambda dim: Cached(dim, 64), "item")


def dynamic_long() -> ps.Job:
    """The same of frequencies; what is asked is a truth, not a number."""
    return _job(lambda dim: Dynamic(dim, 64), "ids")


def _growing(start):
    for batch in tokens(start):
        last = 7 + start
        batch["position_ids"] = (
            torch.linspace(0, min(last, 40), LENGTH).long().expand(4, -1).clone()
        )
        yield batch
        start += 1


def dynamic_growing() -> ps.Job:
    """Positions grow, and with them the frequencies: state."""
    return _job(Dynamic, "ids", _growing)


def cached_growing() -> ps.Job:
    """The table grows with the positions."""
    return _job(Cached, "item", _growing)
