"""Memory that tensors share: tied parameters, views, attributes."""

import torch
from small import WIDTH, deep, pairs, sgd, squares, tokens
from torch import nn
from torch.nn import functional as F

import penstock as ps

THIRD = {"*": "interleaved"}


def _job(model, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = deep(outputs=WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layers(self.embedding(x)))


def _next_token(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def tied_embedding() -> ps.Job:
    """One parameter under two names, as torch ties them (nothing is wrong)."""
    return _job(_Tied, _next_token, tokens)


class _TiedByData(_Tied):
    def tie(self) -> None:
        self.head.weight.data = self.embedding.weight.data


def tied_by_data() -> ps.Job:
    """Two parameters whose .data is one tensor: each has its own gradient, both write it."""
    return _job(_TiedByData, _next_token, tokens)


class _Transposed(nn.Module):
    """An autoencoder whose decoder is the encoder, transposed, by .data."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.middle = nn.Linear(WIDTH, 6), nn.Linear(6, 6)
        self.decode = nn.Linear(6, WIDTH)
        self.decode.weight.data = self.encode.weight.data.t()

    def forward(self, x):
        return self.decode(torch.tanh(self.middle(torch.tanh(self.encode(x)))))[:, :4]


def transposed_by_data() -> ps.Job:
    """A decoder that views the encoder's memory, transposed."""
    return _job(_Transposed)


class _Packed(nn.Module):
    """Two parameters that are halves of one tensor, and one that is all of it."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2 * WIDTH, WIDTH) / 4
        self.first, self.second = nn.Parameter(both[:WIDTH]), nn.Parameter(both[WIDTH - 2 : -2])
        self.rest = deep(3)

    def forward(self, x):
        return self.rest(torch.tanh(torch.tanh(x @ self.first) @ self.second))


def parameters_that_overlap() -> ps.Job:
    """Two parameters are views of one tensor, and share two rows."""
    return _job(_Packed)


class _Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.register_buffer("mirror", self.layers[0].weight.detach()[:4])

    def forward(self, x):
        return self.layers(x) + x @ self.mirror.t()


def buffer_that_views_a_parameter() -> ps.Job:
    """A buffer is a view of a weight: it follows every update."""
    return _job(_Viewed)


class _Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.mirror = self.layers[0].weight.detach()

    def forward(self, x):
        return self.layers(x) + (x @ self.mirror.t())[:, :4]


def attribute_that_views_a_parameter() -> ps.Job:
    """A plain attribute holds the memory of a weight."""
    return _job(_Kept)


class _Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.scale = torch.ones(4)

    def forward(self, x):
        y = self.layers(x)
        self.scale.mul_(0.9).add_(0.1 * y.detach().abs().mean(0))
        return y / (self.scale + 0.1)


def attribute_that_forward_writes() -> ps.Job:
    """A tensor that is neither parameter nor buffer is written by every forward."""
    return _job(_Outside)


class _Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.inner = [nn.Linear(4, 4)]

    def forward(self, x):
        return self.inner[0](self.layers(x))


def module_in_a_list() -> ps.Job:
    """A layer in a plain list: used by forward, unknown to parameters(); it stays as it was."""
    return _job(_Hidden)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([layer, nn.Linear(WIDTH, WIDTH), layer, layer])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def layer_used_three_times() -> ps.Job:
    """One layer stands three times in a list (nothing is wrong)."""
    return _job(_Twice)


class _Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1).expand(WIDTH))
        self.layers = deep()

    def forward(self, x):
        return self.layers(x * self.gain)


def parameter_that_is_expanded() -> ps.Job:
    """A parameter of eight elements that are one in memory."""
    return _job(_Expanded, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.01))


def teacher_that_shares_a_layer() -> ps.Job:
    """A frozen teacher is a copy of the student, but for its head, which is the student's own."""

    def model():
        student, teacher = deep(), deep()
        teacher.load_state_dict(student.state_dict())
        teacher.requires_grad_(False)
        teacher[6] = student[6]
        return nn.ModuleDict({"student": student, "teacher": teacher})

    def loss(model, batch):
        with torch.no_grad():
            target = model["teacher"](batch[0])
        return squares(model["student"], batch) + F.mse_loss(model["student"](batch[0]), target)

    return _job(model, loss)
