"""karpathy/minGPT, projects/adder: a Trainer around a loader that samples with replacement."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

import penstock as ps


class AdditionDataset(Dataset):
    ndigit = 1

    def __len__(self):
        return 100

    def __getitem__(self, idx):
        a, b = divmod(int(idx), 10)
        render = f"{a}{b}" + f"{a + b:02d}"[::-1]
        dix = torch.tensor([int(s) for s in render])
        x, y = dix[:-1], dix[1:].clone()
        y[: self.ndigit * 2 - 1] = -1
        return x, y


class GPT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tok_emb, self.pos_emb = (
            nn.Embedding(10, width),
            nn.Parameter(torch.zeros(1, 3, width)),
        )
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.1, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))

    def forward(self, idx, targets):
        x = self.blocks(self.tok_emb(idx) + self.pos_emb, mask=self.mask)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 10), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3, betas=(0.9, 0.95), eps=1e-4)


def train_loader():
    data = AdditionDataset()
    source = torch.Generator().manual_seed(3407)
    sampler = RandomSampler(data, replacement=True, num_samples=1000, generator=source)
    return DataLoader(data, sampler=sampler, shuffle=False, batch_size=8)


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """Samples drawn with replacement; losses over the last digits only."""
    return ps.Job(
        model=GPT,
        loss=lambda model, batch: model(*batch),
        data=ps.from_loader(train_loader()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3, betas=(0.9, 0.95), eps=1e-4),
        clip_norm=1.0,
    )
