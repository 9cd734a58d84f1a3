"""What a trace would freeze is found with its line; what it would not is left alone."""

import csv
import io
import itertools
import json
import multiprocessing
import os
import queue
import random
import re
import sqlite3
import sys
import tempfile
import threading
import time
import uuid
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from ctypes import CDLL, c_int
from dataclasses import replace
from datetime import datetime
from decimal import Decimal, getcontext, localcontext
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import einops
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from penstock.errors import JobError, RunError
from penstock.examine.impurities import Impurity, describe, impurities
from penstock.job import Job
from tests.graph.zoo import JOBS
from tests.parity.models import job_of

pytestmark = pytest.mark.usefixtures("parsed")
D = 8


def data(start: int) -> Iterator[Tensor]:
    for index in itertools.count(start):
        yield torch.randn(4, D, generator=torch.Generator().manual_seed(index))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Net(nn.Module):
    """A linear layer, then whatever a test wants, with state of any kind."""

    def __init__(self, then: Callable[["Net", Tensor], Tensor], **state: object) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(D, D), then
        self.register_buffer("buffer", torch.zeros(D))
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x))


def job(then: Callable[[Net, Tensor], Tensor] = lambda net, x: x, loss=square, **options) -> Job:
    state = options.pop("state", dict)
    return Job(lambda: Net(then, **state()), loss, options.pop("data", data), sgd, **options)


def line(function: Callable, number: int) -> str:
    """Return the `number`-th line of a function's body as findings name it."""
    path = Path(__file__)
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{here}:{function.__code__.co_firstlineno + number}"


# -- what is found --------------------------------------------------------------------------------


def counts_to_a_threshold(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return x if net.calls < 1000 else 2 * x


def anneals(net: Net, x: Tensor) -> Tensor:
    net.beta *= 0.99
    return x * net.beta


def drops_layers(net: Net, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else 2 * x


def adds_noise_of_numpy(net: Net, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.normal(size=D)).float()


def draws_from_a_generator_of_numpy(net: Net, x: Tensor) -> Tensor:
    return x if net.rng.random() < 0.5 else 2 * x


def draws_from_a_generator_of_python(net: Net, x: Tensor) -> Tensor:
    return x * net.rng.uniform(1, 2)


def seeds_by_a_count(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return x + torch.randn(D, generator=torch.Generator().manual_seed(net.calls))


def draws_from_a_generator_of_torch(net: Net, x: Tensor) -> Tensor:
    return x + torch.randn(D, generator=net.rng)


def asks_the_time(net: Net, x: Tensor) -> Tensor:
    return x if time.time() > 0 else 2 * x


def asks_the_date(net: Net, x: Tensor) -> Tensor:
    return x if datetime.now().year < 3000 else 2 * x


def asks_for_an_identifier(net: Net, x: Tensor) -> Tensor:
    return x if uuid.uuid4().int else 2 * x


def draws_from_the_system(net: Net, x: Tensor) -> Tensor:
    return 2 * x if net.rng.random() < 1e-12 else x


def draws_from_what_has_no_seed(net: Net, x: Tensor) -> Tensor:
    source = np.random.RandomState(net.seed)
    return 2 * x if source.rand() < 1e-12 else x


def draws_from_bits_without_a_seed(net: Net, x: Tensor) -> Tensor:
    bits = np.random.MT19937()
    return 2 * x if np.random.RandomState(bits).rand() < 1e-12 else x


def draws_from_what_forgets_its_seed(net: Net, x: Tensor) -> Tensor:
    source = np.random.RandomState(seed={"seed": 3}.get("other"))
    return 2 * x if source.rand() < 1e-12 else x


def draws_by_a_counted_seed(net: Net, x: Tensor) -> Tensor:
    net.seed += 1
    return x * float(np.random.RandomState(net.seed).rand())


def reads_a_file(net: Net, x: Tensor) -> Tensor:
    return x * len(Path(__file__).read_text())


def fills_a_memory(net: Net, x: Tensor) -> Tensor:
    net.memory.append(x.detach())
    return x + net.memory[0] if len(net.memory) > 99 else x


def reads_the_last_batch(net: Net, x: Tensor) -> Tensor:
    before, net.last = net.last, x.detach()
    return x if before is None else x + before


def keeps_its_first_weights(net: Net, x: Tensor) -> Tensor:
    if net.first is None:
        net.first = net.linear.weight.detach().clone()
    return x + (net.linear.weight - net.first).square().mean()


def scales_by_the_first_batch(net: Net, x: Tensor) -> Tensor:
    if net.scale is None:
        net.scale = x.detach().std().item()
    return x * net.scale


def goes_round(net: Net, x: Tensor) -> Tensor:
    return x * next(net.rates)


def takes_turns(net: Net, x: Tensor) -> Tensor:
    net.turn = not net.turn
    return x if net.turn else 2 * x


def toggles_training(net: Net, x: Tensor) -> Tensor:
    x = F.dropout(x, 0.0, net.training)
    net.train(not net.training)
    return x


def counts_by_name(net: Net, x: Tensor) -> Tensor:
    vars(net)["calls"] += 1
    return x if vars(net)["calls"] < 1000 else 2 * x


def reads_gradients(net: Net, x: Tensor) -> Tensor:
    gradient = net.linear.weight.grad
    return x if gradient is None else x + gradient.norm()


def counts_by_a_default(net: Net, x: Tensor, calls: list = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return x if calls[0] < 1000 else 2 * x


def counts_on_its_function(net: Net, x: Tensor) -> Tensor:
    counts_on_its_function.calls += 1
    return x if counts_on_its_function.calls < 1000 else 2 * x


counts_on_its_function.calls = 0


def counts_on_its_class(net: Net, x: Tensor) -> Tensor:
    Net.calls_of_all += 1
    return x if Net.calls_of_all < 1000 else 2 * x


Net.calls_of_all = 0


class Doubled(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(context, x):
        return 2 * x

    @staticmethod
    def backward(context, gradient):
        Doubled.calls += 1
        return gradient if Doubled.calls < 1000 else 2 * gradient


def counts_in_backward(net: Net, x: Tensor) -> Tensor:
    return Doubled.apply(x)


def hooks_with_state(net: Net, x: Tensor) -> Tensor:
    x.register_hook(net.hook)
    return x


class Hook:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient / self.calls


def goes_through_pairs(net: Net, x: Tensor) -> Tensor:
    rate, _ = next(net.pairs)
    return x * rate


CALLS: ContextVar[int] = ContextVar("CALLS", default=0)


def counts_in_a_context(net: Net, x: Tensor) -> Tensor:
    CALLS.set(CALLS.get() + 1)
    return x if CALLS.get() < 1000 else 2 * x


def counts_in_a_thread(net: Net, x: Tensor) -> Tensor:
    HERE.calls += 1
    return x if HERE.calls < 1000 else 2 * x


HERE = threading.local()
HERE.calls = 0


def goes_on_in_a_generator(net: Net, x: Tensor) -> Tensor:
    return x * next(net.falling)


def falling() -> Iterator[float]:
    rate = 1.0
    while True:
        yield max(rate, 0.5)
        rate *= 0.9


@lru_cache
def drawn_once(length: int) -> float:
    return random.random() * length


def draws_once(net: Net, x: Tensor) -> Tensor:
    return x * drawn_once(x.shape[1])


def asks_for_an_address(net: Net, x: Tensor) -> Tensor:
    return x if x.data_ptr() else 2 * x


def keeps_a_table_of_a_buffer_that_it_writes(net: Net, x: Tensor) -> Tensor:
    net.buffer += 1
    net.table = net.buffer * 2 if net.table is None else net.table
    return x * net.table


def registers_what_is_saved(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "mask"):
        net.register_buffer("mask", torch.ones(4, D).tril())
    return x * net.mask


def counts_under_a_computed_name(net: Net, x: Tensor) -> Tensor:
    for k in range(1):
        setattr(net, f"n{k}", getattr(net, f"n{k}") + 1)
    return x if getattr(net, f"n{k}") < 1000 else 2 * x


def fills_a_queue(net: Net, x: Tensor) -> Tensor:
    net.waiting.put(1)
    return x if net.waiting.qsize() < 1000 else 2 * x


def counts_on_its_weight(net: Net, x: Tensor) -> Tensor:
    net.linear.weight.calls = getattr(net.linear.weight, "calls", 0) + 1
    return x if net.linear.weight.calls < 1000 else 2 * x


def counts_for_all_processes(net: Net, x: Tensor) -> Tensor:
    net.shared.value += 1
    return x if net.shared.value < 1000 else 2 * x


def counts_in_an_array(net: Net, x: Tensor) -> Tensor:
    net.counts[0] += 1
    return x if net.counts[0] < 1000 else 2 * x


def counts_in_the_environment(net: Net, x: Tensor) -> Tensor:
    os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
    return x if int(os.environ["CALLS"]) < 1000 else 2 * x


def counts_in_a_database(net: Net, x: Tensor) -> Tensor:
    net.table.execute("insert into calls values (1)")
    return x if len(net.table.execute("select * from calls").fetchall()) < 1000 else 2 * x


def looks_for_a_file(net: Net, x: Tensor) -> Tensor:
    return x if Path("warm").exists() else 2 * x


def counts_in_memory_of_c(net: Net, x: Tensor) -> Tensor:
    net.raw[0] += 1
    return x if net.raw[0] < 1000 else 2 * x


def counts_on_a_tensor(net: Net, x: Tensor) -> Tensor:
    net.scales[0].calls += 1
    return x if net.scales[0].calls < 1000 else 2 * x


def counts_on_a_dict(net: Net, x: Tensor) -> Tensor:
    net.known.calls += 1
    return x if net.known.calls < 1000 else 2 * x


def counts_in_decimals(net: Net, x: Tensor) -> Tensor:
    net.sum += Decimal("0.1")
    return x if net.sum < 1000 else 2 * x


def counts_by_precision(net: Net, x: Tensor) -> Tensor:
    getcontext().prec += 1
    return x if getcontext().prec < 1000 else 2 * x


def counts_by_recursion(net: Net, x: Tensor) -> Tensor:
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)
    return x if sys.getrecursionlimit() < 10_000 else 2 * x


def counts_what_it_wrote(net: Net, x: Tensor) -> Tensor:
    net.log.write("x\n")
    return x if net.log.tell() < 1000 else 2 * x


def counts_by_a_digit(net: Net, x: Tensor) -> Tensor:
    calls = net.log.read()
    net.log.seek(0)
    net.log.write(chr(ord(calls) + 1))
    net.log.seek(0)
    return x if ord(calls) < 1000 else 2 * x


def reads_rows(net: Net, x: Tensor) -> Tensor:
    return x * float(next(net.rows)[0])


def reads_lines(net: Net, x: Tensor) -> Tensor:
    return x * min(len(net.log.readline()), 0)


def takes_lines(net: Net, x: Tensor) -> Tensor:
    return x * min(len(next(net.log)), 0)


def asks_an_iterator_by_its_method(net: Net, x: Tensor) -> Tensor:
    return x if net.count() < 1000 else 2 * x


def appends_and_asks_where_it_ends(net: Net, x: Tensor) -> Tensor:
    with Path(os.devnull).open("a") as log:
        log.write("x")
        return x if log.tell() < 1000 else 2 * x


@lru_cache
def kept_box() -> list[int]:
    return [0]


def counts_in_what_a_cache_keeps(net: Net, x: Tensor) -> Tensor:
    kept_box()[0] += 1
    return x if kept_box()[0] < 1000 else 2 * x


@lru_cache(None)
def kept_dict() -> dict[str, int]:
    return {"calls": 0}


def counts_in_a_dict_that_a_cache_keeps(net: Net, x: Tensor) -> Tensor:
    kept_dict()["calls"] += 1
    return x if kept_dict()["calls"] < 1000 else 2 * x


@lru_cache
def told(x: Tensor) -> None:
    return None


def takes_rows(net: Net, x: Tensor) -> Tensor:
    (k,) = next(net.rows)
    return x if k < 1000 else 2 * x


def counts_in_a_file_that_it_opens(net: Net, x: Tensor) -> Tensor:
    with Path(os.devnull).open("r+") as log:
        return x if len(list(log)) < 1000 else 2 * x


def looks_into_a_database(net: Net, x: Tensor) -> Tensor:
    with sqlite3.connect("file::memory:?cache=shared", uri=True) as table:
        return x if len(table.execute("select 1").fetchall()) < 1000 else 2 * x


def asks_its_cache(net: Net, x: Tensor) -> Tensor:
    told(x)
    return x if told.cache_info().misses < 1000 else 2 * x


class Known(dict[str, int]):
    calls = 0


def with_a_counting_tensor() -> dict[str, object]:
    scale = torch.ones(())
    scale.calls = 0  # pyright: ignore[reportAttributeAccessIssue]
    return {"scales": [scale]}


def with_a_cursor() -> dict[str, object]:
    table = sqlite3.connect(":memory:")
    numbers = "with recursive n(k) as (select 1 union select k + 1 from n) select k from n"
    return {"rows": table.execute(numbers)}


def with_rows() -> dict[str, object]:
    return {"rows": csv.reader(iter(["1.0,2"] * 99))}


def with_a_table() -> dict[str, object]:
    table = sqlite3.connect(":memory:")
    table.execute("create table calls (number integer)")
    return {"table": table}


def own_lines() -> dict[str, object]:
    return {"log": Path(__file__).open()}


def a_log() -> dict[str, object]:
    return {"log": tempfile.TemporaryFile("w")}


FOUND = [
    (counts_on_a_tensor, 2, with_a_counting_tensor, r"scales\[0\]\.calls.*\(2, then 3\)"),
    (counts_on_a_dict, 2, lambda: {"known": Known()}, r"model\.known\.calls"),
    (counts_in_decimals, 2, lambda: {"sum": Decimal(0)}, r"model\.sum"),
    (counts_by_precision, 2, dict, r"prec of the decimal context.*\(30, then 31\)"),
    (counts_by_recursion, 1, dict, "getrecursionlimit"),
    (counts_what_it_wrote, 2, lambda: {"log": io.StringIO()}, r"model\.log"),
    (counts_what_it_wrote, 2, a_log, r"model\.log"),
    (counts_by_a_digit, 1, lambda: {"log": io.StringIO("a")}, r"model\.log"),
    (reads_rows, 1, with_rows, r"rows\.line_num"),
    (reads_lines, 1, own_lines, r"model\.log"),
    (takes_lines, 1, own_lines, r"model\.log"),
    (asks_an_iterator_by_its_method, 1, lambda: {"count": itertools.count().__next__}, "count"),
    (appends_and_asks_where_it_ends, 1, dict, "the file"),
    (counts_in_what_a_cache_keeps, 2, dict, "what kept_box has returned"),
    (counts_in_a_dict_that_a_cache_keeps, 2, dict, "what kept_dict has returned"),
    (takes_rows, 1, with_a_cursor, r"model\.rows"),
    (counts_in_a_file_that_it_opens, 1, dict, "the file"),
    (looks_into_a_database, 1, dict, "the file"),
    (asks_its_cache, 2, dict, "what told tells of its cache"),
    (looks_for_a_file, 1, dict, "files"),
    (counts_in_memory_of_c, 2, lambda: {"raw": (c_int * 4)()}, r"model\.raw"),
    (counts_in_an_array, 2, lambda: {"counts": array("i", [0])}, "model.counts"),
    (counts_in_the_environment, 2, dict, "os.environ"),
    (counts_in_a_database, 1, with_a_table, "model.table"),
    (counts_under_a_computed_name, 2, lambda: {"n0": 0}, r"model\.n0.*\(2, then 3\)"),
    (fills_a_queue, 2, lambda: {"waiting": queue.Queue()}, r"model\.waiting\.queue"),
    (counts_on_its_weight, 2, dict, r"linear\.weight\.calls"),
    (counts_for_all_processes, 2, lambda: {"shared": multiprocessing.Value("i")}, "model.shared"),
    (goes_through_pairs, 1, lambda: {"pairs": zip([1.0] * 99, [0] * 99, strict=True)}, "pairs"),
    (counts_in_a_context, 1, dict, r"CALLS.*\(2, then 3\)"),
    (counts_in_a_thread, 2, dict, r"HERE\.calls"),
    (goes_on_in_a_generator, 1, lambda: {"falling": falling()}, "model.falling.rate"),
    (asks_for_an_address, 1, dict, "the address of a tensor"),
    (counts_to_a_threshold, 2, lambda: {"calls": 0}, r"model\.calls.* \(2, then 3\)"),
    (anneals, 2, lambda: {"beta": 1.0}, r"model\.beta.*\(0\.98"),
    (drops_layers, 1, dict, "random numbers of Python or numpy"),
    (adds_noise_of_numpy, 1, dict, "random numbers of Python or numpy"),
    (draws_from_a_generator_of_numpy, 1, lambda: {"rng": np.random.default_rng(0)}, "model.rng"),
    (draws_from_a_generator_of_python, 1, lambda: {"rng": random.Random(0)}, "model.rng"),
    (draws_from_a_generator_of_torch, 1, lambda: {"rng": torch.Generator()}, "model.rng"),
    (asks_the_time, 1, dict, "the time"),
    (asks_the_date, 1, dict, "the time"),
    (asks_for_an_identifier, 1, dict, "chance"),
    (draws_from_what_has_no_seed, 1, lambda: {"seed": None}, "chance"),
    (draws_from_bits_without_a_seed, 1, dict, "chance"),
    (draws_from_what_forgets_its_seed, 1, dict, "chance"),
    (draws_from_the_system, 1, lambda: {"rng": random.SystemRandom()}, "chance"),
    (draws_by_a_counted_seed, 2, lambda: {"seed": 0}, r"model\.seed"),
    (reads_a_file, 1, dict, "the file .*test_impurities.py"),
    (fills_a_memory, 2, lambda: {"memory": []}, "the length of model.memory"),
    (fills_a_memory, 2, lambda: {"memory": deque(maxlen=200)}, "the length of model.memory"),
    (reads_the_last_batch, 2, lambda: {"last": None}, "add was not there before"),
    (keeps_its_first_weights, 3, lambda: {"first": None}, "what an earlier micro-batch made"),
    (scales_by_the_first_batch, 2, lambda: {"scale": None}, "detach is no longer there"),
    (keeps_a_table_of_a_buffer_that_it_writes, 3, lambda: {"table": None}, "an earlier"),
    (seeds_by_a_count, 2, lambda: {"calls": 0}, r"model\.calls.*\n.*a torch.Generator"),
    (goes_round, 1, lambda: {"rates": itertools.cycle([1.0, 0.5])}, "model.rates"),
    (takes_turns, 2, lambda: {"turn": False}, "model.turn.*True"),
    (toggles_training, 1, dict, "model.training"),
    (counts_by_name, 2, lambda: {"calls": 0}, r"model\.calls"),
    (reads_gradients, 2, dict, "linalg_vector_norm was not there before"),
    (counts_by_a_default, 2, dict, r"calls\[0\]: read here.*\(2, then 3\)"),
    (counts_on_its_function, 2, dict, "counts_on_its_function.calls"),
    (counts_on_its_class, 2, dict, "Net.calls_of_all"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("then", "number", "state", "what"), FOUND)
def test_impurity_is_found_with_its_line_where_a_model(then, number, state, what: str) -> None:
    found = impurities(job(then, state=state))
    assert found, then.__name__
    assert line(then, number) in [one.where for one in found]
    assert re.search(what, describe(found))


def test_random_number_that_is_drawn_once_and_kept_is_found_with_its_function() -> None:
    (found,) = impurities(job(draws_once))
    assert found.where == line(drawn_once.__wrapped__, 0)


def test_buffer_that_forward_registers_and_a_checkpoint_holds_is_found() -> None:
    (found,) = impurities(job(registers_what_is_saved))
    assert found.where == "model.mask"


def test_state_of_a_backward_pass_is_found_with_its_line() -> None:
    (found,) = impurities(job(counts_in_backward))
    assert (found.what, found.where) == ("Doubled.calls", line(Doubled.backward, 3))


def test_parameter_that_learns_by_turns_is_found() -> None:
    def by_turns(net: Net, x: Tensor) -> Tensor:
        net.linear.bias.requires_grad_(not net.linear.bias.requires_grad)
        return x

    (found,) = impurities(job(by_turns))
    assert (found.what, found.where) == ("what is computed", "the loss")  # in backward: no line


def test_state_of_a_hook_is_found_with_its_line() -> None:
    found = impurities(job(hooks_with_state, state=lambda: {"hook": Hook()}))
    assert (found[0].what, found[0].where) == ("model.hook.calls", line(Hook.__call__, 2))


def test_state_of_a_backward_hook_of_a_module_is_found() -> None:
    calls = []

    def hook(module, inputs, outputs):
        calls.append(1)
        return tuple(g if len(calls) < 1000 else 2 * g for g in inputs)

    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
        net[1].register_full_backward_hook(hook)
        return net

    (found,) = impurities(Job(model, square, data, sgd))
    assert found.where == line(hook, 2)


BETA, SETTINGS = 0.0, {"hard": False}


def rate_that_anneals(step: int) -> float:
    global BETA
    BETA = step / 10
    return 1.0


def annealed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() * (1 + BETA)


def data_that_becomes_hard(start: int) -> Iterator[Tensor]:
    for index in itertools.count(start):
        if index == 500:
            SETTINGS["hard"] = True
        yield next(data(index))


def hard(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() * (2 if SETTINGS["hard"] else 1)


def test_what_the_learning_rate_sets_for_the_loss_is_found() -> None:
    found = impurities(job(loss=annealed, learning_rate=rate_that_anneals))
    assert (found[0].what, found[0].where) == ("BETA", line(annealed, 1))
    assert line(rate_that_anneals, 2) in found[0].why


def test_what_the_data_will_set_for_the_loss_is_found() -> None:
    (found,) = impurities(job(loss=hard, data=data_that_becomes_hard))
    assert (found.what, found.where) == ("SETTINGS", line(hard, 1))
    assert line(data_that_becomes_hard, 3) in found.why


def test_what_the_data_moves_is_nothing_to_a_loss_whose_argument_has_its_name() -> None:
    x = io.BytesIO(bytes(10_000))

    def by_a_cursor(start: int) -> Iterator[Tensor]:
        for index in itertools.count(start):
            x.seek(index)
            yield next(data(index))

    assert not impurities(job(data=by_a_cursor))


class Epochs:
    """Data that says which epoch it is in."""

    def __init__(self, batches: int) -> None:
        self.batches, self.epoch = batches, 0

    def __call__(self, start: int) -> Iterator[Tensor]:
        for index, x in zip(itertools.count(start), data(start), strict=False):
            self.epoch = index // self.batches
            yield x


@pytest.mark.parametrize("batches", [10, 10_000])
def test_epoch_that_the_data_counts_and_the_loss_reads_is_found(batches: int) -> None:
    epochs = Epochs(batches)
    loss = lambda model, x: square(model, x) * (1 + epochs.epoch)  # noqa: E731
    found = impurities(job(loss=loss, data=epochs))
    assert found[0].where == line(loss, 0)
    assert line(Epochs.__call__, 2) in found[0].why
    assert impurities(job(data=Epochs(batches))) == ()


def test_what_an_optimizer_does_to_the_model_after_a_step_is_found() -> None:
    models: list[Net] = []

    def model() -> nn.Module:
        models.append(Net(lambda net, x: x if net.level < 10 else 2 * x, level=0))
        return models[-1]

    def optimizer(parameters) -> torch.optim.Optimizer:
        def raise_level(*_: object) -> None:
            models[-1].level += 1

        made = sgd(parameters)
        made.register_step_post_hook(raise_level)
        return made

    found = impurities(Job(model, square, data, optimizer))
    assert found[0].what == "model.level"


class Counting:
    """A loss that no function holds, as a module of losses or a trainer is."""

    def __init__(self, late: int) -> None:
        self.calls, self.late = 0, late

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.late:
            return 2 * square(model, x)
        return square(model, x)


class CountingInSlots:
    """The same without a dict."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return square(model, x) if self.calls < 1000 else 2 * square(model, x)


class CountingModule(nn.Module):
    """The method of a module that is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return square(model, x) if self.calls < 1000 else 2 * square(model, x)


@pytest.mark.parametrize("loss", [Counting(1000), CountingInSlots(), CountingModule().forward])
@pytest.mark.sampled(2)
def test_count_of_a_loss_that_is_an_object_is_found(loss: Callable[..., Tensor]) -> None:
    (found,) = impurities(job(loss=loss))
    assert found.what.endswith(".calls")


def test_model_that_the_loss_hands_to_a_hook_is_found() -> None:
    kept: dict[str, nn.Module] = {}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        kept["model"] = model
        return square(model, x)

    def optimizer(parameters) -> torch.optim.Optimizer:
        steps = itertools.count()

        def shrinks(*_: object) -> None:
            if next(steps) == 1000:
                kept["model"].zero_grad()

        made = sgd(parameters)
        made.register_step_post_hook(shrinks)
        return made

    found = impurities(Job(lambda: nn.Linear(D, D), loss, data, optimizer))
    assert [one.why for one in found if one.what == "model"] == [
        "a hook of the optimizer reaches it since the loss was computed"
    ]


class Averaged(nn.Module):
    """A norm and torch's average of it, which forward runs, too: equal as long as weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, D))
        self.average = AveragedModel(self.net, use_buffers=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - self.average(x).detach()


class AverageUpdate:
    """Of a kind of its own, into which nobody looks."""

    def __init__(self, of: Averaged) -> None:
        self.of = of

    def update(self, *_: object) -> None:
        self.of.average.update_parameters(self.of.net)


@pytest.mark.parametrize("is_known", [True, False])
def test_statistics_that_forward_and_a_hook_write_are_found_while_copies_are_equal(
    is_known: bool,
) -> None:
    """Unless the hook is known to have the module: then ranks show it the statistics of all."""
    built: list[Averaged] = []

    def model() -> nn.Module:
        built[:] = [Averaged()]
        return built[0]

    def optimizer(weights) -> torch.optim.Optimizer:
        made = sgd([weight for weight in weights if weight.requires_grad])
        own, other = built[0], AverageUpdate(built[0])
        if is_known:
            made.register_step_post_hook(lambda *_: own.average.update_parameters(own.net))
        else:
            made.register_step_post_hook(other.update)
        return made

    found = impurities(Job(model, square, data, optimizer))
    named = "average.module.0.running_mean" in " ".join(one.what for one in found)
    assert named != is_known


def test_layer_that_learns_only_from_some_step_on_is_found() -> None:
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(nn.Linear(D, D))
        return made[-1]

    def rate(step: int) -> float:
        made[-1].bias.requires_grad_(step >= 30)
        return 1.0

    def frozen() -> nn.Module:
        net = model()
        net.bias.requires_grad_(False)
        return net

    (found,) = impurities(Job(frozen, square, data, sgd, learning_rate=rate))
    assert (found.what, found.where) == ("requires_grad of bias", "learning_rate")
    assert impurities(Job(frozen, square, data, sgd, learning_rate=rate, num_steps=30)) == ()


@pytest.mark.parametrize("by", ["hook", "scheduler"])
def test_layer_that_an_update_freezes_is_found(by: str) -> None:
    made: list[nn.Module] = []
    updates = itertools.count(1)

    def model() -> nn.Module:
        made.append(nn.Linear(D, D))
        return made[-1]

    def freezes(*_: object) -> None:
        made[-1].bias.requires_grad_(next(updates) < 5)

    def optimizer(parameters) -> torch.optim.Optimizer:
        one = sgd(parameters)
        if by == "hook":
            one.register_step_post_hook(freezes)
        return one

    def scheduler(one: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(one, lambda step: freezes() or 1.0)

    examined = Job(
        *(model, square, data, optimizer), scheduler=scheduler if by == "scheduler" else None
    )
    (found,) = impurities(examined)
    who = "scheduler" if by == "scheduler" else "optimizer"
    assert (found.what, found.where) == ("requires_grad of bias", who)
    updates = itertools.count(1)
    (found,) = impurities(replace(examined, num_steps=3))
    assert (found.what, found.where) == ("requires_grad", line(freezes, 1))


@pytest.mark.parametrize("is_its_own", [False, True])
def test_hook_that_freezes_what_has_settled_is_found(is_its_own: bool) -> None:
    def freezes(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None and p.grad.norm() < 1e-9:
                p.requires_grad_(False)

    def looks(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.detach().clone().requires_grad_()

    def optimizer(parameters) -> torch.optim.Optimizer:
        made = sgd(parameters)
        made.register_step_post_hook(looks if is_its_own else freezes)
        return made

    found = impurities(Job(lambda: nn.Linear(D, D), square, data, optimizer))
    wanted = [] if is_its_own else [("requires_grad", line(freezes, 3))]
    assert [(one.what, one.where) for one in found] == wanted


def keeps_a_table_of_its_teacher(net: Net, x: Tensor) -> Tensor:
    net.table = 2 * net.teacher if net.table is None else net.table
    return x * net.table


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.sampled(2)
def test_buffer_that_an_update_moves_is_found_where_what_was_made_of_it_is_kept(first: int) -> None:
    steps: list[int] = []

    class Teaching(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if len(steps) >= first:
                made[-1].teacher.data.mul_(0.9)
            steps.append(1)

    made: list[Net] = []

    def model() -> Net:
        state = {"teacher": nn.Buffer(torch.ones(D)), "table": None}
        made.append(Net(keeps_a_table_of_its_teacher, **state))
        return made[-1]

    found = impurities(Job(model, square, data, lambda p: Teaching(p, lr=0.1), num_steps=20))
    assert re.search("an earlier micro-batch made|buffer teacher", describe(found))


def test_loss_that_reads_the_rate_of_the_optimizer_is_found() -> None:
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters) -> torch.optim.Optimizer:
        made.append(sgd(parameters))
        return made[-1]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) * made[-1].param_groups[0]["lr"]

    rate = lambda step: 1 / (1 + step)  # noqa: E731
    examined = Job(lambda: nn.Linear(D, D), loss, data, optimizer, learning_rate=rate)
    assert impurities(examined)[0].where == line(loss, 1)


def test_batch_whose_plain_values_change_is_found() -> None:
    def numbered(start: int) -> Iterator[dict[str, object]]:
        for index, x in zip(itertools.count(start), data(start), strict=False):
            yield {"x": x, "number": index, "unit": "m"}

    loss = lambda model, batch: square(model, batch["x"]) * (1 + batch["number"])  # noqa: E731
    (found,) = impurities(job(loss=loss, data=numbered))
    assert (found.what, found.where) == ("the batch", "data")
    assert "0 in the first micro-batch, then 2" in found.why


def test_figure_beside_the_loss_that_follows_a_counter_is_found() -> None:
    calls = itertools.count()

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return square(model, x), {"seen": torch.tensor(float(next(calls)))}

    found = impurities(job(loss=loss))
    assert {one.where for one in found} == {line(loss, 1)}


@pytest.mark.parametrize("again", [True, False])
def test_count_that_the_loss_keeps_on_tensors_of_a_batch_is_found_if_those_come_again(
    again,
) -> None:
    def counted(start: int) -> list[Tensor]:
        row = list(itertools.islice(data(0), 6))
        for x in row:
            x.calls = 0  # pyright: ignore[reportAttributeAccessIssue]
        return row

    known = counted(0)

    def batches(start: int) -> Iterator[Tensor]:
        row = known if again else counted(start)
        return itertools.islice(itertools.cycle(row), start % 6, None)

    def loss(model: nn.Module, x: Any) -> Tensor:
        x.calls += 1
        return square(model, x) * (1 if x.calls < 1000 else 2)

    found = impurities(job(loss=loss, data=batches))
    assert [(one.what, one.where) for one in found] == [("calls of the batch", line(loss, 2))][
        :again
    ]


def test_cursor_that_data_takes_rows_from_is_no_finding() -> None:
    with sqlite3.connect(":memory:") as table:
        rows = table.execute(
            "with recursive n(k) as (select 1 union select k + 1 from n) select k from n"
        )

    def batches(start: int) -> Iterator[Tensor]:
        for x in data(start):
            next(rows)
            yield x

    assert impurities(job(data=batches)) == ()


def test_loss_that_keeps_state_in_a_closure_is_found() -> None:
    calls = 0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return model(x).square().mean() / (1 + calls // 1000)

    (found,) = impurities(job(loss=loss))
    assert (found.where, found.what.split()[0]) == (line(loss, 3), "calls")


class Weighted:
    """A loss as an object, by a partial call of its method."""

    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0

    def loss(self, scale: float, model: nn.Module, x: Tensor) -> Tensor:
        self.weight = self.weight * 0.9
        return scale * model(x).square().mean() * self.weight


def test_loss_that_is_an_object_is_looked_into() -> None:
    found = impurities(job(loss=partial(Weighted().loss, 2.0)))
    assert found[0].where == line(Weighted.loss, 2)


# -- what is not ----------------------------------------------------------------------------------


def only_counts(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    net.total += 1.5
    net.history.append(float(x.detach().sum()))
    net.average = net.total / net.calls
    if net.calls % 100 == 0:
        print(net.average)
    return x


AVERAGE: list[float] = []


def tells_an_average(net: Net, x: Tensor) -> Tensor:
    now = float(x.detach().mean())
    AVERAGE[:] = [now if not AVERAGE else 0.9 * AVERAGE[0] + 0.1 * now]
    return x


def keeps_what_it_made(net: Net, x: Tensor) -> Tensor:
    net.activations = x
    return x


def fills_a_mask_once(net: Net, x: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = torch.ones(4, D).tril()
    return x * net.mask


def registers_a_mask_once(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "mask"):
        net.register_buffer("mask", torch.ones(4, D).tril(), persistent=False)
    return x * net.mask


def fills_a_table_by_shape(net: Net, x: Tensor) -> Tensor:
    if x.shape not in net.masks:
        net.masks[x.shape] = np.arange(x.shape[1])
    return x + torch.from_numpy(net.masks[x.shape])


@lru_cache
def positions(length: int) -> Tensor:
    return torch.arange(length) / length


def caches_by_length(net: Net, x: Tensor) -> Tensor:
    return x + positions(x.shape[1])


def writes_its_buffer(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.buffer.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - net.buffer


def passes_a_loss_aside(net: Net, x: Tensor) -> Tensor:
    net.aside = x.abs().mean()
    return x * (1 + net.aside)


def asks_what_is_constant(net: Net, x: Tensor) -> Tensor:
    return x * 2 if net.training and torch.is_grad_enabled() and x.device.type == "cpu" else x


def logs_a_gradient(net: Net, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: net.log.append(float(gradient.norm())))
    return x


def frozen_with_a_memory() -> dict[str, object]:
    return {"teacher": nn.Linear(D, D).requires_grad_(False), "known": {}}


def logs_in_many_ways(net: Net, x: Tensor) -> Tensor:
    net.log.write("x\n")
    print(x.shape, file=net.log)
    json.dump({"calls": len(x)}, net.log)
    csv.writer(net.log).writerow([1])
    net.log.flush()
    with Path(os.devnull).open("a+") as log:
        log.write("x")
    return x


def counts_on_what_nobody_reads(net: Net, x: Tensor) -> Tensor:
    net.scales[0].calls += 1
    kept_box()[0] += 1
    net.total, net.calls = net.total + 1.0, net.calls + 1
    with localcontext() as context:
        context.prec += 1
        return x * float(Decimal(1) / Decimal(7))


def draws_by_torch(net: Net, x: Tensor) -> Tensor:
    return F.dropout(x, 0.3) + torch.randn_like(x) * torch.rand(())


def frozen_teacher(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.teacher.weight.mul_(0.9).add_(net.linear.weight, alpha=0.1)
    return x - net.teacher(x).detach()


def looks_for_what_is_imported(net: Net, x: Tensor) -> Tensor:
    sys.modules[f"made_by_a_library_{len(sys.modules)}"] = ModuleType("made")  # as an import does
    return 2 * x if "tensorflow" in sys.modules or net.modules_of_all.get("jax") else x


def rearranges(net: Net, x: Tensor) -> Tensor:
    x = einops.rearrange(x, "b (h d) -> b (d h)", h=2)
    return x + einops.repeat(einops.reduce(x, "b d -> b", "mean"), "b -> b d", d=D)


def keeps_a_table_of_a_buffer(net: Net, x: Tensor) -> Tensor:
    if net.table is None or len(net.table) < x.shape[1]:
        net.table = torch.cat([net.angles, net.angles]).cos()
        return x * net.table
    return x * net.table[: x.shape[1]]


def keeps_what_frozen_weights_make(net: Net, x: Tensor) -> Tensor:
    if "prompts" not in net.known:
        net.known["prompts"] = net.teacher(torch.ones(D)).detach()
    return x - net.known["prompts"]


def scripted(what):
    """Return it as torch.jit.script makes it; that many do, though torch now warns of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(what)


@scripted
def gate(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(y) + torch.nn.functional.softplus(x)


def gates_by_a_script(net: Net, x: Tensor) -> Tensor:
    return gate(x, 2 * x)


class Plain(nn.Module):
    """Something to script."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * 2 if x.dim() > 1 else x


def runs_a_scripted_module(net: Net, x: Tensor) -> Tensor:
    return net.scripted(x)


def draws_by_a_seed_of_its_own(net: Net, x: Tensor) -> Tensor:
    source = torch.Generator().manual_seed(3)
    return x[:, torch.randperm(D, generator=source)] + torch.randn(D, generator=source)


def draws_by_a_seed_of_numpy(net: Net, x: Tensor) -> Tensor:
    order = np.random.RandomState(0).permutation(D)
    signs = np.random.default_rng(0).integers(0, 2, D) + np.random.RandomState(seed=1).rand(D)
    return x[:, torch.from_numpy(order)] * torch.tensor(signs, dtype=x.dtype)


def draws_by_a_seed_of_its_model(net: Net, x: Tensor) -> Tensor:
    sources = [np.random.RandomState(net.seed), np.random.RandomState([net.seed, 1])]
    first = np.random.RandomState(
        seed=net.seed + 1,
    )
    return x * float(sum(source.rand() for source in [*sources, first]))


def draws_by_a_seed_of_python(net: Net, x: Tensor) -> Tensor:
    return x * random.Random(0).random()


def seeds_what_it_keeps(net: Net, x: Tensor) -> Tensor:
    return x + torch.randn(D, generator=net.source.manual_seed(3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("then", "state"),
    [
        (draws_by_a_seed_of_its_own, dict),
        (draws_by_a_seed_of_numpy, dict),
        (draws_by_a_seed_of_its_model, lambda: {"seed": 5}),
        (draws_by_a_seed_of_python, dict),
        (seeds_what_it_keeps, lambda: {"source": torch.Generator()}),
        (logs_in_many_ways, lambda: {"log": io.StringIO()}),
        (logs_in_many_ways, a_log),
        (
            counts_on_what_nobody_reads,
            lambda: {**with_a_counting_tensor(), "total": 0.0, "calls": 0},
        ),
        (looks_for_what_is_imported, lambda: {"modules_of_all": sys.modules}),
        (rearranges, dict),
        (
            keeps_a_table_of_a_buffer,
            lambda: {"table": None, "angles": nn.Buffer(torch.arange(4.0))},
        ),
        (keeps_what_frozen_weights_make, frozen_with_a_memory),
        (gates_by_a_script, dict),
        (runs_a_scripted_module, lambda: {"scripted": scripted(Plain())}),
        (frozen_teacher, lambda: {"teacher": nn.Linear(D, D).requires_grad_(False)}),
        (only_counts, lambda: {"calls": 0, "total": 0.0, "history": [], "average": 0.0}),
        (tells_an_average, dict),
        (keeps_what_it_made, dict),
        (fills_a_mask_once, lambda: {"mask": None}),
        (registers_a_mask_once, dict),
        (fills_a_table_by_shape, lambda: {"masks": {}}),
        (caches_by_length, dict),
        (writes_its_buffer, dict),
        (passes_a_loss_aside, dict),
        (asks_what_is_constant, dict),
        (draws_by_torch, dict),
        (logs_a_gradient, lambda: {"log": []}),
    ],
)
def test_nothing_is_found_where_a_model(then, state) -> None:
    assert impurities(job(then, state=state)) == ()


PURE = {
    **{name: JOBS[name] for name in ("dropout", "checkpoint", "custom", "average", "recurrent")},
    **{name: JOBS[name] for name in ("in_place", "normed", "penalty", "embeddings", "layouts")},
    **{f"parity {name}": job_of(name, torch.float32) for name in ("tied", "batch_norm")},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PURE)
def test_nothing_is_found_in(name: str) -> None:
    assert impurities(PURE[name]) == ()


# -- words ----------------------------------------------------------------------------------------


def _adds_its_weight(weight: Tensor) -> None:
    weight.grad.add_(weight.detach(), alpha=0.01)


def with_a_hook_behind() -> nn.Module:
    made = nn.Linear(D, D)
    made.bias.register_post_accumulate_grad_hook(_adds_its_weight)
    return made


def test_gradient_that_differs_when_it_is_computed_again_is_named_with_its_hook() -> None:
    found = impurities(Job(with_a_hook_behind, square, data, sgd, micro_batches=2))
    what, where = "the gradient of bias", line(_adds_its_weight, 0)
    assert (what, where) in {(one.what, one.where) for one in found}


def test_loss_of_weights_that_a_list_keeps_says_what_changes() -> None:
    kept: list[Tensor] = []

    def model() -> nn.Module:
        made = nn.Linear(D, D)
        kept.extend(made.parameters() if not kept else ())
        return made

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return square(module, x) + sum(weight.square().sum() for weight in kept)

    found = impurities(Job(model, loss, data, sgd, micro_batches=2))
    assert [one.what for one in found] == ["the values of weights, gradients or the batch"]


# -- what is left as it was -----------------------------------------------------------------------

COUNTED = [0]


def counts_beside_the_loss(model: nn.Module, x: Tensor) -> Tensor:
    COUNTED[0] += 1
    x.mul_(2)
    return model(x).square().mean() * random.random() * COUNTED[0]


def test_nothing_of_the_job_or_of_the_generators_has_moved() -> None:
    torch.manual_seed(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batch = torch.ones(4, D)
    examined = job(loss=counts_beside_the_loss, data=lambda start: itertools.repeat(batch))
    whats = {one.what.split()[0] for one in impurities(examined)}
    assert whats == {"COUNTED[0]", "random"}
    assert COUNTED == [0]
    assert torch.equal(batch, torch.ones(4, D))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_data_that_fills_one_buffer_again_is_no_finding() -> None:
    def refilled(start: int) -> Iterator[Tensor]:
        buffer = torch.empty(4, D)
        for x in data(start):
            yield buffer.copy_(x)

    assert impurities(job(data=refilled)) == ()


def test_what_the_job_prints_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def loud(model: nn.Module, x: Tensor) -> Tensor:
        print("loud")
        return square(model, x)

    assert impurities(job(loss=loud)) == ()
    assert capfd.readouterr() == ("", "")


def test_loss_that_fails_is_told_with_its_line() -> None:
    def fails(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x[:, 1:])

    with pytest.raises(JobError, match=r"fails at .*test_impurities\.py"):
        impurities(job(loss=fails))


def test_loss_that_ends_its_process_is_told() -> None:
    def dies(model: nn.Module, x: Tensor) -> Tensor:
        os._exit(3)

    with pytest.raises(RunError, match=r"left \(3\)"):
        impurities(job(loss=dies))


def test_description_names_three_and_counts_the_rest() -> None:
    found = [Impurity(f"model.{k}", f"train.py:{k}", "read here") for k in range(5)]
    text = describe(found)
    assert text.splitlines()[1] == "  train.py:0: model.0: read here"
    assert text.endswith("and 2 more")
    assert describe(()) == ""


# -- where in memory a batch lies -----------------------------------------------------------------


def placed(index: int, make: Callable[[np.ndarray], object]) -> object:
    """Return a batch of numbers that begin at another place of memory for each index."""
    memory = np.zeros(4 * D * 4 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + 4 * (index % 7)
    array = memory[start : start + 4 * D * 4].view(np.float32).reshape(4, D)
    array[:] = np.random.default_rng(index).standard_normal((4, D))
    return make(array)


ARRAYS: dict[str, Callable[[np.ndarray], object]] = {
    "an array": lambda array: array,
    "from_numpy": torch.from_numpy,
    "a part": lambda array: torch.from_numpy(array)[1:],
    "columns": lambda array: torch.from_numpy(array).t()[:D, :].t(),
    "scalars beside it": lambda array: {"x": array, "n": array.max(), "k": np.int64(3)},
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_it_does_not_matter_where_in_memory_a_batch_lies(kind: str) -> None:
    def arrays(start: int) -> Iterator[object]:
        return (placed(index, ARRAYS[kind]) for index in itertools.count(start))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch
        return (model(x) * x[:, :1]).square().mean()

    assert impurities(job(loss=loss, data=arrays)) == ()


def split(steps: Callable[[int], int]) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return data whose inputs and labels are parts of one row, `steps(k)` apart."""

    def rows(start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for k in itertools.count(start):
            row = torch.randn(4, 3 * D, generator=torch.Generator().manual_seed(k))
            yield row[:, :D], row[:, steps(k) : steps(k) + D]

    return rows


def against(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def masked(model: nn.Module, batch: Any) -> Tensor:
    batch[0][:, ::3] = 0
    return against(model, batch)


def test_loss_may_write_into_inputs_that_labels_are_a_view_of() -> None:
    assert impurities(job(loss=masked, data=split(lambda k: 1))) == ()
    assert impurities(job(loss=masked, data=split(lambda k: 2 * D - k % 2))) == ()


def test_views_that_lie_otherwise_are_no_finding_where_the_loss_only_reads() -> None:
    assert impurities(job(loss=against, data=split(lambda k: k % 9))) == ()


def test_views_that_lie_otherwise_are_found_where_the_loss_writes() -> None:
    for steps in (lambda k: 1 + k % 3), (lambda k: 1 + k // 9):
        (found,) = impurities(job(loss=masked, data=split(steps), micro_batches=4))
        assert (found.what, found.where) == ("the batch", "data")
        assert "leaf 0 at byte 0 and leaf 1 at byte 4 share memory in the first" in found.why


def test_unlike_micro_batches_hide_nothing_that_differs_when_it_is_computed_again() -> None:
    def lengths(start: int) -> Iterator[Tensor]:
        return (torch.ones(1 + k % 3, D) for k in itertools.count(start))

    rand = CDLL(None).rand  # whose state is where nobody looks

    def drawn(model: nn.Module, x: Tensor) -> Tensor:
        factor = torch.ones(())
        factor.numpy()[()] = rand() % 1000
        return square(model, x) * factor

    (only,) = impurities(job(data=lengths))
    assert only.batch
    found = impurities(job(loss=drawn, data=lengths))
    assert [one.batch for one in found] == [True, False]
    assert found[1].why == "differs when it is computed again"


def test_loss_that_seeds_what_it_draws_is_refused_with_its_line() -> None:
    def seeds(net: Net, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x + torch.randn(D)

    with pytest.raises(JobError, match="seeds torch's random numbers") as raised:
        impurities(job(seeds))
    assert line(seeds, 1) in raised.value.message
    assert "torch.Generator" in (raised.value.hint or "")


def test_loss_that_seeds_and_draws_nothing_is_no_finding() -> None:
    def seeds(net: Net, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x

    assert impurities(job(seeds)) == ()
