"""Models of all kinds: unlike dtypes, scripts, complex numbers, loops, branches, own functions."""

import dataclasses
import functools
import math

import torch
import torch.utils.checkpoint
from small import WIDTH, classes, deep, images, pairs, sgd, squares, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

import penstock as ps


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def parameters_in_bfloat16() -> ps.Job:
    """The whole model is in bfloat16; the loss converts inputs and outputs."""

    def loss(model, batch):
        return F.mse_loss(model(batch[0].bfloat16()).float(), batch[1])

    def optimizer(weights):
        return torch.optim.AdamW(weights, lr=0.01)

    return _job(lambda: deep().bfloat16(), loss, optimizer=optimizer)


def autocast_to_bfloat16_inside_forward() -> ps.Job:
    """Forward enters torch.autocast itself, for its middle."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(8, 8), deep(outputs=8), nn.Linear(8, 4)

        def forward(self, x):
            x = self.first(x)
            with torch.autocast("cpu", torch.bfloat16):
                x = self.middle(x)
            return self.last(x.float())

    return _job(Mixed)


@torch.jit.script
def _swish(x: Tensor, beta: float) -> Tensor:
    return x * torch.sigmoid(beta * x)


class _Swish(nn.Module):
    def forward(self, x):
        return _swish(x, 1.5)


def scripted_function() -> ps.Job:
    """An activation under torch.jit.script."""
    return _job(lambda: nn.Sequential(nn.Linear(8, 8), _Swish(), nn.Linear(8, 8), _Swish(), deep()))


def scripted_module() -> ps.Job:
    """A block is a module under torch.jit.script."""

    def model():
        return nn.Sequential(nn.Linear(8, 8), torch.jit.script(deep(outputs=8)), nn.Linear(8, 4))

    return _job(model)


class _Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), deep(3)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x):
        x = self.before(x)
        x = x + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)
        return self.after(x)


def filter_of_complex_numbers() -> ps.Job:
    """A parameter is complex and multiplies a spectrum."""
    return _job(_Fourier)


class _Einstein(nn.Module):
    """What einops does: patterns are read once, kept in a cache, and applied as a reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(_rearrange(self.first(x), "b (h d) -> b (d h)", h=4).tanh())


@functools.lru_cache(256)
def _pattern(text: str, names: tuple[str, ...]):
    left, right = (side.split("(")[1].rstrip(")").split() for side in text.split("->"))
    return tuple(left.index(name) for name in right), names


def _rearrange(x, text, **sizes):
    order, names = _pattern(text.replace(") ", ")"), tuple(sizes))
    first = sizes[names[0]]
    parts = x.reshape(len(x), first, x.shape[1] // first)
    return parts.permute(0, *(1 + k for k in order)).reshape(len(x), -1)


def patterns_in_a_cache() -> ps.Job:
    """Reshapes by patterns of text, whose recipes an lru_cache keeps (nothing is wrong)."""
    return _job(_Einstein)


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        hidden = carry = x.new_zeros(len(x), WIDTH)
        for step in range(40):
            hidden, carry = self.cell(x * math.cos(step / 5), (hidden, carry))
        return self.head(hidden)


def cell_of_lstm_forty_times() -> ps.Job:
    """A loop of forty steps over an LSTMCell (nothing is wrong)."""
    return _job(_Cells)


class _Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()

    def forward(self, x):
        source = torch.Generator().manual_seed(3)
        random = torch.randn(WIDTH, WIDTH, generator=source) / math.sqrt(WIDTH)
        return self.layers(torch.relu(x @ random) + x)


def random_features_made_in_forward() -> ps.Job:
    """Forward makes a generator with a constant seed and draws the same matrix (nothing wrong)."""
    return _job(_Projected)


class _Adaptive(nn.Module):
    """Repeats a cell until the sum of its halting probabilities is above one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.halt, self.head = (nn.Linear(WIDTH, n) for n in (WIDTH, 1, 4))

    def forward(self, x):
        total, steps = 0.0, 0
        out = torch.zeros_like(x)
        while total < 1.0 and steps < 6:
            x = torch.tanh(self.cell(x))
            share = torch.sigmoid(self.halt(x)).mean()
            out, total, steps = out + share * x, total + share.item(), steps + 1
        return self.head(out)


def loop_that_halts_by_itself() -> ps.Job:
    """Adaptive computation time: a while loop over a value."""
    return _job(_Adaptive)


class _Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(30):
                before, z = z, torch.tanh(0.3 * self.inner(z) + self.outer(x))
                if (z - before).norm() < 1e-4:
                    break
        return self.head(torch.tanh(0.3 * self.inner(z) + self.outer(x)))


def fixed_point() -> ps.Job:
    """A deep equilibrium: iterated without gradients to a tolerance, then once with them."""
    return _job(_Equilibrium)


class _Reversible(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1); backward finds the inputs again from the outputs."""

    @staticmethod
    def forward(ctx, x, f, g, *weights):
        a, b = x.chunk(2, 1)
        with torch.no_grad():
            one = a + f(b)
            two = b + g(one)
        ctx.save_for_backward(one, two)
        ctx.blocks = f, g
        ctx.weights = weights
        return torch.cat([one, two], 1)

    @staticmethod
    def backward(ctx, gradient):
        one, two = ctx.saved_tensors
        f, g = ctx.blocks
        with torch.no_grad():
            b = two - g(one)
            a = one - f(b)
        with torch.enable_grad():
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            first = a + f(b)
            out = torch.cat([first, b + g(first)], 1)
            found = torch.autograd.grad(out, (a, b, *ctx.weights), gradient)
        return torch.cat(found[:2], 1), None, None, *found[2:]


class _Revnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(WIDTH, 4)

    def forward(self, x):
        weights = (*self.f.parameters(), *self.g.parameters())
        return self.head(_Reversible.apply(x, self.f, self.g, *weights).tanh())


def reversible_block() -> ps.Job:
    """A custom function computes its block again in backward, from its outputs."""
    return _job(_Revnet)


def sequence_of_checkpoints() -> ps.Job:
    """checkpoint_sequential over two halves (nothing is wrong)."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep(6)

        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    return _job(Halves)


def model_left_in_eval() -> ps.Job:
    """model() returns the module in eval mode: its dropout does nothing in the loop."""
    return _job(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), deep()).eval())


def depth_by_chance() -> ps.Job:
    """Stochastic depth as people write it: `if torch.rand(1) < p` around a block."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x):
            for block in self.blocks:
                if not self.training or torch.rand(1).item() < 0.7:
                    x = x + torch.tanh(block(x))
            return self.head(x)

    return _job(Deep)


@dataclasses.dataclass
class _Output:
    logits: Tensor
    hidden: Tensor | None = None


def output_in_a_record() -> ps.Job:
    """Forward returns a dataclass, computes its loss where labels are given (nothing wrong)."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = deep(outputs=WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x=None, labels=None):
            hidden = self.body(x)
            out = _Output(self.head(hidden), hidden)
            return (F.cross_entropy(out.logits, labels), out) if labels is not None else out

    return _job(Heads, lambda m, b: m(x=b[0], labels=b[1])[0], classes)


def last_channels() -> ps.Job:
    """Convolutions in channels_last, with in-place activations and a strided view."""

    def model():
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(inplace=True), nn.Conv2d(8, 8, 3, 2))
        head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 4, 4))
        return nn.Sequential(layers.to(memory_format=torch.channels_last), head)

    def loss(model, batch):
        x = batch[0].contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(model(x), batch[1])

    return _job(model, loss, images)


def bags_of_words() -> ps.Job:
    """EmbeddingBag with offsets, a mean over each bag (nothing is wrong)."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(16, WIDTH, mode="mean"), deep()

        def forward(self, words):
            offsets = torch.arange(0, words.numel(), words.shape[1])
            return self.head(self.bag(words.flatten(), offsets))

    def loss(model, batch):
        return F.cross_entropy(model(batch), batch[:, 0] % 4)

    return _job(Bags, loss, tokens)


def decoder_with_memory() -> ps.Job:
    """nn.Transformer's decoder and encoder, greedy no more than its loss (nothing is wrong)."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(16, WIDTH)
            self.net = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.1, batch_first=True)

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            out = self.net(self.words(x), self.words(x.flip(1)), tgt_mask=mask)
            return out @ self.words.weight.t()

    def loss(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return _job(Pair, loss, tokens)
