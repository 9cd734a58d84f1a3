"""pytorch/examples, imagenet/main.py: a ResNet, SGD, top-1 and top-5."""

import torch
from drawn import pictures
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import penstock as ps


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(planes), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2, self.downsample = nn.BatchNorm2d(planes), None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        BasicBlock(8, 8),
        BasicBlock(8, 16, 2),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(16, 8),
    )


def accuracy(output, target, topk=(1, 5)):
    _, pred = output.topk(max(topk), 1, True, True)
    correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
    return [correct[:k].reshape(-1).float().sum(0) for k in topk]


criterion = nn.CrossEntropyLoss()
source = torch.Generator().manual_seed(0)
train_loader = DataLoader(
    pictures(64, 3, 16, 8), batch_size=16, shuffle=True, generator=source, drop_last=True
)
val_loader = DataLoader(pictures(20, 3, 16, 8), batch_size=16)


# -- the port --------------------------------------------------------------------------------------


def figures(model, batch):
    images, target = batch
    top1, top5 = accuracy(model(images), target)
    return {"acc1": (top1, len(images)), "acc5": (top5, len(images))}


def job() -> ps.Job:
    """Batch norms over whole batches, top-1 and top-5 of a validation."""
    return ps.Job(
        model=resnet,
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        data=ps.from_loader(train_loader),
        optimizer=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=1e-4),
        scheduler=lambda optimizer: StepLR(optimizer, step_size=30 * len(train_loader), gamma=0.1),
        validation=lambda: val_loader,
        metrics=figures,
        best="highest val_acc1",
        validate_every=4,
    )
