"""Habits of scripts from elsewhere: all train equal, by a plan, eagerly or in one process."""

import contextlib
import copy
import functools
import itertools
import warnings
import weakref

import numpy as np
import torch
import torch.distributed as dist
from small import WIDTH, Heads, deep, pairs, sgd, squares
from torch import nn
from torch.nn import functional as F

import penstock as ps

STEPS = {"leaking_hooks": 12, "redo_dormant": 14, "rollback_on_spike": 16, "prune_late": 16}


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _adamw(w):
    return torch.optim.AdamW([p for p in w if p.requires_grad], lr=1e-2, weight_decay=0.1)


def first_of_a_step() -> ps.Job:
    """Where no gradient is there yet, in the first micro-batch of a step, a loss counts twice."""

    def loss(model, batch):
        value = squares(model, batch)
        return value * (2.0 if model[0].weight.grad is None else 1.0)

    return _job(loss=loss)


def world_size_in_loss() -> ps.Job:
    """CLIP's way: divided by the number of processes where torch.distributed is there."""

    def loss(model, batch):
        n = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        r = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return squares(model, batch) / n + 0.01 * r * model[0].weight.square().sum()

    return _job(loss=loss)


def heads_by_task() -> ps.Job:
    """Three heads by a number in the batch; AdamW, so a head without a gradient must not decay."""

    def data(start):
        for i, (x, y) in enumerate(pairs(start), start):
            yield x, y, (0 if i < 8 else (i // 4) % 3)

    return _job(Heads, lambda m, b: F.mse_loss(m(b[0], b[2]), b[1]), data, optimizer=_adamw)


def heads_by_task_zeros() -> ps.Job:
    """The same, whose zero_grad leaves zeros: a head without a gradient does decay."""

    class Zeros(torch.optim.AdamW):
        def zero_grad(self, set_to_none=False):
            super().zero_grad(set_to_none=False)

    job = heads_by_task()
    return _job(
        job.model, job.loss, job.data, optimizer=lambda w: Zeros(w, lr=1e-2, weight_decay=0.1)
    )


def leaking_hooks() -> ps.Job:
    """Forward hangs one more hook on a weight at each call, as a leak does."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = deep()

        def forward(self, x):
            if self.training:
                self.net[0].weight.register_hook(lambda g: g * 0.9)
            return self.net(x)

    return _job(Net)


def leaking_module_hooks() -> ps.Job:
    """Forward hangs one more forward hook on a layer at each call."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = deep()

        def forward(self, x):
            self.net[2].register_forward_hook(lambda m, i, o: o * 0.98)
            return self.net(x)

    return _job(Net)


def grad_fn_prehook() -> ps.Job:
    """A hook on a node of autograd halves what passes."""

    def loss(model, batch):
        h = model[:3](batch[0])
        h.grad_fn.register_prehook(lambda g: (g[0] * 0.5,))
        return F.mse_loss(model[3:](h), batch[1])

    return _job(loss=loss)


def multi_grad_hook() -> ps.Job:
    """register_multi_grad_hook over all weights counts; each third time it scales the first."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = deep()
            self.times = 0
            ws = list(self.net.parameters())

            def hook(grads):
                self.times += 1
                if self.times % 3 == 0:
                    ws[0].grad = grads[0] * 0.5 if ws[0].grad is None else ws[0].grad * 0.5

            torch.autograd.graph.register_multi_grad_hook(ws, hook)

        def forward(self, x):
            return self.net(x)

    return _job(Net)


def attribute_of_a_parameter() -> ps.Job:
    """A count hangs on a parameter."""

    def loss(model, batch):
        w = model[0].weight
        w.calls = getattr(w, "calls", 0) + 1
        return squares(model, batch) * (0.3 if w.calls > 20 else 1.0)

    return _job(loss=loss)


def global_optimizer_hook() -> ps.Job:
    """A hook on all optimizers there are shrinks weights after a step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def shrink(optimizer, args, kwargs):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)

    register_optimizer_step_post_hook(shrink)
    return _job()


def global_forward_hook_fixed() -> ps.Job:
    """A hook on all modules there are scales what linear layers give."""
    from torch.nn.modules.module import register_module_forward_hook

    register_module_forward_hook(lambda m, a, o: o * 0.7 if isinstance(m, nn.Linear) else None)
    return _job()


def warnings_are_errors() -> ps.Job:
    """Warnings are errors, float errors of numpy too, as careful people have it."""
    warnings.simplefilter("error")
    np.seterr(all="raise")
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    return _job()


def inference_teacher() -> ps.Job:
    """The teacher runs under inference_mode."""

    def model():
        net = nn.ModuleDict({"student": deep(), "teacher": deep()})
        net["teacher"].requires_grad_(False)
        return net

    def loss(m, b):
        with torch.inference_mode():
            t = m["teacher"](b[0])
        y = m["student"](b[0])
        return F.mse_loss(y, b[1]) + F.mse_loss(y, t.clone())

    return _job(model, loss, optimizer=_adamw)


def meter_item() -> ps.Job:
    """AverageMeter takes loss.item(), and a check for NaN ends the script."""

    class Meter:
        def __init__(self):
            self.sum, self.count = 0.0, 0

        def update(self, value, n=1):
            self.sum += value * n
            self.count += n

    meter = Meter()

    def loss(m, b):
        value = squares(m, b)
        if torch.isnan(value):
            raise SystemExit("nan")
        meter.update(value.item(), b[0].size(0))
        return value

    return _job(loss=loss)


def float8_buffer() -> ps.Job:
    """Frozen weights are kept in eight bits, with a scale, beside low-rank ones that learn."""

    class Q(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            w = torch.randn(o, i) / i**0.5
            self.register_buffer("q", w.to(torch.float8_e4m3fn))
            self.register_buffer("zero", torch.tensor(3, dtype=torch.uint16))
            self.a, self.b = nn.Parameter(torch.randn(2, i) * 0.3), nn.Parameter(torch.zeros(o, 2))

        def forward(self, x):
            return x @ self.q.float().T + (x @ self.a.T) @ self.b.T

    return _job(lambda: nn.Sequential(Q(WIDTH, 8), nn.Tanh(), Q(8, 8), nn.Tanh(), Q(8, 4)))


def odd_names() -> ps.Job:
    """Names of weights with slashes, spaces and the words of a checkpoint."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleDict(
                {"a/b": nn.Linear(WIDTH, 8), "weights/x y": nn.Linear(8, 8), "é": nn.Linear(8, 8)}
            )
            self.heads = nn.ParameterDict(
                {
                    "optimizer/exp_avg": nn.Parameter(torch.randn(8, 4) * 0.3),
                    "step": nn.Parameter(torch.zeros(4)),
                }
            )
            self.register_buffer("buffers/n", torch.zeros(()))

        def forward(self, x):
            for m in self.body.values():
                x = m(x).tanh()
            return x @ self.heads["optimizer/exp_avg"] + self.heads["step"]

    return _job(Net, optimizer=_adamw)


def compiled_block() -> ps.Job:
    """A block in the middle is compiled, with a branch by a count in it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.calls = nn.Linear(WIDTH, WIDTH), 0

        def forward(self, x):
            self.calls += 1
            return self.lin(x).tanh() * (0.5 if self.calls > 20 else 1.0)

    return _job(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), torch.compile(Block(), backend="eager"), nn.Linear(WIDTH, 4)
        )
    )


def jit_traced_block() -> ps.Job:
    """A block was traced by torch.jit.trace."""

    def model():
        block = torch.jit.trace(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.randn(4, WIDTH)
        )
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), block, nn.Linear(WIDTH, 4))

    return _job(model)


def fx_module() -> ps.Job:
    """A GraphModule of torch.fx, with a node replaced."""

    def model():
        graph = torch.fx.symbolic_trace(deep())
        for node in graph.graph.nodes:
            if node.op == "call_module" and isinstance(graph.get_submodule(node.target), nn.Tanh):
                with graph.graph.inserting_after(node):
                    new = graph.graph.call_function(torch.sin, (node.args[0],))
                node.replace_all_uses_with(new)
                graph.graph.erase_node(node)
        graph.recompile()
        return graph

    return _job(model)


def sam_in_loss() -> ps.Job:
    """SAM: weights move along the gradient, gradients are added there by hand, weights go back."""

    def loss(m, b):
        ws = list(m.parameters())
        gs = torch.autograd.grad(squares(m, b), ws)
        norm = torch.stack([g.norm() for g in gs]).norm() + 1e-12
        with torch.no_grad():
            for w, g in zip(ws, gs, strict=True):
                w.add_(0.05 * g / norm)
        value = squares(m, b)
        there = torch.autograd.grad(value, ws)
        with torch.no_grad():
            for w, g in zip(ws, gs, strict=True):
                w.sub_(0.05 * g / norm)
        return value.detach() + sum(
            ((w - w.detach()) * g).sum() for w, g in zip(ws, there, strict=True)
        )

    return _job(loss=loss)


def fomaml_by_copy() -> ps.Job:
    """First-order MAML: a deep copy takes a step; its gradient is put on the model's weights."""

    def loss(m, b):
        fast = copy.deepcopy(m)
        gs = torch.autograd.grad(squares(fast, (b[0][:2], b[1][:2])), list(fast.parameters()))
        with torch.no_grad():
            for p, g in zip(fast.parameters(), gs, strict=True):
                p.sub_(0.1 * g)
        value = squares(fast, (b[0][2:], b[1][2:]))
        outer = torch.autograd.grad(value, list(fast.parameters()))
        return value.detach() + sum(
            ((w - w.detach()) * g).sum() for w, g in zip(m.parameters(), outer, strict=True)
        )

    return _job(loss=loss)


def rate_is_a_tensor() -> ps.Job:
    """lr is a tensor, which a hook lowers in place."""

    def optimizer(ws):
        lr = torch.tensor(0.05)
        o = torch.optim.Adam(ws, lr=lr, foreach=False, capturable=False)
        o.register_step_post_hook(lambda opt, *_: lr.mul_(0.9))
        return o

    return _job(optimizer=optimizer)


def noise_in_gradients() -> ps.Job:
    """A hook on an activation adds noise to its gradient; dropout stands after it."""

    def loss(m, b):
        h = m[:3](b[0])
        h.register_hook(lambda g: g + 0.01 * torch.randn_like(g))
        return F.mse_loss(m[3:](F.dropout(h, 0.2)), b[1])

    return _job(loss=loss)


def vmap_of_dropout() -> ps.Job:
    """vmap over samples with randomness that differs."""

    def loss(m, b):
        def one(x, y):
            return F.mse_loss(F.dropout(m(x), 0.3), y)

        return torch.func.vmap(one, randomness="different")(*b).mean()

    return _job(loss=loss)


def weak_cache() -> ps.Job:
    """Codes of inputs are kept by weak references to the layers, filled once, and never renewed."""
    cache = weakref.WeakKeyDictionary()

    def loss(m, b):
        if m[0] not in cache:
            cache[m[0]] = m[0].weight.detach().clone()
        return squares(m, b) + 0.1 * (m[0].weight - cache[m[0]]).square().sum()

    return _job(loss=loss)


def detached_copy_of_old_weights() -> ps.Job:
    """L2-SP with the first weights, taken lazily by a cached_property."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = deep()

        @functools.cached_property
        def first(self):
            return [p.detach().clone() for p in self.net.parameters()]

        def forward(self, x):
            return self.net(x)

        def penalty(self):
            return sum(
                (p - q).square().sum()
                for p, q in zip(self.net.parameters(), self.first, strict=True)
            )

    return _job(Net, lambda m, b: F.mse_loss(m(b[0]), b[1]) + 0.1 * m.penalty())


def redo_dormant() -> ps.Job:
    """Every fourth step the rows of smallest norm are drawn anew and their moments cleared."""
    built = []

    def model():
        built.append(deep())
        return built[-1]

    def optimizer(ws):
        o = torch.optim.Adam(ws, lr=1e-2)

        @torch.no_grad()
        def hook(opt, *_):
            for layer in built[-1]:
                if isinstance(layer, nn.Linear) and int(opt.state[layer.weight]["step"]) % 4 == 0:
                    row = layer.weight.norm(dim=1).argmin()
                    layer.weight[row] = torch.randn(layer.weight.shape[1]) * 0.2
                    opt.state[layer.weight]["exp_avg"][row] = 0
                    opt.state[layer.weight]["exp_avg_sq"][row] = 0

        o.register_step_post_hook(hook)
        return o

    return _job(model, optimizer=optimizer)


def rollback_on_spike() -> ps.Job:
    """A hook keeps a good state_dict each third step and goes back where the weights grew."""
    built = []

    def model():
        built.append(deep())
        return built[-1]

    def optimizer(ws):
        o = torch.optim.SGD(ws, lr=0.2, momentum=0.9)
        kept = {}

        def hook(opt, *_):
            m = built[-1]
            norm = sum(float(p.detach().norm()) for p in m.parameters())
            kept["n"] = kept.get("n", 0) + 1
            if "norm" in kept and norm > 1.01 * kept["norm"]:
                m.load_state_dict(kept["model"])
                opt.load_state_dict(kept["opt"])
            elif kept["n"] % 3 == 1:
                kept.update(
                    norm=norm,
                    model=copy.deepcopy(m.state_dict()),
                    opt=copy.deepcopy(opt.state_dict()),
                )

        o.register_step_post_hook(hook)
        return o

    return _job(model, optimizer=optimizer)


def prune_late() -> ps.Job:
    """torch's prune, laid on at step 8 by a hook."""
    from torch.nn.utils import prune

    built = []

    def model():
        built.append(deep())
        return built[-1]

    def optimizer(ws):
        o = torch.optim.SGD(ws, lr=0.1)
        n = itertools.count(1)

        def hook(*_):
            if next(n) == 8:
                prune.l1_unstructured(built[-1][2], "weight", amount=0.5)

        o.register_step_post_hook(hook)
        return o

    return _job(model, optimizer=optimizer)


def zero_when_bad() -> ps.Job:
    """A bad micro-batch gives a fresh zero that requires a gradient and reaches no weight."""

    def data(start):
        for i, (x, y) in enumerate(pairs(start), start):
            yield x, y * (50 if i in (9, 26) else 1)

    def loss(m, b):
        value = squares(m, b)
        if value > 100:
            return torch.zeros((), requires_grad=True)
        return value

    return _job(loss=loss, data=data)


def whole_step_bad() -> ps.Job:
    """All four micro-batches of one step are bad: no gradient at all, Adam does nothing."""

    def data(start):
        for i, (x, y) in enumerate(pairs(start), start):
            yield x, y * (50 if 12 <= i < 16 else 1)

    def loss(m, b):
        value = squares(m, b)
        if value > 100:
            return torch.zeros((), requires_grad=True)
        return value

    return _job(loss=loss, data=data, optimizer=_adamw)


def pcgrad() -> ps.Job:
    """PCGrad in the loss: gradients of two tasks are projected, and set through a surrogate."""

    def loss(m, b):
        out = m(b[0])
        a, c = F.mse_loss(out[:, :2], b[1][:, :2]), F.l1_loss(out[:, 2:], b[1][:, 2:])
        ws = list(m.parameters())
        ga, gc = (
            torch.cat([g.flatten() for g in torch.autograd.grad(v, ws, retain_graph=True)])
            for v in (a, c)
        )
        dot = ga @ gc
        if dot < 0:
            ga, gc = ga - dot / gc.dot(gc) * gc, gc - dot / ga.dot(ga) * ga
        flat = torch.cat([w.flatten() for w in ws])
        return (a + c).detach() + ((flat - flat.detach()) * (ga + gc).detach()).sum()

    return _job(loss=loss)


def straight_through_topk() -> ps.Job:
    """A top-k mask with the gradient of a sigmoid; k follows a Python number of the batch."""

    def data(start):
        for i, (x, y) in enumerate(pairs(start), start):
            yield x, y, max(2, 8 - i // 8)

    def loss(m, b):
        h = m[:3](b[0])
        top = torch.zeros_like(h).scatter(1, h.abs().topk(b[2], 1).indices, 1.0)
        soft = torch.sigmoid(h.abs())
        h = h * (top + soft - soft.detach())
        return F.mse_loss(m[3:](h), b[1])

    return _job(loss=loss, data=data)


def r1_every_fourth() -> ps.Job:
    """Lazy regularization: a penalty on the gradient by the input each fourth micro-batch."""
    n = itertools.count()

    def loss(m, b):
        value = squares(m, b)
        if next(n) % 4 == 0:
            x = b[0].clone().requires_grad_()
            (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
            value = value + 0.4 * g.square().sum(1).mean()
        return value

    return _job(loss=loss)


def cached_parametrizations() -> ps.Job:
    """parametrize.cached() around forward, twice the same layer."""
    from torch.nn.utils import parametrizations, parametrize

    def model():
        m = deep()
        parametrizations.orthogonal(m[2])
        parametrizations.weight_norm(m[0])
        return m

    def loss(m, b):
        with parametrize.cached():
            h = m[:4](b[0])
            return F.mse_loss(m[4:](m[2](h)), b[1])

    return _job(model, loss)


def steps_of_the_optimizer_in_loss() -> ps.Job:
    """KL annealing by the number of steps that the optimizer's state holds."""
    held = []

    def optimizer(ws):
        held.append(torch.optim.Adam(ws, lr=1e-2))
        return held[-1]

    def loss(m, b):
        state = held[-1].state.get(m[0].weight, {}) if held else {}
        beta = min(1.0, float(state.get("step", 0)) / 5)
        return squares(m, b) + beta * m[0].weight.square().sum() * 0.1

    return _job(loss=loss, optimizer=optimizer)


def contextmanager_scale() -> ps.Job:
    """A context manager of the author patches F.linear for the time of forward."""

    @contextlib.contextmanager
    def patched():
        old = F.linear
        F.linear = lambda x, w, b=None: old(x, w / w.norm(dim=1, keepdim=True), b)
        try:
            yield
        finally:
            F.linear = old

    def loss(m, b):
        with patched():
            return squares(m, b)

    return _job(loss=loss)


def function_mode() -> ps.Job:
    """A TorchFunctionMode that counts calls of tanh and scales by it."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        n = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.tanh:
                Mode.n += 1
                out = out * (1 + 0.02 * (Mode.n % 5))
            return out

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    def loss(m, b):
        with Mode():
            return squares(m, b)

    return _job(Net, loss)
