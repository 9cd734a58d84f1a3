"""Losses in which samples meet, some of them only in later micro-batches."""

import itertools

import torch
from small import WIDTH, deep, pair, sgd, squares
from torch import nn
from torch.nn import functional as F

import penstock as ps


def _job(loss=squares, data=None, model=deep, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data or _pairs, **options)


def _pairs(start):
    return (pair(index) for index in itertools.count(start))


def _labelled(index):
    source = torch.Generator().manual_seed(index)
    return torch.randn(4, WIDTH, generator=source), torch.randint(0, 4, (4,), generator=source)


def _labels(start):
    return (_labelled(index) for index in itertools.count(start))


def _each(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(1)


def labels_ignored_from_thirty_on() -> ps.Job:
    """From micro-batch 30 on up to three of four labels are -100."""

    def data(start):
        for index in itertools.count(start):
            x, y = _labelled(index)
            y[: index % 4 if index >= 30 else 0] = -100
            yield x, y

    return _job(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), data)


def mask_that_is_full_at_first() -> ps.Job:
    """The mean over unmasked samples; the first sixteen micro-batches have no masked ones."""

    def data(start):
        for index in itertools.count(start):
            kept = torch.arange(4) >= (index % 3 if index >= 16 else 0)
            yield *pair(index), kept

    def loss(model, batch):
        return (_each(model, batch) * batch[2]).sum() / batch[2].sum()

    return _job(loss, data)


def weights_of_samples_that_are_one_at_first() -> ps.Job:
    """A weighted mean, divided by the sum of weights; all are 1 up to micro-batch 20."""

    def data(start):
        for index in itertools.count(start):
            weight = torch.ones(4)
            if index >= 20:
                weight = torch.rand(4, generator=torch.Generator().manual_seed(index)) + 0.1
            yield {"x": pair(index)[0], "y": pair(index)[1], "weight": weight}

    def loss(model, batch):
        each = _each(model, (batch["x"], batch["y"]))
        return (each * batch["weight"]).sum() / batch["weight"].sum().clamp(min=1e-3)

    return _job(loss, data)


def rare_class_with_a_weight() -> ps.Job:
    """Weights of classes matter only where class 3 comes: from micro-batch 24 on."""

    def data(start):
        for index in itertools.count(start):
            x, y = _labelled(index)
            yield x, y if index >= 24 else y % 3

    weight = torch.tensor([1.0, 1.0, 1.0, 5.0])
    return _job(lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight), data)


def focal_by_the_number_of_positives() -> ps.Job:
    """A focal loss over the number of positives in the micro-batch, at least one."""

    def loss(model, batch):
        aims = (batch[1] > 0.8).float()
        out = model(batch[0])
        plain = F.binary_cross_entropy_with_logits(out, aims, reduction="none")
        focal = (1 - torch.exp(-plain)) ** 2 * plain
        return focal.sum() / aims.sum().clamp(min=1)

    return _job(loss)


def simclr() -> ps.Job:
    """Two views of each sample, stacked; all others are negatives."""

    def loss(model, batch):
        x = batch[0]
        found = F.normalize(model(torch.cat([x, x + 0.1 * batch[1].repeat(1, 2)])), dim=1)
        near = found @ found.t() / 0.5
        near = near.masked_fill(torch.eye(8, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(near, (torch.arange(8) + 4) % 8)

    return _job(loss)


def triplets_of_the_hardest() -> ps.Job:
    """The farthest of the same label and the nearest of another one, in the micro-batch."""

    def loss(model, batch):
        found, labels = model(batch[0]), batch[1] % 2
        apart = (found[:, None] - found[None]).square().sum(-1).add(1e-6).sqrt()
        same = labels[:, None] == labels[None]
        far = torch.where(same, apart, torch.zeros(())).amax(1)
        near = torch.where(same, torch.full((), 1e3), apart).amin(1)
        return F.softplus(far - near.clamp(max=4.0)).mean()

    return _job(loss, _labels)


def huber_by_the_spread_of_the_batch() -> ps.Job:
    """The delta of a Huber loss is the deviation of the micro-batch's residuals."""

    def loss(model, batch):
        apart = (model(batch[0]) - batch[1]).abs()
        delta = apart.detach().std()
        return torch.where(apart < delta, apart.square() / 2, delta * (apart - delta / 2)).mean()

    return _job(loss)


def clamped_against_a_spike() -> ps.Job:
    """The mean is clamped at 6, which only micro-batch 33 and later spikes exceed."""

    def data(start):
        for index in itertools.count(start):
            x, y = pair(index)
            yield x, y * 30 if index % 33 == 32 else y

    return _job(lambda m, b: squares(m, b).clamp(max=6.0), data)


def bad_batch_that_is_skipped() -> ps.Job:
    """A micro-batch whose mean is above 20 counts as nothing; the first is number 27."""

    def data(start):
        for index in itertools.count(start):
            x, y = pair(index)
            yield x, y * 30 if index % 28 == 27 else y

    def loss(model, batch):
        mean = squares(model, batch)
        return torch.where(mean > 20.0, torch.zeros(()), mean)

    return _job(loss, data)


def bad_batch_that_is_skipped_by_item() -> ps.Job:
    """The same by an `if loss.item() > 20`, which begins to matter at micro-batch 27."""

    def data(start):
        for index in itertools.count(start):
            x, y = pair(index)
            yield x, y * 30 if index % 28 == 27 else y

    def loss(model, batch):
        mean = squares(model, batch)
        if mean.item() > 20.0:
            return mean * 0.0
        return mean

    return _job(loss, data)


def beta_as_a_column() -> ps.Job:
    """Every row carries the same beta; the mean of them scales the mean of the losses."""

    def data(start):
        for index in itertools.count(start):
            yield *pair(index), torch.full((4,), 1.0 if index < 22 else 0.2 * (index % 5))

    return _job(lambda m, b: b[2].mean() * _each(m, b).mean(), data)


def beta_of_the_first_row() -> ps.Job:
    """Every row carries the step's beta, and the first one's is taken."""

    def data(start):
        for index in itertools.count(start):
            yield *pair(index), torch.full((4, 1), min(1.0, 0.1 + index / 50))

    return _job(lambda m, b: b[2][0, 0] * _each(m, b).mean(), data)


def sum_over_a_number_written_down() -> ps.Job:
    """The sum over samples is divided by 4, as the author knows that there are four."""
    return _job(lambda m, b: _each(m, b).sum() / 4)


def first_sample_counts_twice() -> ps.Job:
    """The first sample of each micro-batch is a prompt and has a term of its own."""
    return _job(lambda m, b: _each(m, b).mean() + 0.5 * _each(m, b)[0])


def weights_by_position() -> ps.Job:
    """Samples weigh 0.5 to 1.5 by where they stand in the micro-batch."""
    return _job(lambda m, b: (_each(m, b) * torch.linspace(0.5, 1.5, len(b[0]))).mean())


def mixed_with_the_sample_before() -> ps.Job:
    """Mixup with the micro-batch turned round."""

    def loss(model, batch):
        x, y = (0.7 * part + 0.3 * part.flip(0) for part in batch)
        return F.mse_loss(model(x), y)

    return _job(loss)


def root_of_the_mean() -> ps.Job:
    """The root of the mean square: no sum over samples."""
    return _job(lambda m, b: (squares(m, b) + 1e-6).sqrt())


def logarithm_of_the_mean() -> ps.Job:
    """log1p of the mean."""
    return _job(lambda m, b: squares(m, b).log1p())


def balance_of_the_batch() -> ps.Job:
    """A second term is the square of the mean output over the micro-batch."""
    return _job(lambda m, b: squares(m, b) + m(b[0]).mean(0).square().sum())


def dice() -> ps.Job:
    """One ratio of two sums over the whole micro-batch."""

    def loss(model, batch):
        found, aims = model(batch[0]).sigmoid(), (batch[1] > 0).float()
        return 1 - (2 * (found * aims).sum() + 1) / (found.sum() + aims.sum() + 1)

    return _job(loss)


def worst_group() -> ps.Job:
    """The worse of two groups' mean losses; groups come from the batch."""

    def loss(model, batch):
        each, group = _each(model, batch[:2]), batch[2]
        sums = torch.zeros(2).index_add(0, group, each)
        counts = torch.zeros(2).index_add(0, group, torch.ones(4)).clamp(min=1)
        return (sums / counts).max()

    def data(start):
        for index in itertools.count(start):
            yield *pair(index), torch.arange(4) % 2 if index % 3 else torch.zeros(4).long()

    return _job(loss, data)


def hardest_two_of_four() -> ps.Job:
    """The mean over the two samples with the largest losses."""
    return _job(lambda m, b: _each(m, b).topk(2).values.mean())


def pairs_in_order() -> ps.Job:
    """Pairwise ranking: every two samples of the micro-batch in the order of their targets."""

    def loss(model, batch):
        found, aims = model(batch[0])[:, 0], batch[1][:, 0]
        first = aims[:, None] > aims[None]
        return (F.softplus(found[None] - found[:, None]) * first).sum() / first.sum()

    return _job(loss)


def decorrelated() -> ps.Job:
    """VICReg's terms: spread of each output over the micro-batch, and covariance of any two."""

    def loss(model, batch):
        out = model(batch[0])
        centred = out - out.mean(0)
        covariance = centred.t() @ centred / (len(out) - 1)
        spread = F.relu(1 - (out.var(0) + 1e-4).sqrt()).mean()
        return squares(model, batch) + spread + covariance.tril(-1).square().sum()

    return _job(loss)


def four_samples_and_no_other_number() -> ps.Job:
    """The loss asserts that there are four samples and makes two by two of them."""

    def loss(model, batch):
        assert len(batch[0]) == 4, "a batch has four samples"
        out = model(batch[0]).view(2, 2, 4)
        return (out[0] - out[1] - batch[1].view(2, 2, 4)[0]).square().mean()

    return _job(loss)


class _Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, WIDTH) for _ in range(3))
        self.rest = deep(3, 3 * WIDTH, 1)

    def forward(self, numbers):
        rows = [table(row) for table, row in zip(self.tables, numbers, strict=True)]
        return self.rest(torch.cat(rows, 1)).squeeze(1)


def tables_in_the_first_dimension() -> ps.Job:
    """Indices are one row for each table, as DLRM has them: samples are dimension 1."""

    def data(start):
        for index in itertools.count(start):
            source = torch.Generator().manual_seed(index)
            numbers = torch.randint(0, 20, (3, 5), generator=source)
            yield numbers, (numbers.sum(0) % 2).float()

    def loss(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return _job(loss, data, _Tables)


def connectionist() -> ps.Job:
    """CTC: its mean is over samples after each is divided by its target's length."""

    def data(start):
        for index in itertools.count(start):
            source = torch.Generator().manual_seed(index)
            x = torch.randn(9, 4, WIDTH, generator=source)
            lengths = torch.randint(1, 4, (4,), generator=source)
            yield x, torch.randint(1, 4, (4, 3), generator=source), lengths

    def loss(model, batch):
        x, targets, lengths = batch
        found = model(x).log_softmax(-1)
        return F.ctc_loss(found, targets, torch.full((4,), 9), lengths)

    return _job(loss, data)


def temperature_that_the_loss_moves() -> ps.Job:
    """The loss divides by a buffer and then moves it towards the spread of the outputs."""

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep()
            self.register_buffer("temperature", torch.ones(()))

    def loss(model, batch):
        out = model.layers(batch[0])
        found = F.cross_entropy(out / model.temperature.clone(), batch[1])
        with torch.no_grad():
            model.temperature.mul_(0.9).add_(0.1 * out.std())
        return found

    return _job(loss, _labels, Tempered)


def states_along_the_batch() -> ps.Job:
    """The rows of a micro-batch are one sequence: a running mean goes along them."""

    def loss(model, batch):
        out = model(batch[0]).cumsum(0) / torch.arange(1, 5)[:, None]
        return F.mse_loss(out, batch[1])

    return _job(loss)
