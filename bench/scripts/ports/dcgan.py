"""pytorch/examples, dcgan/main.py: netD on real and fake, then netG, on each batch."""

import itertools

import torch
from drawn import pictures
from torch import nn, optim

import penstock as ps

nz, ngf, ndf = 4, 4, 4
dataset = pictures(64, 3, 8)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.2)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
        nn.BatchNorm2d(ngf * 2),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 2, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    ).apply(weights_init)


def discriminator():
    return nn.Sequential(
        nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf, ndf * 2, 3, 1, 1, bias=False),
        nn.BatchNorm2d(ndf * 2),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    ).apply(weights_init)


criterion = nn.BCELoss()


# -- the port --------------------------------------------------------------------------------------


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.netD, self.netG = discriminator(), generator()


def batches(start):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        real = torch.stack([dataset[(number * 8 + k) % 64][0].tanh() for k in range(8)])
        yield {"real": real, "noise": torch.randn(8, nz, 1, 1, generator=source)}


def judged(model, batch):
    real, fake = model.netD(batch["real"]), model.netD(model.netG(batch["noise"]).detach())
    ones = torch.ones_like(real)
    return criterion(real, ones) + criterion(fake, 0 * ones)


def fooled(model, batch):
    output = model.netD(model.netG(batch["noise"]))
    return criterion(output, torch.ones_like(output))


def job() -> ps.Job:
    """Two nets with batch norms and an optimizer each, by turns on one batch."""
    adam = lambda params: optim.Adam(params, lr=2e-3, betas=(0.5, 0.999), eps=1e-3)  # noqa: E731
    turns = {"D": ps.Turn(judged, "netD.*"), "G": ps.Turn(fooled, "netG.*", again=True)}
    return ps.Job(
        model=Both,
        loss=ps.in_turn(turns),
        data=batches,
        optimizer=ps.by_name({"netD.*": adam, "netG.*": adam}),
        micro_batches=1,
    )
