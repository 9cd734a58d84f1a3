"""What public repositories are made of: einops, caches of what is constant, scripted parts, hooks.

Nothing in these is state, so each trains by a plan as the plain loop does.
"""

import functools
import math
from functools import lru_cache, partial, wraps

import numpy as np
import torch
from einops import einsum, pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import Rearrange, Reduce
from small import WIDTH, classes, deep, entropy, images, pairs, sgd, squares, tokens
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import penstock as ps


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _adam(weights):
    return torch.optim.AdamW(weights, lr=0.01, eps=1e-2)


def _next_token(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


# -- helpers, as they stand at the top of many files ----------------------------------------------


def exists(value):
    return value is not None


def default(value, other):
    if exists(value):
        return value
    return other() if callable(other) else other


def once(function):
    called = False

    @wraps(function)
    def inner(*args):
        nonlocal called
        if called:
            return None
        called = True
        return function(*args)

    return inner


print_once = once(lambda text: None)


def cast_tuple(value, length=1):
    return value if isinstance(value, tuple) else (value,) * length


# -- einops ---------------------------------------------------------------------------------------


class _Wrapped(nn.Module):
    """A layer of the test between a linear layer and a head."""

    def __init__(self, inner, inputs=WIDTH, outputs=4) -> None:
        super().__init__()
        self.first, self.inner, self.head = (
            nn.Linear(inputs, WIDTH),
            inner,
            nn.Linear(WIDTH, outputs),
        )

    def forward(self, x):
        return self.head(self.inner(self.first(x)))


class _Rearranged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = rearrange(x, "b (h d) -> b (d h)", h=2)
        x = x + repeat(reduce(x, "b d -> b", "mean"), "b -> b d", d=WIDTH)
        return self.second(x)


def einops_functions() -> ps.Job:
    """rearrange, reduce and repeat in forward."""
    return _job(_Rearranged)


class RotaryEmbedding(nn.Module):
    """As in lucidrains' repositories: a cache of angles that grows with the longest sequence."""

    def __init__(self, dim, theta=10000) -> None:
        super().__init__()
        inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("cached_freqs", None, persistent=False)

    def forward(self, length, device):
        if exists(self.cached_freqs) and self.cached_freqs.shape[0] >= length:
            return self.cached_freqs[:length]
        t = torch.arange(length, device=device).type_as(self.inv_freq)
        freqs = torch.einsum("i , j -> i j", t, self.inv_freq)
        freqs = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cached_freqs", freqs, persistent=False)
        return freqs


def rotate_half(x):
    x = rearrange(x, "... (j d) -> ... j d", j=2)
    x1, x2 = x.unbind(dim=-2)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(pos, t):
    return (t * pos.cos()) + (rotate_half(t) * pos.sin())


class Attend(nn.Module):
    def __init__(self, dropout=0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.attn_dropout = nn.Dropout(dropout)
        self.register_buffer("mask", None, persistent=False)

    def get_mask(self, n, device):
        if exists(self.mask) and self.mask.shape[-1] >= n:
            return self.mask[:n, :n]
        mask = torch.ones((n, n), device=device, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        return mask

    def forward(self, q, k, v):
        n, scale = q.shape[-2], q.shape[-1] ** -0.5
        sim = einsum(q, k, "b h i d, b h j d -> b h i j") * scale
        sim = sim.masked_fill(self.get_mask(n, q.device), -torch.finfo(sim.dtype).max)
        attn = self.attn_dropout(sim.softmax(dim=-1))
        return einsum(attn, v, "b h i j, b h j d -> b h i d")


class Attention(nn.Module):
    def __init__(self, dim, heads=2, dim_head=8, dropout=0.0) -> None:
        super().__init__()
        inner = heads * dim_head
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.attend = Attend(dropout)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(dropout))

    def forward(self, x, rotary=None):
        q, k, v = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in (q, k, v))
        if exists(rotary):
            q, k = (apply_rotary_pos_emb(rotary, t) for t in (q, k))
        out = rearrange(self.attend(q, k, v), "b h n d -> b n (h d)")
        return self.to_out(out)


def feed_forward(dim, mult=2, dropout=0.0):
    return nn.Sequential(
        nn.LayerNorm(dim),
        nn.Linear(dim, dim * mult),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(dim * mult, dim),
    )


class _Lucid(nn.Module):
    def __init__(self, depth=2, dim=16, dropout=0.0) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(16, dim)
        self.rotary = RotaryEmbedding(8)
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(dim, dropout=dropout), feed_forward(dim, dropout=dropout)])
            for _ in range(depth)
        )
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 16, bias=False))

    def forward(self, x):
        print_once("using the slow attention")
        rotary = self.rotary(x.shape[1], x.device)
        x = self.token_emb(x)
        for attend, feed in self.layers:
            x = attend(x, rotary) + x
            x = feed(x) + x
        return self.to_logits(x)


def lucid_transformer() -> ps.Job:
    """Rotary embeddings and causal masks that are cached in buffers that no checkpoint holds."""
    return _job(_Lucid, _next_token, tokens, optimizer=_adam)


def lucid_transformer_with_dropout() -> ps.Job:
    """The same with dropout in attention and after it."""
    return _job(lambda: _Lucid(dropout=0.1), _next_token, tokens, optimizer=_adam)


class _Vit(nn.Module):
    """simple_vit: patches by a layer of einops, a table of sines, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.to_patch = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b h w (p1 p2 c)", p1=4, p2=4),
            nn.LayerNorm(48),
            nn.Linear(48, 16),
        )
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True), feed_forward(16)])
            for _ in range(2)
        )
        self.pool, self.head = Reduce("b n d -> b d", "mean"), nn.Linear(16, 4)

    def forward(self, x):
        x = self.to_patch(x)
        x = x + posemb_sincos_2d(x).view(*x.shape[1:])
        x, packed = pack([x], "b * d")
        for attend, feed in self.layers:
            x = attend(x, x, x, need_weights=False)[0] + x
            x = feed(x) + x
        (x,) = unpack(x, packed, "b * d")
        return self.head(self.pool(rearrange(x, "b h w d -> b (h w) d")))


def posemb_sincos_2d(patches, temperature=10000, dtype=torch.float32):
    _, h, w, dim = patches.shape
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    omega = torch.arange(dim // 4) / (dim // 4 - 1)
    omega = 1.0 / (temperature**omega)
    y, x = y.flatten()[:, None] * omega[None, :], x.flatten()[:, None] * omega[None, :]
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1).type(dtype)


def simple_vit() -> ps.Job:
    """Layers of einops, pack and unpack."""
    return _job(_Vit, entropy, images, optimizer=_adam)


# -- what is computed once and kept ---------------------------------------------------------------


@lru_cache(maxsize=8)
def _causal(length):
    return torch.full((length, length), float("-inf")).triu(1)


@functools.cache
def _slopes(heads):
    return [2 ** (-8 * (k + 1) / heads) for k in range(heads)]


_TABLES = {}


def _sinusoid(length, dim):
    key = (length, dim)
    if key not in _TABLES:
        place = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        _TABLES[key] = torch.cat([place.sin(), place.cos()], -1)
    return _TABLES[key]


class _Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.qkv = nn.Embedding(16, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, 16)
        self._alibi = None

    @property
    def alibi(self):
        if self._alibi is None:
            self._alibi = torch.tensor(_slopes(2)).view(1, 2, 1, 1)
        return self._alibi

    @functools.cached_property
    def scale(self):
        return 1 / math.sqrt(8)

    def forward(self, x):
        length = x.shape[1]
        x = self.emb(x) + _sinusoid(length, 16)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        place = torch.arange(length)
        bias = -(place[:, None] - place).abs() * self.alibi
        weights = (q @ k.mT * self.scale + bias + _causal(length)).softmax(-1)
        return self.head((weights @ v).transpose(1, 2).flatten(2))


def tables_of_all_kinds() -> ps.Job:
    """lru_cache, cached_property, a dict of the module, an attribute made when first read."""
    return _job(_Kept, _next_token, tokens)


class _Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.shapes, self.kernel, self.names = {}, None, set()

    def forward(self, x):
        if self.kernel is None:
            self.kernel = torch.hann_window(5).view(1, 1, -1)
        x = self.first(x)
        self.shapes[tuple(x.shape)] = self.shapes.get(tuple(x.shape), len(self.shapes))
        self.names.add(str(x.dtype))
        x = F.conv1d(x[:, None], self.kernel, padding=2)[:, 0]
        return self.head(x) * (2 if len(self.names) > 1 else 1)


def made_when_first_used() -> ps.Job:
    """A kernel, a dict of shapes and a set of names that the first call fills."""
    return _job(_Lazy)


class _Schedule(nn.Module):
    """A diffusion's tables as buffers, and noise of torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, 20, dtype=torch.float64)
        register = lambda name, value: self.register_buffer(name, value.float(), persistent=False)  # noqa: E731
        kept = torch.cumprod(1 - betas, 0)
        register("kept", kept.sqrt())
        register("lost", (1 - kept).sqrt())
        self.net = deep(4, WIDTH + 1, WIDTH)

    def forward(self, x):
        t = torch.randint(0, 20, (len(x),), device=x.device)
        noise = torch.randn_like(x)
        noisy = extract(self.kept, t, x.shape) * x + extract(self.lost, t, x.shape) * noise
        found = self.net(torch.cat([noisy, t[:, None] / 20], -1))
        return reduce(F.mse_loss(found, noise, reduction="none"), "b ... -> b", "mean").mean()


def extract(table, t, shape):
    return table.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))


def denoising_diffusion() -> ps.Job:
    """Times and noise are torch's; tables are buffers that no checkpoint holds."""
    return _job(_Schedule, lambda model, batch: model(batch[0]))


# -- nanoGPT, timm, torch's own -------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, dim=16, heads=2) -> None:
        super().__init__()
        self.heads, self.flash = heads, hasattr(F, "scaled_dot_product_attention")
        self.ln, self.attn, self.proj = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim)
        )

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            one.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for one in self.attn(self.ln(x)).split(c, dim=2)
        )
        drop = 0.1 if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(x)


class _NanoGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(16, 16),
                "wpe": nn.Embedding(8, 16),
                "h": nn.ModuleList([_Block() for _ in range(2)]),
                "ln_f": nn.LayerNorm(16),
            }
        )
        self.lm_head = nn.Linear(16, 16, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)

    def forward(self, idx, targets=None):
        assert idx.size(1) <= 8, "too long"
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits[:, [-1], :], None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def nano_gpt() -> ps.Job:
    """Tied weights, dropout in scaled_dot_product_attention, the loss in forward."""
    return _job(
        _NanoGpt,
        lambda model, x: model(x[:, :-1], x[:, 1:].contiguous())[1],
        tokens,
        optimizer=_adam,
    )


def drop_path(x, drop_prob: float = 0.0, training: bool = False, scale_by_keep: bool = True):
    """timm's, to the letter."""
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    if keep_prob > 0.0 and scale_by_keep:
        random_tensor.div_(keep_prob)
    return x * random_tensor


class DropPath(nn.Module):
    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self.scale_by_keep = scale_by_keep

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training, self.scale_by_keep)


class _ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, stride=2)
        rates = [x.item() for x in torch.linspace(0, 0.3, 3)]
        self.blocks = nn.ModuleList(_ConvNextBlock(8, rate) for rate in rates)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((-2, -1)))


class _ConvNextBlock(nn.Module):
    def __init__(self, dim, rate) -> None:
        super().__init__()
        self.mix = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm, self.up = nn.LayerNorm(dim), nn.Linear(dim, 16)
        self.act, self.down = nn.GELU(), nn.Linear(16, dim)
        self.gamma = nn.Parameter(0.5 * torch.ones(dim))
        self.drop_path = DropPath(rate) if rate > 0 else nn.Identity()

    def forward(self, x):
        y = self.mix(x).permute(0, 2, 3, 1)
        y = self.gamma * self.down(self.act(self.up(self.norm(y))))
        return x + self.drop_path(y.permute(0, 3, 1, 2))


def convnext_with_drop_path() -> ps.Job:
    """timm's DropPath, rates by `.item()`, layer scale."""
    return _job(_ConvNext, entropy, images)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            weight_norm(nn.Linear(WIDTH, WIDTH)),
            nn.Tanh(),
            nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False)),
            nn.Tanh(),
            weight_norm(nn.Linear(WIDTH, 4)),
        )

    def forward(self, x):
        return self.layers(x)


def parametrized() -> ps.Job:
    """weight_norm and orthogonal of torch.nn.utils.parametrizations."""
    return _job(_Normed)


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def parametrized_by_hand_and_cached() -> ps.Job:
    """A parametrization of one's own, under parametrize.cached()."""

    def model():
        made = deep()
        nn.utils.parametrize.register_parametrization(made[2], "weight", _Symmetric())
        return made

    def loss(model, batch):
        with nn.utils.parametrize.cached():
            return squares(model, batch)

    return _job(model, loss)


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.layers[2] = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.layers(x)


def spectral_norm() -> ps.Job:
    """spectral_norm, whose vectors are buffers that forward writes."""
    return _job(_Spectral)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < ctx.scale), None


def own_function() -> ps.Job:
    """A torch.autograd.Function with a straight-through gradient."""

    class _Layer(nn.Module):
        def forward(self, x):
            return _Rounded.apply(x, 64.0)

    return _job(lambda: _Wrapped(_Layer()))


def recorded_shapes() -> ps.Job:
    """Hooks that record shapes, norms and activations for a page that nobody reads."""

    def model():
        made = deep()
        made.shapes, made.activations = {}, {}
        for name, module in made.named_modules():
            module.register_forward_hook(partial(_record, made, name))
        return made

    def _record(made, name, module, given, out):
        made.shapes[name] = tuple(out.shape)
        made.activations[name] = out.detach()

    return _job(model)


@torch.jit.script
def _gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(y) + torch.nn.functional.softplus(x)


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a, b = self.up(x).chunk(2, dim=-1)
        return self.down(_gate(a, b))


def scripted_function() -> ps.Job:
    """An activation under torch.jit.script, as older code fuses."""
    return _job(lambda: _Wrapped(_Gated()))


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 2.0

    def forward(self, x):
        y = torch.tanh(self.first(x))
        if y.shape[-1] > 2:
            y = y * self.scale
        return self.second(y)


def scripted_module() -> ps.Job:
    """A layer that torch.jit.script made."""
    return _job(lambda: _Wrapped(torch.jit.script(_Plain())))


def traced_module() -> ps.Job:
    """A layer that torch.jit.trace made."""
    return _job(lambda: _Wrapped(torch.jit.trace(_Plain(), torch.zeros(4, WIDTH))))


def compiled_module() -> ps.Job:
    """One layer under torch.compile."""
    return _job(lambda: _Wrapped(torch.compile(_Plain(), backend="eager")))


class _Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) / 2)

    def forward(self, x):
        found = torch.fft.rfft(x, norm="ortho") * torch.view_as_complex(self.filter)
        return torch.fft.irfft(found, n=x.shape[-1], norm="ortho")


def global_filter() -> ps.Job:
    """A filter of frequencies: complex numbers."""
    return _job(lambda: _Wrapped(_Spectrum()))


def precompute_freqs_cis(dim, end):
    freqs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2).float() / dim))
    freqs = torch.outer(torch.arange(end), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


class _Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.qk, self.head = nn.Embedding(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.freqs_cis = precompute_freqs_cis(16, 8)

    def forward(self, x):
        length = x.shape[1]
        self.freqs_cis = self.freqs_cis.to(x.device)
        angles = self.freqs_cis[:length]
        x = self.emb(x)
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * angles
            )
            .flatten(-2)
            .type_as(t)
            for t in self.qk(x).chunk(2, -1)
        )
        mask = torch.full((length, length), float("-inf")).triu(1)
        return self.head(x + (q @ k.mT / 4 + mask).softmax(-1) @ x)


def llama_of_meta() -> ps.Job:
    """Rotary embeddings as complex numbers in a plain attribute that forward sets again."""
    return _job(_Llama, _next_token, tokens)


# -- torch.func, checkpoints, numbers of numpy ----------------------------------------------------


class _Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        each = torch.func.vmap(lambda w: torch.tanh(x @ w))(self.weights)
        return self.head(each.mean(0))


def ensemble_by_vmap() -> ps.Job:
    """torch.func.vmap over weights."""
    return _job(_Ensemble)


def physics_informed() -> ps.Job:
    """torch.func: the derivative of the network at each sample."""

    def loss(model, batch):
        slope = torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(batch[0])
        return squares(model, batch) + 0.1 * slope.square().mean()

    return _job(loss=loss)


class _Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([deep(2, outputs=WIDTH) for _ in range(4)])
        self.head, self.use_checkpoint = nn.Linear(WIDTH, 4), True

    def forward(self, x):
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.use_checkpoint else block
            x = x + 0.5 * run(x)
        return self.head(x)


def checkpointed_by_partial() -> ps.Job:
    """functools.partial around torch.utils.checkpoint."""
    return _job(_Repeated)


def checkpointed_reentrant() -> ps.Job:
    """The old kind of checkpoint, which runs its forward in the backward."""

    class _Old(_Repeated):
        def forward(self, x):
            x = x.requires_grad_()
            for block in self.blocks:
                x = x + 0.5 * checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    return _job(_Old)


@torch.no_grad()
def _targets(y, smoothing=0.1):
    return F.one_hot(y, 4).float() * (1 - smoothing) + smoothing / 4


def helper_without_gradients() -> ps.Job:
    """A helper under @torch.no_grad()."""
    return _job(
        loss=lambda model, batch: (
            -(_targets(batch[1]) * model(batch[0]).log_softmax(-1)).sum(-1).mean()
        ),
        data=classes,
    )


def numbers_of_numpy() -> ps.Job:
    """Factors that numpy makes: np.float32(0.5), np.sqrt(d), np.log, np.pi, an int64."""
    scale = np.float32(0.5)

    class _Scaled(nn.Module):
        def forward(self, x):
            x = x / np.sqrt(x.shape[-1]) + np.pi * x * np.float64(0.1)
            return x.view(len(x), np.int64(WIDTH)) * float(np.log(np.exp(1.0)))

    def loss(model, batch):
        return scale * squares(model, batch) * np.float32(2) + np.float64(0)

    return _job(lambda: _Wrapped(_Scaled()), loss)


def items_of_constants() -> ps.Job:
    """`.item()`, `.tolist()` and float() of tensors that are made of constants."""

    class _Fixed(nn.Module):
        def forward(self, x):
            steps = torch.linspace(0.5, 1.5, 3)
            for rate in steps.tolist():
                x = x * rate
            return x * steps.sum().item() / float(steps.max())

    return _job(lambda: _Wrapped(_Fixed()))


def generator_with_a_seed_of_its_own() -> ps.Job:
    """forward draws from torch.Generator().manual_seed(0), anew in each call: the same numbers."""

    class _Projected(nn.Module):
        def forward(self, x):
            source = torch.Generator().manual_seed(0)
            return x @ (torch.randn(WIDTH, WIDTH, generator=source) / 3)

    return _job(lambda: _Wrapped(_Projected()))


def einsum_made_at_run_time() -> ps.Job:
    """The text of an einsum is built from shapes."""

    class _Contracted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

        def forward(self, x):
            letters = "".join(chr(ord("a") + k) for k in range(x.ndim))
            return torch.einsum(f"{letters},{letters[-1]}z->{letters[:-1]}z", x, self.weight)

    return _job(lambda: _Wrapped(_Contracted()))


class _Words(nn.Module):
    """word_language_model of pytorch/examples: an LSTM with its hidden state given anew."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(16, WIDTH)
        self.rnn, self.decoder = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2), nn.Linear(WIDTH, 16)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def init_hidden(self, size):
        weight = next(self.parameters())
        return weight.new_zeros(2, size, WIDTH), weight.new_zeros(2, size, WIDTH)

    def forward(self, x):
        out, _ = self.rnn(self.drop(self.encoder(x.t())), self.init_hidden(len(x)))
        return self.decoder(self.drop(out)).transpose(0, 1)


def word_language_model() -> ps.Job:
    """An LSTM that begins with zeros of its own."""
    return _job(_Words, _next_token, tokens)


class _Mnist(nn.Module):
    """mnist of pytorch/examples, made small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def mnist_of_the_examples() -> ps.Job:
    """Dropout, log_softmax and nll_loss."""
    return _job(_Mnist, lambda model, batch: F.nll_loss(model(batch[0]), batch[1]), images)


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = (nn.Linear(WIDTH, 8), nn.Linear(8, 4), nn.Linear(8, 4))
        self.fc3, self.fc4 = nn.Linear(4, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        h = torch.tanh(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.fc4(torch.tanh(self.fc3(z))), mu, logvar


def vae_of_the_examples() -> ps.Job:
    """Reparametrization and the KL term."""

    def loss(model, batch):
        found, mu, logvar = model(batch[0])
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
        return (F.mse_loss(found, batch[0], reduction="none").sum(1) + 0.1 * kld).mean()

    return _job(_Vae, loss, optimizer=lambda w: torch.optim.SGD(w, 0.01))


def model_in_bfloat16() -> ps.Job:
    """`model.bfloat16()`: weights, gradients and updates in 16 bits."""

    def loss(model, batch):
        return F.mse_loss(model(batch[0].bfloat16()).float(), batch[1])

    return _job(lambda: deep().bfloat16(), loss)


def model_in_bfloat16_of_rows() -> ps.Job:
    """The same with layer norms, an embedding and AdamW."""

    def model():
        return nn.Sequential(
            nn.Embedding(16, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        ).to(torch.bfloat16)

    def loss(model, x):
        return F.cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())

    return _job(model, loss, tokens, optimizer=_adam)


class _Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(16, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x):
        state, outs = None, []
        for one in self.embedding(x).unbind(1):
            state = self.cell(one, state)
            outs.append(state[0])
        return self.head(torch.stack(outs, 1))


def cell_unrolled() -> ps.Job:
    """An LSTMCell in a loop over time."""
    return _job(_Unrolled, _next_token, partial(tokens, length=12))
