"""pytorch/examples, mnist/main.py."""

import torch
from drawn import pictures
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import penstock as ps


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def correct(model, batch):
    data, target = batch
    pred = model(data).argmax(dim=1, keepdim=True)
    return pred.eq(target.view_as(pred)).sum(), len(data)


train_loader = DataLoader(
    pictures(70), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1)
)
test_loader = DataLoader(pictures(30), batch_size=20)


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """Epochs of 70 samples in batches of 16, the last one short; a rate that falls each epoch."""
    return ps.Job(
        model=Net,
        loss=lambda model, batch: F.nll_loss(model(batch[0]), batch[1]),
        data=ps.from_loader(train_loader, last="short"),
        optimizer=lambda params: optim.Adadelta(params, lr=1.0),
        scheduler=lambda optimizer: StepLR(optimizer, step_size=len(train_loader), gamma=0.7),
        validation=lambda: test_loader,
        metrics=lambda model, batch: {"accuracy": correct(model, batch)},
        seed=1,
    )
