"""Steps of several shapes: texts in buckets, epochs that end short, batches as long as they are."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import penstock as ps

STEPS = {"padded_to_multiples": 48, "epochs_that_end_short": 14, "tagged_texts": 44}
WORDS, WIDTH = 24, 8


class Texts(nn.Module):
    def __init__(self, dropped=0.0):
        super().__init__()
        self.embed, self.middle = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.out = nn.Dropout(dropped), nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        means = self.embed(ids).cumsum(1) / torch.arange(1, 1 + ids.shape[1])[:, None]
        return self.out(self.drop(torch.tanh(self.middle(means))))


def texts(count=240, most=16, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, most + 1, (count,), generator=drawn).tolist()
    rows = [torch.randint(1, WORDS, (n,), generator=drawn) for n in lengths]
    return [{"x": row, "labels": row.roll(-1)} for row in rows]


def next_word(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def counted(batch):
    return (batch["labels"] != -100).sum()


def _job(data, loss=next_word, model=Texts, **options) -> ps.Job:
    adam = lambda weights: torch.optim.AdamW(weights, lr=3e-3)  # noqa: E731
    return ps.Job(model, loss, data, **{"optimizer": adam, "micro_batches": 1, **options})


def buckets_by_tokens() -> ps.Job:
    """Fewer of the long texts, dropout, and steps that are means over their tokens."""
    data = ps.bucketed(texts(), (4, 8, 16), (12, 6, 3), seed=3)
    return _job(data, model=lambda: Texts(0.1), weight=counted)


def buckets_of_thirteen() -> ps.Job:
    """A prime number of samples in one bucket, one in the other."""
    return _job(ps.bucketed(texts(), (8, 16), (13, 1), seed=1))


def buckets_in_two() -> ps.Job:
    """Two micro-batches a step, of one bucket each, and a norm that is clipped."""
    data = ps.bucketed(texts(), (8, 16), (6, 4), micro_batches=2, seed=2)
    return _job(data, micro_batches=2, clip_norm=0.5)


def buckets_that_reach_others() -> ps.Job:
    """Long texts train an own head: of short ones it has no gradient, and its moments stand."""

    class TwoHeads(Texts):
        def __init__(self):
            super().__init__()
            self.long = nn.Linear(WIDTH, WORDS)

        def forward(self, ids):
            if ids.shape[1] <= 8:
                return super().forward(ids)
            return self.long(torch.tanh(self.middle(self.embed(ids))))

    return _job(ps.bucketed(texts(), (8, 16), 6, seed=4), model=TwoHeads)


def epochs_that_end_short() -> ps.Job:
    """A loader of 44 rows by 8: each sixth step has four of them."""
    drawn = torch.Generator().manual_seed(5)
    rows = [(torch.randn(6, generator=drawn), k % 4) for k in range(44)]
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    model = lambda: nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))  # noqa: E731
    loader = DataLoader(rows, 8, shuffle=True, generator=torch.Generator().manual_seed(6))
    return _job(ps.from_loader(loader), loss, model)


def _padded(rows, multiple=8):
    most = -(-max(len(row["x"]) for row in rows) // multiple) * multiple
    x = torch.zeros(len(rows), most, dtype=torch.long)
    labels = torch.full((len(rows), most), -100)
    for at, row in enumerate(rows):
        x[at, : len(row["x"])] = row["x"]
        labels[at, : len(row["x"])] = row["labels"]
    return {"x": x, "labels": labels}


def _by_turns(seed):
    """Return texts, four short ones and four of any length by turns."""
    rows = texts(480, 14, seed)
    short = [row for row in rows if len(row["x"]) <= 8]
    return [row for at in range(0, 96, 4) for row in (*short[at : at + 4], *rows[-4 - at :][:4])]


def padded_to_multiples() -> ps.Job:
    """A collator that pads to a multiple of eight: two shapes, which nobody tells."""
    rows = _by_turns(0)
    return _job(ps.from_loader(DataLoader(rows, 4, collate_fn=_padded)))


def tagged_texts() -> ps.Job:
    """Batches of two shapes and a plain number."""

    def collate(rows):
        batch = _padded(rows)
        return batch | {"share": 0.5}

    def loss(model, batch):
        return next_word(model, batch) * batch["share"]

    return _job(ps.from_loader(DataLoader(_by_turns(1), 4, collate_fn=collate)), loss)


def temperature() -> ps.Job:
    """A number of the batch that changes from step to step."""

    def data(start):
        for number in range(start, 10_000):
            rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
            yield {"x": rows, "warmth": 1 / (2 + number)}

    def loss(model, batch):
        return (model(batch["x"]) * batch["warmth"]).square().mean()

    model = lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))  # noqa: E731
    return _job(data, loss, model)
