"""State that a script keeps in Python, where recipes keep it; some of it is at work only later."""

import builtins
import collections
import decimal
import functools
import io
import itertools
import random
import threading

import numpy as np
import torch
from small import WIDTH, deep, pair, pairs, sgd, squares
from torch import nn
from torch.nn import functional as F

import penstock as ps

random.seed(11)
np.random.seed(12)


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def python_seeded_at_the_top() -> ps.Job:
    """The loss asks random.random(); random.seed stands at the top of the file."""
    return _job(loss=lambda m, b: squares(m, b) * (0.5 + random.random()))


def numpy_seeded_at_the_top() -> ps.Job:
    """Noise of numpy's own generator in the loss; np.random.seed stands at the top."""

    def loss(model, batch):
        noise = torch.from_numpy(np.random.randn(*batch[0].shape).astype(np.float32))
        return squares(model, (batch[0] + 0.1 * noise, batch[1]))

    return _job(loss=loss)


def columns_by_a_curriculum() -> ps.Job:
    """The loss counts its calls and uses one more column after each thirteen of them."""
    calls = itertools.count()

    def loss(model, batch):
        used = min(WIDTH, 5 + next(calls) // 13)
        x = batch[0].clone()
        x[:, used:] = 0
        return squares(model, (x, batch[1]))

    return _job(loss=loss)


def order_of_rank_in_a_cache() -> ps.Job:
    """lru_cache over a function of nothing that draws a permutation once."""

    @functools.lru_cache
    def order():
        return torch.tensor(random.Random(3).sample(range(WIDTH), WIDTH))

    return _job(loss=lambda m, b: squares(m, (b[0][:, order()], b[1])))


def cache_that_misses_at_call_23() -> ps.Job:
    """An lru_cache of the count // 23: what it keeps is the loss seen when it missed."""
    calls, last = itertools.count(), [1.0]

    @functools.lru_cache
    def scale(number):
        return last[-1]

    def loss(model, batch):
        found = squares(model, batch) * scale(next(calls) // 23)
        last[:] = [0.5]
        return found

    return _job(loss=loss)


def carried_in_a_closure() -> ps.Job:
    """A hidden state in a dict of the closure, detached after each micro-batch."""
    carried = {}

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x):
            hidden = self.cell(x, carried.get("hidden", torch.zeros(4, WIDTH)))
            carried["hidden"] = hidden.detach()
            return self.head(hidden)

    return _job(Cell)


class _Extra(nn.Module):
    """Counts its calls in a number that it saves as its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = deep(), 0

    def forward(self, x):
        self.calls += 1
        return self.layers(x) / (1 + self.calls / 30)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def counter_in_the_extra_state() -> ps.Job:
    """get_extra_state has the number of calls, by which forward divides."""
    return _job(_Extra)


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.source = deep(), np.random.RandomState(4)

    def forward(self, x):
        scale = 1 + 0.1 * self.source.rand(x.shape[0], 1).astype("float32")
        return self.layers(x) * torch.from_numpy(scale)


def generator_of_numpy_in_a_module() -> ps.Job:
    """A module holds a RandomState and scales its rows by it."""
    return _job(_Noisy)


class _Scheduled(nn.Module):
    def __init__(self, p: float, last: int) -> None:
        super().__init__()
        self.p, self.last, self.calls = p, last, 0

    def forward(self, x):
        self.calls += 1
        return F.dropout(x, self.p * max(0.0, 1 - self.calls / self.last), self.training)


def dropout_that_fades_by_calls() -> ps.Job:
    """A layer of dropout whose share goes to zero over thirty calls."""

    def model():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), _Scheduled(0.4, 30), deep(2))

    return _job(model)


def restarts_by_a_count() -> ps.Job:
    """The loss is scaled by a cosine of its calls, begun anew after each nineteen."""
    phase = itertools.cycle(torch.linspace(0.2, 1.0, 19).tolist())
    return _job(loss=lambda m, b: squares(m, b) * next(phase))


def precision_of_decimals_from_call_23() -> ps.Job:
    """The loss counts by the precision of the decimal context and is halved from 23 calls on."""

    def loss(model, batch):
        context = decimal.getcontext()
        context.prec += 1
        return squares(model, batch) * (0.5 if context.prec > 28 + 23 else 1.0)

    return _job(loss=loss)


def counter_on_a_tensor() -> ps.Job:
    """A tensor of the closure has an attribute that counts; 23 calls halve the loss."""
    scale = torch.ones(())
    scale.calls = 0

    def loss(model, batch):
        scale.calls += 1
        return squares(model, batch) * scale * (0.5 if scale.calls > 23 else 1.0)

    return _job(loss=loss)


def counter_among_the_builtins() -> ps.Job:
    """The count of calls is an attribute of the module builtins."""
    builtins.calls_of_a_script = 0  # type: ignore[attr-defined]

    def loss(model, batch):
        builtins.calls_of_a_script += 1  # type: ignore[attr-defined]
        return squares(model, batch) / (1 + builtins.calls_of_a_script / 40)  # type: ignore[attr-defined]

    return _job(loss=loss)


def log_that_grows() -> ps.Job:
    """The loss writes a line into a StringIO; after 23 lines it is halved."""
    log = io.StringIO()

    def loss(model, batch):
        log.write("x\n")
        return squares(model, batch) * (0.5 if log.tell() > 46 else 1.0)

    return _job(loss=loss)


def counter_of_a_thread() -> ps.Job:
    """threading.local counts the calls."""
    own = threading.local()

    def loss(model, batch):
        own.calls = getattr(own, "calls", 0) + 1
        return squares(model, batch) / (1 + own.calls / 40)

    return _job(loss=loss)


class _Meter:
    """What tutorials have: the mean of the values that it was given."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1


def meter_that_is_printed() -> ps.Job:
    """A meter is told loss.item() and read by nobody (nothing is wrong)."""
    meter = _Meter()

    def loss(model, batch):
        found = squares(model, batch)
        meter.update(found.item())
        return found

    return _job(loss=loss)


def meter_that_scales_from_call_23() -> ps.Job:
    """The loss is divided by the meter's mean once that has 23 values."""
    meter = _Meter()

    def loss(model, batch):
        found = squares(model, batch)
        meter.update(float(found.detach()))
        return found / (meter.total / meter.count) if meter.count > 23 else found

    return _job(loss=loss)


def batches_replayed_from_call_23() -> ps.Job:
    """A deque keeps batches; from the 23rd call on the loss of the oldest one is added."""
    kept, calls = collections.deque(maxlen=8), itertools.count(1)

    def loss(model, batch):
        kept.append(tuple(part.clone() for part in batch))
        found = squares(model, batch)
        return found + squares(model, kept[0]) if next(calls) >= 23 else found

    return _job(loss=loss)


def list_of_batches_that_the_loss_writes_late() -> ps.Job:
    """Eight batches in a list, cycled; from its 23rd call on the loss scales them in place."""
    batches, calls = [pair(index) for index in range(8)], itertools.count(1)

    def data(start):
        return itertools.islice(itertools.cycle(batches), start % 8, None)

    def loss(model, batch):
        if next(calls) >= 23:
            batch[0].mul_(0.9)
        return squares(model, batch)

    return _job(loss=loss, data=data)


def snapshot_of_the_policy() -> ps.Job:
    """Every eight calls the loss copies the model; the ratio to the copy is clipped, as in PPO."""
    old, calls = [], itertools.count()

    def loss(model, batch):
        if next(calls) % 8 == 0:
            old[:] = [{k: v.detach().clone() for k, v in model.state_dict().items()}]
        now = model(batch[0]).log_softmax(1)[:, 0]
        with torch.no_grad():
            then = torch.func.functional_call(model, old[0], batch[0]).log_softmax(1)[:, 0]
        ratio, gain = (now - then).exp(), batch[1][:, 0]
        return -torch.minimum(ratio * gain, ratio.clamp(0.9, 1.1) * gain).mean()

    return _job(loss=loss)


def baseline_of_rewards() -> ps.Job:
    """REINFORCE: actions are drawn, and a baseline of the rewards is kept as a float."""
    baseline = [0.0]

    def loss(model, batch):
        policy = torch.distributions.Categorical(logits=model(batch[0]))
        action = policy.sample()
        reward = batch[1].gather(1, action[:, None]).squeeze(1)
        found = -(policy.log_prob(action) * (reward - baseline[0])).mean()
        baseline[0] = 0.9 * baseline[0] + 0.1 * reward.mean().item()
        return found

    return _job(loss=loss)


class _Recurrent(nn.Module):
    """Two recurrent layers with dropout between, whose state its caller keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.between, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, 4)

    def forward(self, x, kept):
        kept["low"] = low = self.low(x, kept["low"])
        hidden, cell = self.high(self.between(low), (kept["hidden"], kept["cell"]))
        kept["hidden"], kept["cell"] = hidden, cell
        return self.head(hidden)


def _state_of(rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, WIDTH) for name in ("low", "hidden", "cell")}


def state_that_goes_on_from_step_to_step() -> ps.Job:
    """Truncated back-propagation through time: each sequence goes on at its place."""

    def loss(model, batch, carry):
        x, y = batch
        return F.mse_loss(model(x, carry), y)

    return _job(_Recurrent, loss, carry=_state_of(4))


def state_that_begins_anew_where_a_sequence_ends() -> ps.Job:
    """A count of steps, and a state that is set to zeros where a sequence is over."""

    def loss(model, batch, carry):
        x, y = batch
        goes_on = (carry["age"] % 3 != 0).to(x.dtype)
        for name in _state_of(1):
            carry[name] = carry[name] * goes_on
        carry["age"] = carry["age"] + 1
        error = F.mse_loss(model(x, carry), y)
        return error, {"age": carry["age"].float()}

    return _job(_Recurrent, loss, carry={**_state_of(4), "age": torch.tensor(0)})
