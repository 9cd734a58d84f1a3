"""Modules as repositories have them: adapters, experts, tables made when needed."""

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import penstock as ps


def gen(k):
    return torch.Generator().manual_seed(k)


def adam(w):
    return torch.optim.AdamW([p for p in w if p.requires_grad], 3e-3)


def classes(start):
    for k in itertools.count(start):
        x = torch.randn(4, 8, generator=gen(k))
        yield x, x[:, :4].argmax(1)


def tokens(start):
    for k in itertools.count(start):
        x = torch.randint(0, 16, (4, 7), generator=gen(k))
        yield x, x.sum(1) % 4


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def job(model, loss=ce, data=classes, opt=adam, **more):
    return ps.Job(model=model, loss=loss, data=data, optimizer=opt, **{"micro_batches": 4, **more})


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.base(x) + 2 * self.drop(x) @ self.a.t() @ self.b.t()


def adapters_merged_in_turns() -> ps.Job:
    """ReLoRA: every third step a hook merges the adapter into the base, and begins a new one."""

    def model():
        return nn.Sequential(Lora(nn.Linear(8, 12)), nn.Tanh(), Lora(nn.Linear(12, 4)))

    kept = {}

    def loss(m, batch):
        kept["model"] = m
        return ce(m, batch)

    def opt(w):
        made = adam(w)
        made.count = 0

        def merge(optimizer, *_):
            optimizer.count += 1
            if optimizer.count % 3 == 0:
                for part in kept["model"].modules():
                    if isinstance(part, Lora):
                        with torch.no_grad():
                            part.base.weight += 2 * part.b @ part.a
                            part.b.zero_()

        made.register_step_post_hook(merge)
        return made

    return job(model, loss, opt=opt)


class Moe(nn.Module):
    def __init__(self, width=8, experts=4, noise=0.1):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, width))
                for _ in range(experts)
            ]
        )
        self.noise, self.aux = noise, None

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            logits = logits + self.noise * torch.randn_like(logits)
        weight, index = logits.softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            share = (weight * (index == e)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        load = F.one_hot(index, len(self.experts)).float().mean((0, 1))
        self.aux = len(self.experts) * (load * logits.softmax(-1).mean(0)).sum()
        return x + out


def experts_with_noise() -> ps.Job:
    """Noisy top-2 experts; the balance is an attribute that the loss sums over modules."""

    def model():
        return nn.Sequential(nn.Linear(8, 8), Moe(), Moe(), nn.Linear(8, 4))

    def loss(m, batch):
        main = ce(m, batch)
        return main + 0.01 * sum(part.aux for part in m if isinstance(part, Moe))

    return job(model, loss)


def slopes_made_when_needed() -> ps.Job:
    """ALiBi: the bias is None until the first forward, then a non-persistent buffer."""

    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
            self.register_buffer("bias", None, persistent=False)

        def forward(self, x):
            if self.bias is None or self.bias.shape[-1] < x.shape[1]:
                at = torch.arange(x.shape[1])
                self.bias = -(at.unsqueeze(0) - at.unsqueeze(1)).abs() * torch.tensor(
                    [0.5, 0.25]
                ).view(2, 1, 1)
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
            return x + self.out(y.transpose(1, 2).flatten(2))

    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.blocks, self.head = (
                nn.Embedding(16, 8),
                nn.Sequential(Attend(), Attend()),
                nn.Linear(8, 4),
            )

        def forward(self, x):
            return self.head(self.blocks(self.embed(x)).mean(1))

    return job(Text, data=tokens)


def ensemble_of_functions() -> ps.Job:
    """Three nets by stack_module_state and functional_call under vmap; one stack of weights."""

    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            nets = [nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3)]
            params, _ = torch.func.stack_module_state(nets)
            self.base = [copy.deepcopy(nets[0]).to("meta")]
            self.stack = nn.ParameterDict(
                {k.replace(".", "_"): nn.Parameter(v.detach().clone()) for k, v in params.items()}
            )

        def forward(self, x):
            named = {k.replace("_", "."): v for k, v in self.stack.items()}
            return torch.vmap(lambda p: torch.func.functional_call(self.base[0], p, (x,)))(named)

    def loss(m, batch):
        outs = m(batch[0])
        return sum(F.cross_entropy(o, batch[1]) for o in outs) / 3 + 0.1 * outs.var(0).mean()

    return job(Ensemble, loss)


def forward_mode_derivative() -> ps.Job:
    """A Jacobian-vector product by torch.func.jvp along a random direction is penalised."""

    def loss(m, batch):
        v = torch.randn_like(batch[0])
        out, tangent = torch.func.jvp(m, (batch[0],), (v,))
        return F.cross_entropy(out, batch[1]) + 0.1 * tangent.square().mean()

    return job(lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)), loss)


def pruned_as_it_trains() -> ps.Job:
    """torch's prune masks a layer; a hook of the optimizer prunes more after each third step."""
    kept = []

    def model():
        m = nn.Sequential(
            nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)
        )
        prune.l1_unstructured(m[2], "weight", amount=0.2)
        kept[:] = [m]
        return m

    def opt(w):
        made = adam(w)
        made.turn = 0

        def more(o, *_):
            o.turn += 1
            if o.turn % 3 == 0:
                layer = kept[0][2]
                alive = layer.weight_orig.detach().abs() * layer.weight_mask
                bound = alive[alive > 0].quantile(0.1)
                layer.weight_mask.copy_((alive > bound).float())

        made.register_step_post_hook(more)
        return made

    return job(model, opt=opt)


def sparse_table() -> ps.Job:
    """An embedding of sparse gradients under SparseAdam, the rest under Adam, in one class."""

    class Both(torch.optim.Optimizer):
        def __init__(self, w):
            w = list(w)
            super().__init__(w, {"lr": 1e-2})
            self.sparse, self.dense = (
                torch.optim.SparseAdam(w[:1], 1e-2),
                torch.optim.Adam(w[1:], 1e-2),
            )

        def step(self, closure=None):
            self.sparse.step()
            self.dense.step()

    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = (
                nn.Embedding(16, 8, sparse=True),
                nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
            )

        def forward(self, x):
            return self.head(self.embed(x).mean(1))

    return job(Text, data=tokens, opt=Both)
