"""pytorch/examples, super_resolution/main.py: sub-pixel convolutions."""

import torch
from drawn import Drawn
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import penstock as ps


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, 1, 2), nn.Conv2d(8, 8, 3, 1, 1)
        self.conv3 = nn.Conv2d(8, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for layer in (self.conv1, self.conv2, self.conv3):
            nn.init.orthogonal_(layer.weight)

    def forward(self, x):
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.pixel_shuffle(self.conv3(x))


def pair(source):
    target = torch.randn(1, 12, 12, generator=source).cumsum(1).cumsum(2) / 12
    return F.avg_pool2d(target, 2), target


training_data_loader = DataLoader(
    Drawn(pair, 64), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(123)
)
criterion = nn.MSELoss()


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """PixelShuffle; a mean over samples of one size."""
    return ps.Job(
        model=lambda: Net(2),
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        data=ps.from_loader(training_data_loader),
        optimizer=lambda params: optim.Adam(params, lr=1e-3, eps=1e-4),
        seed=123,
    )
