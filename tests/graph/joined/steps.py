"""Steps: losses, models and ops between them that joined and divided steps are tried on."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Job
from tests.graph.joined.joining import in_64_bits, net
from tests.graph.zoo import job_of


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    """Return a micro-batch: some of its labels are ignored, some of its weights almost 0."""
    x = torch.randn(4, 8, generator=generator)
    labels = torch.randint(4, (4,), generator=generator)
    drop = torch.randint(3, (4,), generator=generator) == 0
    weights = torch.rand(4, generator=generator) * (torch.rand(4, generator=generator) > 0.3)
    order = torch.randperm(4, generator=generator)
    target = x[:, :4] + torch.randn(4, 4, generator=generator)
    return {
        "x": x,
        "y": target,
        "labels": torch.where(drop, -100, labels),
        "w": weights + 1e-3,
        "beta": torch.rand(4, generator=generator),
        "order": order,
    }


CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 5.0], dtype=torch.float64)


def _error(m, b):
    return (m(b["x"]) - b["y"]).square().mean(1)


def _huber(m, b):
    error = m(b["x"]) - b["y"]
    return F.huber_loss(error / error.std().detach(), torch.zeros_like(error), delta=1.0)


def _skipped(m, b):
    loss = _error(m, b).mean()
    return torch.where(loss > 2.5, loss * 0.0, loss)


def _contrast(m, b):
    z = F.normalize(torch.cat([m(b["x"]), m(-b["x"])]), dim=1)
    likeness = (z @ z.T).masked_fill(torch.eye(8, dtype=torch.bool), -1e9)
    return F.cross_entropy(likeness, torch.arange(8).roll(4))


def _scattered(m, b):
    rows = torch.zeros(4, 4, dtype=b["x"].dtype).index_add(0, b["order"] // 2, m(b["x"]))
    return rows.square().mean()


COUPLED = {
    "ignored labels": lambda m, b: F.cross_entropy(m(b["x"]), b["labels"]),
    "ignored labels, summed": lambda m, b: F.cross_entropy(m(b["x"]), b["labels"], reduction="sum"),
    "ignored labels, one by one": lambda m, b: (
        F.cross_entropy(m(b["x"]), b["labels"], reduction="none").sum() / 3
    ),
    "smoothed": lambda m, b: F.cross_entropy(m(b["x"]), b["labels"], label_smoothing=0.1),
    "class weights": lambda m, b: F.cross_entropy(m(b["x"]), b["labels"], CLASS_WEIGHTS),
    "sample weights": lambda m, b: (_error(m, b) * b["w"]).sum() / b["w"].sum(),
    "clamped": lambda m, b: _error(m, b).mean().clamp(max=1.5),
    "huber by the batch": _huber,
    "skipped": _skipped,
    "beta as a column": lambda m, b: _error(m, b).mean() * b["beta"][0] + b["beta"].max(),
    "contrast": _contrast,
    "norm over the batch": lambda m, b: ((z := m(b["x"])) - z.mean(0)).div(z.std(0)).pow(4).mean(),
    "sum": lambda m, b: _error(m, b).sum(),
    "mixed": lambda m, b: torch.einsum("bi,ci->bc", m(b["x"]), b["y"]).tanh().sum(),
    "sorted": lambda m, b: (m(b["x"]).sort(0).values * b["y"]).mean(),
    "running sum": lambda m, b: m(b["x"]).cumsum(0).tanh().mean(),
    "greatest two": lambda m, b: _error(m, b).topk(2).values.mean(),
    "flipped": lambda m, b: (m(b["x"]) * m(b["x"]).flip(0)).mean(),
    "rolled": lambda m, b: (m(b["x"]) - m(b["x"]).roll(1, 0)).square().mean(),
    "in another order": lambda m, b: (m(b["x"])[b["order"]] - b["y"]).abs().mean(),
    "scattered": _scattered,
    "with a penalty": lambda m, b: (
        _error(m, b).mean() + 0.1 * sum(p.square().sum() for p in m.parameters())
    ),
    "mse": lambda m, b: F.mse_loss(m(b["x"]), b["y"]),
    "smooth l1": lambda m, b: F.smooth_l1_loss(m(b["x"]), b["y"]),
    "with logits": lambda m, b: F.binary_cross_entropy_with_logits(m(b["x"]), b["y"].sigmoid()),
    "divergence": lambda m, b: F.kl_div(
        m(b["x"]).log_softmax(1), b["y"].softmax(1), reduction="batchmean"
    ),
    "figures": lambda m, b: (_error(m, b).mean(), {"worst": _error(m, b).max(), "one": 1.0}),
}


class Attention(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.causal = causal

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, 16), nn.Embedding(6, 16)
        self.blocks = nn.Sequential(Attention(causal=True), Attention(causal=True))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens) + self.place(torch.arange(6))))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 5)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.blocks(x)[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM) -> None:
        super().__init__()
        self.layer, self.head = kind(8, 12, batch_first=True), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def _cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def labelled(*shape):
    def batch(generator):
        x = torch.randn(4, *shape, generator=generator)
        return x, torch.randint(5, (4,), generator=generator)

    return batch


def _tokens(generator):
    rows = torch.randint(32, (4, 7), generator=generator)
    labels = torch.where(torch.rand(4, 6, generator=generator) < 0.2, -100, rows[:, 1:])
    return rows[:, :-1], labels


def of_classes(m, b):
    return F.cross_entropy(m(b[0]), b[1])


def of_tokens(m, b):
    return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())


ORDINARY = {
    "mlp": (lambda: net(out=5), labelled(8), of_classes),
    "cnn": (_cnn, labelled(3, 8, 8), of_classes),
    "vit": (Patches, labelled(3, 8, 8), of_classes),
    "lstm": (Recurrent, labelled(6, 8), of_classes),
    "gru": (lambda: Recurrent(nn.GRU), labelled(6, 8), of_classes),
    "gpt": (Text, _tokens, of_tokens),
}


MIDDLES = (
    lambda z, b: z.tanh(),
    lambda z, b: z * b["y"],
    lambda z, b: z + z.mean(0),
    lambda z, b: z - z.mean(1, keepdim=True),
    lambda z, b: z / (1 + z.norm()),
    lambda z, b: z[b["order"]],
    lambda z, b: z.flip(0),
    lambda z, b: z.flip(1),
    lambda z, b: z.t().reshape(4, 4),
    lambda z, b: z.view(2, 2, 4).transpose(0, 1).reshape(4, 4),
    lambda z, b: z.view(2, 8).softmax(1).view(4, 4),
    lambda z, b: z @ z.t() @ z,
    lambda z, b: torch.cat([z[:2], z[2:] * 2]),
    lambda z, b: torch.stack([z, b["y"]], 1).amax(1),
    lambda z, b: torch.stack([z, b["y"]]).sum(0),
    lambda z, b: z * b["w"][:, None],
    lambda z, b: z * b["w"],
    lambda z, b: z.cumsum(1),
    lambda z, b: F.layer_norm(z, (4,)),
    lambda z, b: F.layer_norm(z, (4, 4)),
    lambda z, b: torch.where(z > z.median(), z, z.detach() * 0.5),
    lambda z, b: z.gather(1, b["order"][:, None].expand(4, 2)).repeat(1, 2),
    lambda z, b: z.unsqueeze(0).expand(3, 4, 4).mean(0),
    lambda z, b: z.select(0, 1).expand(4, 4) + z,
    lambda z, b: torch.bmm(z.unsqueeze(2), z.unsqueeze(1)).sum(2),
    lambda z, b: z.roll(1, 1),
    lambda z, b: z.roll(3),
    lambda z, b: F.pad(z, (1, 0))[:, :4],
    lambda z, b: F.pad(z, (0, 0, 1, 0))[:4],
    lambda z, b: z.unfold(1, 2, 1).mean(2).repeat_interleave(2, 1)[:, :4],
)
ENDS = tuple(
    COUPLED[name]
    for name in ("ignored labels", "class weights", "sample weights", "skipped", "mse", "sum")
)


def any_step(middles: Sequence[int], end: int) -> Job:
    """Return a job whose model goes through some of MIDDLES to one of ENDS, in float64."""

    class Through(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x):
            z = self.first(x)
            for number in middles:
                z = MIDDLES[number](z, self.batch)
            return self.last(z)

    def loss(m, b):
        m.__dict__["batch"] = b
        return ENDS[end](m, b)

    return in_64_bits(job_of(Through, rows, loss))
