"""Twenty and more ordinary scripts: what people train, with nothing odd but being real."""

import copy
import itertools

import torch
import transformers as hf
from small import WIDTH, classes, deep, entropy, images, pairs, sgd, squares, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps

THIRD = {
    "mlp": "2bw",
    "gru": "2bw",
    "transformer": "v",
    "mlp_in_bfloat16": "zero bubble",
    "mlp_in_bfloat16_with_clipping": "chimera",
}


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _adam(weights):
    return torch.optim.AdamW(weights, lr=0.01, eps=1e-2)


def mlp() -> ps.Job:
    """A few linear layers and SGD with momentum."""
    return _job()


def mlp_with_clipping() -> ps.Job:
    """AdamW, clipping, a rate that warms up."""
    return _job(optimizer=_adam, clip_norm=0.1, learning_rate=lambda step: min(1, (step + 1) / 4))


def cnn() -> ps.Job:
    """Convolutions, group norm, pooling."""

    def model():
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten()),
            nn.Linear(8 * 16, 4),
        )

    return _job(model, entropy, images)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3)
        )
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = self.stem(x)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = x + F.silu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


def resnet() -> ps.Job:
    """Residual blocks with batch norm, the real thing made small."""
    return _job(
        _Residual, entropy, images, optimizer=lambda w: torch.optim.SGD(w, 0.02, momentum=0.5)
    )


def _next_token(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


class _Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.place = nn.Parameter(torch.randn(5, 16) / 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 16, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x):
        x = self.embedding(x) + self.place
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


def transformer() -> ps.Job:
    """torch's own encoder layers with a causal mask."""
    return _job(_Transformer, _next_token, tokens, optimizer=_adam)


def transformer_with_dropout() -> ps.Job:
    """Dropout everywhere, also in attention."""
    return _job(lambda: _Transformer(0.2), _next_token, tokens, optimizer=_adam)


def transformer_with_tied_embedding() -> ps.Job:
    """The head is the embedding."""
    return _job(lambda: _Transformer(tied=True), _next_token, tokens, optimizer=_adam)


class _Recurrent(nn.Module):
    def __init__(self, cell) -> None:
        super().__init__()
        self.embedding, self.cells = nn.Embedding(16, WIDTH), cell
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x):
        return self.head(self.cells(self.embedding(x))[0])


def lstm() -> ps.Job:
    """Two layers of LSTM."""
    return _job(lambda: _Recurrent(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)), _next_token, tokens)


def gru() -> ps.Job:
    """A GRU."""
    return _job(lambda: _Recurrent(nn.GRU(WIDTH, WIDTH, batch_first=True)), _next_token, tokens)


def frozen_layers() -> ps.Job:
    """The first layers are frozen, as in fine-tuning."""

    def model():
        made = deep(5)
        for layer in (made[0], made[2]):
            layer.requires_grad_(False)
        return made

    return _job(model)


def low_rank_adapters() -> ps.Job:
    """Frozen weights beside two small matrices each, one of them zero at first."""

    class _Adapted(nn.Module):
        def __init__(self, base) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
            self.up = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x):
            return self.base(x) + x @ self.down.t() @ self.up.t()

    def model():
        made = deep()
        for at in (0, 2, 4, 6):
            made[at] = _Adapted(made[at])
        return made

    return _job(model)


def dropout_and_checkpointing() -> ps.Job:
    """Blocks with dropout under torch.utils.checkpoint."""

    class _Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)
            )
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return _job(_Checkpointed)


def checkpointing_without_dropout() -> ps.Job:
    """Blocks under torch.utils.checkpoint."""

    class _Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = deep(3, outputs=WIDTH), deep(3), nn.Linear(4, 4)

        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=False)
            return self.head(checkpoint(self.second, x, use_reentrant=False))

    return _job(_Checkpointed)


def mlp_in_bfloat16() -> ps.Job:
    """autocast to bfloat16."""
    return _job(autocast="bfloat16")


def mlp_in_bfloat16_with_clipping() -> ps.Job:
    """autocast to bfloat16, and clipping."""
    return _job(autocast="bfloat16", clip_norm=0.1)


COMMON = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}


def _collated(start: int):
    """Yield what a Trainer's collator makes: padded ids, a mask, labels of -100 where padded."""
    for index in itertools.count(start):
        source = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 16, (2, 8), generator=source)
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        yield hf.BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})


def _own_loss(model, batch):
    return model(**batch).loss


def llama_of_transformers() -> ps.Job:
    """A Llama of transformers, batches as its collators make them: BatchEncoding."""
    config = hf.LlamaConfig(num_key_value_heads=1, **COMMON)
    return _job(lambda: hf.LlamaForCausalLM(config), _own_loss, _collated, optimizer=_adam)


def gpt2_of_transformers() -> ps.Job:
    """GPT-2 with its dropout and tied embedding."""
    config = hf.GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return _job(lambda: hf.GPT2LMHeadModel(config), _own_loss, _collated, optimizer=_adam)


def bert_of_transformers() -> ps.Job:
    """BERT for masked words, no dropout."""
    config = hf.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **COMMON)
    return _job(
        lambda: hf.BertForMaskedLM(config),
        _own_loss,
        lambda start: (dict(batch) for batch in _collated(start)),
        optimizer=_adam,
    )


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = deep(3, outputs=WIDTH)
        self.near, self.far = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.scales = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.near(x), self.far(x)


def several_losses() -> ps.Job:
    """Two heads, their losses weighed by learned variances."""

    def loss(model, batch):
        near, far = model(batch[0])
        each = torch.stack([F.mse_loss(near, batch[1]), F.l1_loss(far, batch[1])])
        return (each * (-model.scales).exp() + model.scales).sum()

    return _job(_TwoHeads, loss)


def contrastive() -> ps.Job:
    """The negatives of a sample are the others of its micro-batch, which therefore cannot grow."""

    def loss(model, batch):
        a = F.normalize(model(batch[0]))
        b = F.normalize(model(batch[0] + 0.2 * F.pad(batch[1], (0, 4))))
        return F.cross_entropy(a @ b.t() / 0.3, torch.arange(len(a)))

    return _job(loss=loss)


def summed_loss() -> ps.Job:
    """A sum over samples instead of a mean, so a joined micro-batch would weigh more."""
    return _job(
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1], reduction="sum") / 10
    )


def mean_over_tokens_that_count() -> ps.Job:
    """The mean over those targets that are not masked, whose number differs by micro-batch."""

    def loss(model, batch):
        keep = (batch[1] > 0).float()
        return ((model(batch[0]) - batch[1]).square() * keep).sum() / keep.sum()

    return _job(loss=loss)


class _Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = deep(3, outputs=WIDTH), deep(3, outputs=1)


def adversaries_at_once() -> ps.Job:
    """A GAN whose two losses are one sum, each blind to the other's weights."""

    def loss(model, batch):
        made = model.maker(batch[0])
        real = model.critic(F.pad(batch[1], (0, 4)))
        frozen = {n: p.detach() for n, p in model.critic.named_parameters()}
        fooled = torch.func.functional_call(model.critic, frozen, (made,))
        critic = F.softplus(-real).mean() + F.softplus(model.critic(made.detach())).mean()
        return critic + F.softplus(-fooled).mean()

    return _job(_Adversaries, loss, optimizer=lambda w: torch.optim.SGD(w, 0.05))


def adversaries_in_turns() -> ps.Job:
    """A GAN that trains maker and critic in turns, by a counter in the loss."""
    turns = itertools.count()

    def loss(model, batch):
        made = model.maker(batch[0])
        if next(turns) % 2:
            return F.softplus(-model.critic(made)).mean()
        real = model.critic(F.pad(batch[1], (0, 4)))
        return F.softplus(-real).mean() + F.softplus(model.critic(made.detach())).mean()

    return _job(_Adversaries, loss, optimizer=lambda w: torch.optim.SGD(w, 0.05))


def gradient_penalty() -> ps.Job:
    """The loss differentiates: a penalty on the gradient at the inputs."""

    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    return _job(loss=loss)


def sparse_embedding() -> ps.Job:
    """An embedding with sparse gradients."""

    def model():
        return nn.Sequential(nn.Embedding(16, WIDTH, sparse=True), deep(3, outputs=16))

    return _job(model, _next_token, tokens, optimizer=lambda w: torch.optim.SGD(w, lr=0.1))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(deep(2, outputs=WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            out = out + ((chosen == k) * weights).sum(-1, keepdim=True) * expert(x)
        return self.head(out)


def mixture_of_experts() -> ps.Job:
    """Two of three experts for every sample, all computed."""
    return _job(_Experts)


class _Routed(_Experts):
    def forward(self, x):
        x = torch.tanh(self.first(x))
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(-1)
            out = out.index_copy(0, rows, expert(x[rows]))
        return self.head(out)


def experts_by_rows() -> ps.Job:
    """Each expert gets the rows that chose it: their number depends on the data; some get none."""
    return _job(_Routed)


def distilled() -> ps.Job:
    """A frozen teacher, made once with the job, that is no part of the model."""
    torch.manual_seed(9)
    teacher = deep().eval().requires_grad_(False)

    def loss(model, batch):
        return squares(model, batch) + F.mse_loss(model(batch[0]), teacher(batch[0]))

    return _job(loss=loss)


def copied_blocks() -> ps.Job:
    """Blocks made by deepcopy, so all begin with the same weights."""

    def model():
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        return nn.Sequential(*(copy.deepcopy(block) for _ in range(4)), nn.Linear(WIDTH, 4))

    return _job(model)


def variational() -> ps.Job:
    """A variational autoencoder: noise in forward, from torch's own generator."""

    class _Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = deep(3, outputs=6), deep(3, inputs=3)

        def forward(self, x):
            mean, scale = self.encode(x).chunk(2, -1)
            return self.decode(mean + torch.randn_like(mean) * (0.5 * scale).exp()), mean, scale

    def loss(model, batch):
        out, mean, scale = model(batch[0])
        divergence = -0.5 * (1 + scale - mean.square() - scale.exp()).mean()
        return F.mse_loss(out, batch[1]) + 0.1 * divergence

    return _job(_Variational, loss)


def diffusion() -> ps.Job:
    """A time and noise for every sample, drawn in the loss."""

    def loss(model, batch):
        time = torch.rand(len(batch[0]), 1)
        noise = torch.randn_like(batch[1])
        noisy = (1 - time) * batch[1] + time * noise
        return F.mse_loss(model(torch.cat([noisy, batch[0][:, :3], time], 1)), noise)

    return _job(loss=loss)


def unused_parameters() -> ps.Job:
    """A head that no loss reaches: no gradient, so AdamW must not decay it."""
    return _job(
        _TwoHeads,
        lambda model, batch: F.mse_loss(model(batch[0])[0], batch[1]),
        optimizer=lambda w: torch.optim.AdamW(w, lr=0.02, eps=1e-3, weight_decay=0.5),
    )


def classes_with_weights() -> ps.Job:
    """Cross entropy with weights of the classes, whose mean is by the weights of the batch."""
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return _job(
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=weights),
        data=classes,
    )


def float64_throughout() -> ps.Job:
    """Model and data in float64."""
    return _job(
        lambda: deep().double(),
        data=lambda start: ((x.double(), y.double()) for x, y in pairs(start)),
    )


def some_layers_in_bfloat16() -> ps.Job:
    """The middle of the model keeps its weights in bfloat16."""

    class _Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
            self.middle = deep(3, outputs=WIDTH).bfloat16()

        def forward(self, x):
            return self.last(self.middle(torch.tanh(self.first(x)).bfloat16()).float())

    return _job(_Mixed)
