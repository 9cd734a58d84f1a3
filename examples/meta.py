"""Meta-learning of a recommender: one inner step for each user, embeddings divided by rows.

    penstock train examples/meta.py --ranks 2 --set rules=rules.toml     with these lines in it:

        [[rule]]
        split = "table"  # in two slices of rows

        [[rule]]
        shard = "table"  # each of these divided among the replicas

A task is a user: of some records he is to be known (support), on others he is judged (query).  MAML
takes one step of gradient on the support, from weights that all users share, and learns these
weights by the loss of the query behind that step, through it.  Rows of the table that support and
query need are looked up together, once; the inner step changes these rows and the dense net.

Records come as a log of all users; `Users` groups them, so that a batch is of one user.  A step is
the mean over several users: each rank has its own, and gradients of the dense net are summed over
ranks.  By the rules above each rank keeps, and updates, half of the table's rows.

Source: "G-Meta: Distributed meta learning in GPU clusters for large-scale recommender systems",
arXiv:2401.04338.

Letters of tensor shapes: R records, F fields, U rows that a batch needs, D numbers of a row.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

import penstock as ps

ITEMS, PLACES, ROWS = 480, 32, 512  # rows of items, then those of places
USERS, RECORDS, TASTES = 400, 40_000, 3
SUPPORT, QUERY, NUMBERS, D = 24, 24, 2, 16
INNER_RATE, STEPS, TASKS = 1.0, 300, 4  # users of a step: TASKS
HELD_OUT = 40  # the last users are for validation

Batch = dict[str, Tensor]


class Log(NamedTuple):
    """Records of all users as they come: who, what, beside what, and whether he liked it."""

    user: Tensor
    fields: Tensor
    numbers: Tensor
    liked: Tensor


@cache
def log() -> Log:
    """Return records of users with tastes: items and users are points, near ones are liked."""
    generator = torch.Generator().manual_seed(0)
    user_R = torch.randint(USERS, (RECORDS,), generator=generator)
    item_R = torch.randint(ITEMS, (RECORDS,), generator=generator)
    place_R = ITEMS + torch.randint(PLACES, (RECORDS,), generator=generator)
    kind = torch.randint(TASTES, (ITEMS,), generator=generator)
    taste = torch.randint(2, (USERS, TASTES), generator=generator) * 4.0 - 2.0
    numbers = torch.randn(RECORDS, NUMBERS, generator=generator)
    sure_R = taste[user_R, kind[item_R]] + 0.5 * numbers[:, 0]
    liked_R = torch.rand(RECORDS, generator=generator) < sure_R.sigmoid()
    return Log(user_R, torch.stack([item_R, place_R], 1), numbers, liked_R.float())


class Users:
    """A dataset of tasks: each of some records of one user, in the order of the log."""

    def __init__(self, records: Log, users: Iterable[int], size: int) -> None:
        self.records = records
        order = records.user.argsort(stable=True)  # what is read together lies together
        first = F.pad(records.user.bincount(minlength=USERS).cumsum(0), (1, 0)).tolist()
        parts = [order[first[user] : first[user + 1]].split(size) for user in users]
        self.tasks = [task for own in parts for task in own if len(task) == size]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, number: int) -> Batch:
        """Return a task: the rows that it needs, each once, and where its records find them."""
        mine = self.tasks[number]
        rows, places_RF = self.records.fields[mine].unique(return_inverse=True)
        room = len(mine) * self.records.fields.shape[1]  # of all tasks alike; nobody reads the rest
        return {
            "rows": F.pad(rows, (0, room - len(rows))),
            "places": places_RF,
            "numbers": self.records.numbers[mine],
            "liked": self.records.liked[mine],
        }


def alone(tasks: list[Batch]) -> Batch:
    """Return the only task of a batch."""
    (task,) = tasks
    return task


@cache
def users(first: int, end: int) -> Users:
    return Users(log(), range(first, end), SUPPORT + QUERY)


def validation() -> Iterator[Batch]:
    tasks = users(USERS - HELD_OUT, USERS)
    return (tasks[number] for number in range(len(tasks)))


class Recommender(nn.Module):
    """A table of all fields' rows, and a dense net over those of a record and its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, D)
        self.dense = nn.Sequential(nn.Linear(2 * D + NUMBERS, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, rows_UD: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        given = torch.cat([rows_UD[batch["places"]].flatten(1), batch["numbers"]], 1)
        return self.dense(given)[:, 0]


def parts(batch: Batch) -> tuple[Batch, Batch]:
    """Return support and query."""
    names = "places", "numbers", "liked"
    return {n: batch[n][:SUPPORT] for n in names}, {n: batch[n][SUPPORT:] for n in names}


def adapted(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor], Batch]:
    """Return rows and dense weights behind the inner step, and the query."""
    support, query = parts(batch)
    rows_UD = model.get_submodule("table")(batch["rows"])
    dense: dict[str, Tensor] = {
        name: weight for name, weight in model.named_parameters() if name.startswith("dense.")
    }
    liked = functional_call(model, dense, (rows_UD, support))
    inner = F.binary_cross_entropy_with_logits(liked, support["liked"])
    slopes = torch.autograd.grad(inner, [rows_UD, *dense.values()], create_graph=True)
    moved = (w - INNER_RATE * s for w, s in zip(dense.values(), slopes[1:], strict=True))
    return rows_UD - INNER_RATE * slopes[0], dict(zip(dense, moved, strict=True)), query


def loss(model: nn.Module, batch: Batch) -> Tensor:
    rows_UD, dense, query = adapted(model, batch)
    liked = functional_call(model, dense, (rows_UD, query))
    return F.binary_cross_entropy_with_logits(liked, query["liked"])


def metrics(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, int]]:
    """Return how many of the query are judged rightly: known by the support, and as a stranger."""
    with torch.enable_grad():
        rows_UD, dense, query = adapted(model, batch)
    known = functional_call(model, dense, (rows_UD, query)) > 0
    strange = model(model.get_submodule("table")(batch["rows"]), query) > 0
    right, count = query["liked"] > 0, len(known)
    return {"known": ((known == right).sum(), count), "strange": ((strange == right).sum(), count)}


def optimizer(weights: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(weights, lr=1e-2)


def job() -> ps.Job:
    return ps.Job(
        model=Recommender,
        loss=loss,
        data=ps.batches(users(0, USERS - HELD_OUT), 1, collate=alone),
        optimizer=optimizer,
        micro_batches=TASKS,
        num_steps=STEPS,
        validation=validation,
        metrics=metrics,
    )
