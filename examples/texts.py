"""Texts of many lengths, in buckets and packed: two jobs of one model.

    penstock train examples/texts.py:buckets --out runs/buckets
    penstock train examples/texts.py:packed --out runs/packed

The texts are sums such as "17+5=22", written out so often that some are long.  A step counts by its
tokens, so both jobs train on means over tokens, whatever stands in a step.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import penstock as ps

WIDTH, LONGEST, VOCABULARY = 64, 128, 16
IGNORED = -100  # a target that counts for nothing


class Texts(nn.Module):
    """Two layers of attention over tokens, under a mask, or causal."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.within = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.after = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.tokens(ids) + self.places(positions)
        for within, after in zip(self.within, self.after, strict=True):
            q, k, v = (part.unsqueeze(1) for part in within(x).chunk(3, -1))
            made = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            x = x + torch.relu(after(made.squeeze(1)))
        return self.head(x)


def documents(how_many: int = 400) -> list[dict[str, Tensor]]:
    """Return texts: tokens, and which follows each."""
    drawn, found = torch.Generator().manual_seed(0), list[dict[str, Tensor]]()
    signs = {sign: number for number, sign in enumerate("0123456789+=;", start=1)}
    for _ in range(how_many):
        count = int(torch.randint(1, 12, (), generator=drawn))
        rows = torch.randint(0, 50, (count, 2), generator=drawn)
        text = ";".join(f"{a}+{b}={a + b}" for a, b in rows.tolist())
        ids = torch.tensor([signs[sign] for sign in f"{text};"])
        found.append({"input_ids": ids[:-1], "targets": ids[1:]})
    return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over tokens; documents of a row are kept apart."""
    ids, apart = batch["input_ids"], batch.get("document_ids")
    places = torch.arange(ids.shape[1]).expand_as(ids)
    mask = None if apart is None else ps.document_mask(apart)
    logits = model(ids, batch.get("position_ids", places), mask)
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)


def tokens(batch: dict[str, Tensor]) -> Tensor:
    """Return what a micro-batch counts by."""
    return (batch["targets"] != IGNORED).sum()


def buckets() -> ps.Job:
    """Return a job whose steps have one of three lengths."""
    data = ps.bucketed(documents(), (32, 64, LONGEST), (16, 8, 4), micro_batches=4, last="pad")
    return ps.Job(
        model=Texts,
        loss=loss,
        data=data,
        weight=tokens,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=3e-3),
        num_steps=60,
    )


def packed() -> ps.Job:
    """Return a job whose micro-batches are rows filled with whole texts."""
    return ps.Job(
        model=Texts,
        loss=loss,
        data=ps.packed(documents(), LONGEST, rows=4),
        weight=tokens,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=3e-3),
        micro_batches=4,
        num_steps=60,
    )
