"""pytorch/examples, siamese_network/main.py: pairs of pictures, alike or not."""

import random

import torch
from drawn import pictures
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

import penstock as ps


class APP_MATCHER(Dataset):  # noqa: N801 - the script's own name
    def __init__(self):
        self.dataset = pictures(64)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        first, label = self.dataset[index]
        while True:
            second, other = self.dataset[random.randrange(len(self.dataset))]
            if (label == other) == (index % 2 == 0):
                return first, second, torch.tensor(float(label == other))


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(288, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
        self.sigmoid = nn.Sigmoid()

    def forward(self, input1, input2):
        output = torch.cat((self.conv(input1), self.conv(input2)), 1)
        return self.sigmoid(self.fc(output))


criterion = nn.BCELoss()


# -- the port --------------------------------------------------------------------------------------


def loss(model, batch):
    images_1, images_2, targets = batch
    return criterion(model(images_1, images_2).squeeze(), targets)


def job() -> ps.Job:
    """One net twice, whose batch norm sees both pictures; partners drawn by Python's random."""
    return ps.Job(
        model=SiameseNetwork,
        loss=loss,
        data=ps.batches(APP_MATCHER(), batch_size=16),
        optimizer=lambda params: optim.Adadelta(params, lr=1.0),
        scheduler=lambda optimizer: StepLR(optimizer, step_size=4, gamma=0.7),
    )
