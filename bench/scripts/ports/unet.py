"""milesial/Pytorch-UNet, train.py: cross entropy and dice, RMSprop, ReduceLROnPlateau."""

import torch
from drawn import Drawn
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import penstock as ps


class DoubleConv(nn.Sequential):
    def __init__(self, inside, outside):
        layers = []
        for a in (inside, outside):
            layers += [
                nn.Conv2d(a, outside, 3, padding=1, bias=False),
                nn.BatchNorm2d(outside),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc, self.down1 = (
            DoubleConv(1, 4),
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8)),
        )
        self.up, self.conv = nn.ConvTranspose2d(8, 4, 2, 2), DoubleConv(8, 4)
        self.outc = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.up(self.down1(x1))
        return self.outc(self.conv(torch.cat([x1, x2], dim=1)))


def dice_loss(input, target, epsilon=1e-6):
    inter = 2 * (input * target).sum(dim=(-1, -2))
    sets_sum = input.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    return 1 - ((inter + epsilon) / (sets_sum + epsilon)).mean()


def masked(source):
    image = torch.randn(1, 8, 8, generator=source)
    return {"image": image, "mask": (F.avg_pool2d(image, 3, 1, 1)[0] > 0).long()}


train_loader = DataLoader(
    Drawn(masked, 64), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0)
)
criterion = nn.CrossEntropyLoss()


# -- the port --------------------------------------------------------------------------------------


def loss(model, batch):
    masks_pred, true_masks = model(batch["image"]), batch["mask"]
    soft = F.softmax(masks_pred, dim=1).float()
    truth = F.one_hot(true_masks, 2).permute(0, 3, 1, 2).float()
    return criterion(masks_pred, true_masks) + dice_loss(soft, truth)


def job() -> ps.Job:
    """A scheduler that waits for the score of a validation."""
    return ps.Job(
        model=UNet,
        loss=loss,
        data=ps.from_loader(train_loader),
        optimizer=lambda params: optim.RMSprop(params, 1e-4, weight_decay=1e-8, momentum=0.9),
        scheduler=lambda made: optim.lr_scheduler.ReduceLROnPlateau(made, "max", patience=5),
        clip_norm=1.0,
    )
