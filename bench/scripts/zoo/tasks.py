"""Tasks with more than one loss, net or derivative, as papers' repositories have them."""

import copy
import itertools

import torch
from small import WIDTH, deep, pair, pairs, sgd, squares, tokens
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import penstock as ps

STEPS = {"backbone_that_thaws_at_step_twenty": 26}


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _gan():
    return nn.ModuleDict({"maker": deep(), "critic": deep(3, 4, 1)})


class _Turns(torch.optim.Adam):
    """Two groups, of which each step updates one: the maker's at every second step."""

    def __init__(self, groups) -> None:
        super().__init__(groups, lr=0.01)
        self.steps = 0

    def step(self, closure=None):
        idle = self.param_groups[self.steps % 2]
        for p in idle["params"]:
            p.grad = None
        self.steps += 1
        return super().step(closure)


def gan_whose_optimizer_takes_turns() -> ps.Job:
    """Both losses are summed; the optimizer updates maker and critic in turns, by its count."""

    def loss(model, batch):
        made = model["maker"](batch[0])
        critic = model["critic"](batch[1]), model["critic"](made.detach())
        frozen = {k: v.detach() for k, v in model["critic"].named_parameters()}
        fooled = functional_call(model["critic"], frozen, made)
        return (
            F.softplus(-critic[0]).mean()
            + F.softplus(critic[1]).mean()
            + F.softplus(-fooled).mean()
        )

    def optimizer(weights):
        named = dict(weights.named())
        groups = [[p for n, p in named.items() if n.startswith(k)] for k in ("maker", "critic")]
        return _Turns([{"params": group} for group in groups])

    return _job(_gan, loss, optimizer=optimizer)


class _Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = deep(outputs=WIDTH), nn.ModuleList(nn.Linear(8, 2) for _ in "ab")
        self.logs = nn.Parameter(torch.zeros(2))


def tasks_weighed_by_uncertainty() -> ps.Job:
    """Two tasks, each loss times exp(-s) plus s, with s learned (nothing is wrong)."""

    def loss(model, batch):
        hidden = model.body(batch[0])
        parts = batch[1].split(2, 1)
        losses = [F.mse_loss(h(hidden), y) for h, y in zip(model.heads, parts, strict=True)]
        return (torch.stack(losses) * torch.exp(-model.logs) + model.logs).sum()

    return _job(_Weighed, loss)


def tasks_weighed_by_their_gradients() -> ps.Job:
    """The second loss is scaled by the ratio of the gradients' norms, found in the loss."""

    def loss(model, batch):
        hidden = model.body(batch[0])
        one, other = (h(hidden) - y for h, y in zip(model.heads, batch[1].split(2, 1), strict=True))
        one, other = one.square().mean(), other.abs().mean()
        last = model.body[-1].weight
        norms = [torch.autograd.grad(x, last, retain_graph=True)[0].norm() for x in (one, other)]
        return one + other * (norms[0] / (norms[1] + 1e-6)).detach()

    return _job(_Weighed, loss)


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, WIDTH) / 3)
        self.inner = deep(2, 6, 6)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return F.linear(self.inner(F.linear(x, self.weight).tanh()), self.weight.t(), self.bias)


def decoder_that_is_the_encoder_transposed() -> ps.Job:
    """One weight, used at the beginning and, transposed, at the end (nothing is wrong)."""
    return _job(_Autoencoder, lambda m, b: F.mse_loss(m(b[0]), b[0]))


def backbone_that_thaws_at_step_twenty() -> ps.Job:
    """The first layers are frozen; a hook of the optimizer thaws them after step 20."""
    built = []

    def model():
        made = deep()
        made[0].requires_grad_(False)
        built.append(made)
        return made

    def optimizer(weights):
        made, numbers = sgd(weights), itertools.count(1)

        def thaw(*_):
            if next(numbers) == 20:
                built[-1][0].requires_grad_(True)

        made.register_step_post_hook(thaw)
        return made

    return _job(model, optimizer=optimizer)


def lazy_layers_made_in_model() -> ps.Job:
    """LazyLinear and LazyBatchNorm1d; model() shows them one batch (nothing is wrong)."""

    def model():
        made = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(4))
        made.eval()(torch.zeros(2, WIDTH))
        return made.train()

    return _job(model)


def derivative_at_the_inputs() -> ps.Job:
    """A physics-informed loss: the second derivative by autograd.grad, twice (nothing wrong)."""

    def loss(model, batch):
        t = batch[0][:, :1].clone().requires_grad_(True)
        u = model(t)
        first = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), t, create_graph=True)[0]
        return (second + u).square().mean() + model(torch.zeros(1, 1)).square().mean()

    return _job(lambda: deep(inputs=1, outputs=1), loss)


def scores_by_vmap() -> ps.Job:
    """Score matching with a Jacobian's trace by vmap over grad (nothing is wrong)."""

    def loss(model, batch):
        weights = dict(model.named_parameters())

        def energy(x):
            return functional_call(model, weights, x).square().sum()

        scores = vmap(grad(energy))(batch[0])
        return (scores + batch[0]).square().mean()

    return _job(loss=loss)


def learning_to_learn() -> ps.Job:
    """MAML: one inner step by autograd.grad on the first two samples, the loss on the others."""

    def loss(model, batch):
        (x, y), weights = batch, dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, weights, x[:2]), y[:2])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {k: w - 0.1 * s for (k, w), s in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(model, moved, x[2:]), y[2:])

    return _job(loss=loss)


def preferences_beside_a_reference() -> ps.Job:
    """DPO: a frozen copy of the first weights stands in a closure (nothing is wrong)."""
    references = []

    def model():
        made = deep()
        references.append(copy.deepcopy(made).requires_grad_(False).eval())
        return made

    def loss(model, batch):
        better, worse = batch[0], batch[0].roll(1, 1)
        gains = [m(better)[:, 0] - m(worse)[:, 0] for m in (model, references[-1])]
        return -F.logsigmoid(0.5 * (gains[0] - gains[1].detach())).mean()

    return _job(model, loss)


def sharpness_in_the_loss() -> ps.Job:
    """SAM inside the loss: gradients of the micro-batch, then the loss at moved weights."""

    def loss(model, batch):
        weights = dict(model.named_parameters())
        slopes = torch.autograd.grad(squares(model, batch), list(weights.values()))
        norm = torch.stack([s.norm() for s in slopes]).norm() + 1e-9
        pairs_ = zip(weights.items(), slopes, strict=True)
        moved = {k: w + 0.05 * s / norm for (k, w), s in pairs_}
        return F.mse_loss(functional_call(model, moved, batch[0]), batch[1])

    return _job(loss=loss)


class _Skipgram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.contexts = nn.Embedding(16, WIDTH), nn.Embedding(16, WIDTH)


def negatives_that_are_drawn() -> ps.Job:
    """word2vec: negatives by torch.multinomial in the loss."""

    def loss(model, batch):
        words, near = model.words(batch[:, :-1]), model.contexts(batch[:, 1:])
        drawn = torch.multinomial(torch.arange(1.0, 17), batch[:, 1:].numel() * 3, True)
        far = model.contexts(drawn.view(*batch[:, 1:].shape, 3))
        right = F.logsigmoid((words * near).sum(-1))
        wrong = F.logsigmoid(-(words[:, :, None] * far).sum(-1)).sum(-1)
        return -(right + wrong).mean()

    return _job(_Skipgram, loss, tokens)


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(16, WIDTH), deep(2)
        self.moves = nn.Parameter(torch.zeros(4, 4))

    def forward(self, words, tags):
        scores = self.scores(self.words(words))
        total = scores[:, 0]
        for k in range(1, scores.shape[1]):
            total = (total[:, :, None] + self.moves).logsumexp(1) + scores[:, k]
        found = scores.gather(2, tags[:, :, None]).sum((1, 2))
        return (total.logsumexp(1) - found - self.moves[tags[:, :-1], tags[:, 1:]].sum(1)).mean()


def random_field() -> ps.Job:
    """A linear chain: the forward algorithm in a Python loop (nothing is wrong)."""
    return _job(_Field, lambda m, b: m(b, b % 4), tokens)


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, edges):
        for layer in self.layers:
            came = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = torch.tanh(layer(x + came / 4))
        return self.head(x)


def messages_along_edges() -> ps.Job:
    """A graph net: nodes are dimension 0, and edges name nodes by number (nothing is wrong)."""

    def data(start):
        for index in itertools.count(start):
            source = torch.Generator().manual_seed(index)
            edges = torch.randint(0, 6, (2, 12), generator=source)
            x, y = pair(index, rows=6)
            yield {"x": x, "edges": edges, "y": y}

    return _job(_Graph, lambda m, b: F.mse_loss(m(b["x"], b["edges"]), b["y"]), data)


class _Euler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope, self.head = deep(2, WIDTH + 1, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        for time in torch.linspace(0, 1, 6)[:-1]:
            at = time.expand(len(x), 1)
            x = x + 0.2 * self.slope(torch.cat([x, at], 1))
        return self.head(x)


def differential_equation() -> ps.Job:
    """A neural ODE by five steps of Euler over a tensor of times (nothing is wrong)."""
    return _job(_Euler)


def parts_of_the_loss_beside_it() -> ps.Job:
    """A sum of squares over the batch as VAEs have it, with its parts as figures."""

    def loss(model, batch):
        out = model(batch[0])
        rebuilt = F.mse_loss(out, batch[1], reduction="sum")
        prior = -0.5 * (1 + out - out.exp()).sum()
        return 0.02 * (rebuilt + 0.1 * prior), {"rebuilt": rebuilt, "prior": prior}

    return _job(loss=loss)
