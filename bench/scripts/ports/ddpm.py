"""lucidrains/denoising-diffusion-pytorch: a small U-Net, noise of random times, an average."""

import math

import torch
from drawn import pictures
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import penstock as ps


class Unet(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.init_conv = nn.Conv2d(1, dim, 3, padding=1)
        self.down, self.mid = nn.Conv2d(dim, 2 * dim, 4, 2, 1), nn.Conv2d(2 * dim, 2 * dim, 3, 1, 1)
        self.norm, self.up = nn.GroupNorm(4, 2 * dim), nn.ConvTranspose2d(2 * dim, dim, 4, 2, 1)
        self.final_conv = nn.Conv2d(2 * dim, 1, 1)

    def forward(self, x, time):
        freqs = torch.exp(torch.arange(4, device=x.device) * -math.log(10000) / 3)
        emb = time[:, None] * freqs[None, :]
        t = self.time_mlp(torch.cat((emb.sin(), emb.cos()), dim=-1))
        x = self.init_conv(x)
        r = x.clone()
        x = self.mid(F.silu(self.norm(self.down(x + t[:, :, None, None]))))
        return self.final_conv(torch.cat((self.up(x), r), dim=1))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=50):
        super().__init__()
        self.model, self.num_timesteps = model, timesteps
        alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-3, 0.1, timesteps), dim=0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - alphas_cumprod).sqrt())

    def forward(self, img):
        t = torch.randint(0, self.num_timesteps, (img.shape[0],), device=img.device).long()
        noise = torch.randn_like(img)
        a, b = (
            table.gather(-1, t).view(-1, 1, 1, 1)
            for table in (self.sqrt_alphas_cumprod, self.sqrt_one_minus_alphas_cumprod)
        )
        return F.mse_loss(self.model(a * img + b * noise, t), noise)


dl = DataLoader(
    pictures(64), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0)
)


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """Times and noise drawn in forward, gradients of two batches accumulated, `ema_model`."""
    return ps.Job(
        model=lambda: GaussianDiffusion(Unet()),
        loss=lambda diffusion, batch: diffusion(batch[0]),
        data=ps.from_loader(dl),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, betas=(0.9, 0.99), eps=1e-3),
        micro_batches=2,
        clip_norm=1.0,
        average=ps.ema(0.995),
    )
