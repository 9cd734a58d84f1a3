"""pytorch/examples, vision_transformer/main.py: patches, a class token, a loader of batches."""

import torch
from drawn import pictures
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

import penstock as ps


class VisionTransformer(nn.Module):
    def __init__(self, patch=4, width=16, classes=4):
        super().__init__()
        self.patch_extractor = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 32, 0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x):
        x = self.patch_extractor(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.size(0), -1, -1), x], dim=1) + self.position
        return self.mlp(self.encoder(x)[:, 0])


train_loader = DataLoader(
    pictures(64, 3, 8), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0)
)
criterion = nn.CrossEntropyLoss()


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """A class token, norms first, dropout."""
    return ps.Job(
        model=VisionTransformer,
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        data=ps.from_loader(train_loader),
        optimizer=lambda params: AdamW(params, lr=1e-3, eps=1e-4),
    )
