"""Zoo: small models, each with one thing that a traced, cut step could get wrong.

Letters of tensor shapes: B samples, T positions, D width, H heads, C channels, V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils import checkpoint as torch_checkpoint

from penstock.job import Job

D, V = 16, 32


def job_of(
    model: Callable[[], nn.Module],
    batch: Callable[[torch.Generator], object],
    loss: Callable[[nn.Module, object], Tensor] | None = None,
    **more,
) -> Job:
    """Return a job whose micro-batch i is drawn from generator i."""

    def data(start: int) -> Iterator[object]:
        while True:
            yield batch(torch.Generator().manual_seed(start))
            start += 1

    return Job(
        model=model,
        loss=(lambda model, batch: model(batch).square().mean()) if loss is None else loss,
        data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **more,
    )


def floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator)


def tokens(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(V, shape, generator=generator)


def next_token(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Blocks(nn.Sequential):
    def __init__(self, count: int = 4, dropout: float = 0.0) -> None:
        super().__init__(*(Block(dropout) for _ in range(count)))


class Tied(nn.Module):
    """The embedding is also the head: its gradient has a part at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(V, D), Blocks(3)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens_BT)))


class UNet(nn.Module):
    """Every value of the way down is read again on the way up; `side` only at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(D, D)
        self.down = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        side, kept = torch.sigmoid(self.side(x)), []
        for layer in self.down:
            kept.append(x)
            x = torch.tanh(layer(x))
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        return x * side


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor, memory_BTD: Tensor) -> Tensor:
        q = self.q(x_BTD).unflatten(-1, (2, -1)).transpose(1, 2)
        k, v = self.kv(memory_BTD).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return x_BTD + self.out(mixed.transpose(1, 2).flatten(2))


class EncoderDecoder(nn.Module):
    """What the encoder makes is read by every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(V, D), nn.Embedding(V, D)
        self.encoder = nn.ModuleList(Attention() for _ in range(2))
        self.decoder = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(D, V)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.source(source), self.target(target)
        for layer in self.encoder:
            memory = layer(memory, memory)
        for layer in self.decoder:
            x = layer(layer(x, x), memory)
        return self.head(x)


def _translation(generator: torch.Generator) -> dict[str, Tensor]:
    source, target = (torch.randint(V, (2, 5), generator=generator) for _ in range(2))
    return {"source": source, "target": target}


def _one_tensor_twice(generator: torch.Generator) -> dict[str, object]:
    tokens_BT = torch.randint(V, (2, 6), generator=generator)
    return {"ids": tokens_BT, "labels": tokens_BT, "label": "words", "power": 2, "none": None}


def _loss_of_dict(model: nn.Module, batch: dict[str, object]) -> Tensor:
    assert batch["label"] == "words"
    assert batch["none"] is None
    logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) ** batch["power"]


class FrozenUnused(nn.Module):
    """One parameter is frozen, one is never used, one only under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = Blocks(3), nn.Linear(D, D)
        self.unused, self.seen = nn.Linear(3, 3), nn.Linear(D, D)
        for parameter in self.blocks[0].parameters():
            parameter.requires_grad_(False)
        self.last.weight.requires_grad_(False)
        self.register_buffer("spare", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.seen(x))
        return self.last(self.blocks(x)) * gate


class Noise(nn.Module):
    """Random numbers of several kinds, not only dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) + torch.randn_like(x)
        x = self.layers[1](x) * torch.bernoulli(torch.full_like(x, 0.5))
        gumbel = torch.empty_like(x).exponential_().log().neg()
        x = torch.softmax(self.layers[2](x) + gumbel, -1)
        return self.layers[3](F.dropout(x, 0.3)) + torch.rand(D)


class ConvNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), norm(8), nn.ReLU(inplace=True))
                for c in (3, 8, 8, 8)
            )
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.head(F.avg_pool2d(self.layers(x_BCHW), 2).mean((2, 3)))


class Frozen(nn.Module):
    """A model in eval mode, which is what some people train."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Average(nn.Module):
    """A buffer that follows the activations, written in place and read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.count += 1
        return x - self.mean


class InPlace(nn.Module):
    """Writes into values, also into a slice and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x += 1
        x = self.layers[1](F.relu_(x)).clone()
        x[:, : D // 2] = 0.5 * x[:, D // 2 :]
        half = x.view(-1, 2, D // 2)[:, 0]
        half.mul_(3)
        x = self.layers[2](x).sigmoid_()
        return self.layers[3](x).masked_fill_(x > 0.6, 0.25)


class Checkpointed(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch_checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


class Double(torch.autograd.Function):
    """A gradient that is not the true one, so that only the custom backward gives it."""

    @staticmethod
    def forward(context, x, factor):
        context.save_for_backward(x)
        context.factor = factor
        return x.sin() * factor

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return 3 * gradient * x.cos(), None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Double.apply(layer(x), 2.0)
        return x


class Outputs(nn.Module):
    """Blocks hand on a tuple and a dict; two heads, and a penalty on every weight."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            x = torch.tanh(self.a(x) + state["s"])
            return x, {"s": torch.tanh(self.b(state["s"])) + x.mean(-1, keepdim=True)}

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(self.Pair() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(D, 4) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        state = {"s": x.flip(0)}
        for pair in self.pairs:
            x, state = pair(x, state)
        return {"first": self.heads[0](x), "second": self.heads[1](state["s"])}


def _loss_of_heads(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return found["first"].square().mean() + found["second"].abs().mean() + 1e-3 * penalty


class Twice(nn.Module):
    """The same module runs three times, with others between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = Block(), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.between:
            x = block(self.shared(x))
        return self.shared(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.rnns = nn.ModuleList(nn.LSTM(D, D, batch_first=True) for _ in range(3))
        self.head = nn.Linear(D, V)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        for rnn in self.rnns:
            x = x + rnn(x)[0]
        return self.head(x)


class Embeddings(nn.Module):
    """Positions, segments, padding: several tables, a mask, a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, D, padding_idx=0), nn.Embedding(8, D)
        self.bag = nn.EmbeddingBag(V, D, mode="sum")
        self.layers, self.head = nn.ModuleList(Attention() for _ in range(3)), nn.Linear(D, V)
        self.register_buffer("position", torch.arange(8), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.words(tokens_BT) + self.places(self.position[: tokens_BT.shape[1]])
        x = x + self.bag(tokens_BT)[:, None]
        mask = (tokens_BT != 0)[..., None]
        for layer in self.layers:
            x = torch.where(mask, layer(x, x), 0.1 * x)
        return self.head(x)


class Layouts(nn.Module):
    """Parameters that are transposed, strided, expanded, of other dtypes, or a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(D, D).t() * 0.2)
        self.strided = nn.Parameter((torch.randn(D, 2 * D) * 0.2)[:, ::2])
        self.expanded = nn.Parameter(torch.randn(D, 1).expand(D, 1) * 0.2)
        self.number = nn.Parameter(torch.tensor(0.5))
        self.wide = nn.Parameter(torch.randn(D, D, dtype=torch.float64) * 0.2)
        self.blocks = Blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](torch.tanh(x @ self.transposed))
        x = torch.tanh(x @ self.strided.t()) * self.number
        x = self.blocks[1](x) + (x @ self.expanded.expand(D, D))
        return torch.tanh(x.double() @ self.wide).float() * self.number


class Crossing(nn.Module):
    """Values of every layout and dtype cross the cuts: permuted, expanded, whole, bool, sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x_BTD: Tensor) -> Tensor:
        y = self.layers[0](x_BTD)
        order, mask = y.sum(-1).argsort(-1), y > 0
        one = y.mean(1, keepdim=True).expand(-1, y.shape[1], -1)
        wide = self.layers[1](y.transpose(0, 1)).permute(2, 0, 1)
        y = self.layers[2](y)
        left, right = self.layers[3](y).chunk(2, -1)
        y = wide.permute(2, 1, 0) + one + torch.cat([right, left], -1)
        y = torch.where(mask, y, -y).gather(1, order[..., None].expand(-1, -1, D))
        return self.layers[4](y) + wide.permute(2, 1, 0)


class Rotary(nn.Module):
    """Complex numbers that every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.register_buffer("angle", torch.outer(torch.arange(5.0), torch.rand(D // 2)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(self.angle), self.angle * x_BTD.mean())
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x_BTD).unflatten(-1, (-1, 2)))
            x_BTD = x_BTD + torch.view_as_real(pairs * turn).flatten(-2)
        return x_BTD


class Normed(nn.Module):
    """Weights that are computed from other weights before they are used."""

    def __init__(self) -> None:
        super().__init__()
        make = parametrizations.weight_norm
        self.layers = nn.ModuleList(make(nn.Linear(D, D)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Penalty(nn.Module):
    """The loss holds a gradient: a backward pass inside the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + gradient


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, 2, 2 * D, dropout, batch_first=True), 3
        )
        self.head = nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def _mean_of_two(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


vectors, sequences, image = floats(6, D), floats(2, 5, D), floats(2, 3, 6, 6)

JOBS: dict[str, Job] = {
    "blocks": job_of(Blocks, vectors),
    "tied": job_of(Tied, tokens(2, 6), next_token),
    "unet": job_of(UNet, vectors),
    "encoder_decoder": job_of(
        EncoderDecoder,
        _translation,
        lambda model, batch: F.cross_entropy(
            model(**batch).flatten(0, 1), batch["target"].flatten()
        ),
    ),
    "dict_inputs": job_of(Tied, _one_tensor_twice, _loss_of_dict),
    "frozen_unused": job_of(FrozenUnused, vectors),
    "dropout": job_of(lambda: Blocks(4, 0.3), vectors),
    "attention_dropout": job_of(lambda: Transformer(0.2), sequences),
    "transformer": job_of(lambda: Transformer(0.0), sequences),
    "noise": job_of(Noise, vectors),
    "batch_norm": job_of(lambda: ConvNet(nn.BatchNorm2d), image),
    "batch_norm_eval": job_of(lambda: Frozen(ConvNet(nn.BatchNorm2d)), image),
    "group_norm": job_of(lambda: ConvNet(lambda c: nn.GroupNorm(2, c)), image),
    "average": job_of(lambda: nn.Sequential(*(Average() for _ in range(3))), vectors),
    "in_place": job_of(InPlace, vectors),
    "checkpoint": job_of(Checkpointed, vectors),
    "custom": job_of(Custom, vectors),
    "autocast": job_of(Blocks, vectors, autocast="bfloat16"),
    "autocast_tied": job_of(Tied, tokens(2, 6), next_token, autocast="bfloat16"),
    "outputs": job_of(Outputs, vectors, _loss_of_heads),
    "twice": job_of(Twice, vectors),
    "recurrent": job_of(Recurrent, tokens(2, 6), next_token),
    "embeddings": job_of(Embeddings, tokens(2, 6), next_token),
    "layouts": job_of(Layouts, vectors),
    "crossing": job_of(Crossing, sequences),
    "rotary": job_of(Rotary, sequences),
    "normed": job_of(Normed, vectors),
    "penalty": job_of(Penalty, vectors),
    "uncut": job_of(lambda: nn.Linear(D, D), vectors),
}
