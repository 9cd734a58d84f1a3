"""A training loop kept as it is: what it trains equals itself, what no job can say is refused."""

import copy
import runpy
import sys
import textwrap

import pytest
import torch

import penstock as ps
from penstock.errors import JobError
from penstock.training import loop as looped

SETUP = """
import math
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
import penstock as ps

torch.manual_seed(0)
inputs = torch.randn(20, 4)
loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), 8)
nn = torch.nn
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
losses, total, OPEN = [], 0.0, {}

def scaled(value):
    return value * 0.5 + model[4].weight.square().mean()

FACTORS = {"mean": 1.0}
HISTORY = {"share": []}

def weighted(value):
    return value * FACTORS["mean"]

class Plain:
    def __enter__(self):
        return [batch for _ in range(2) for batch in loader]

    def __exit__(self, *_):
        pass
"""
BODY = """
optimizer.zero_grad()
logits = model(x)
loss = scaled(F.cross_entropy(logits, y))
right = (logits.argmax(1) == y).float().mean()
loss.backward()
clip_grad_norm_(model.parameters(), 0.5)
optimizer.step()
scheduler.step()
losses.append(loss.item())
"""


SUMMED = """
logits = model(x)
loss = scaled(F.cross_entropy(logits, y)) / EVERY
loss.backward()
total += loss.item()
if (k - 2) % EVERY == 0:
    clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append((k, total))
    total = 0.0
"""


def loop_of(body, steps="steps", target="x, y", call="opened()"):
    lines = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    return f"with {call} as steps:\n    for {target} in {steps}:\n{lines}\n"


COUNTED = {"target": "k, (x, y)", "steps": "enumerate(steps, start=3)"}
IN_MODULE = loop_of(BODY + "total += k * right.item()", **COUNTED)
IN_METHOD = """
class Trainer:
    def __init__(self):
        self.net = model

    def fit(self):
LOOP

Trainer().fit()
""".replace("LOOP", textwrap.indent(loop_of(BODY.replace("model(x)", "self.net(x)")), " " * 8))


def run(folder, text, opened):
    """Return the names of a script, whose loop is opened by `opened`."""
    file = folder / f"script{len(list(folder.iterdir()))}.py"
    file.write_text(SETUP + f"opened = {opened}\n" + text)
    return runpy.run_path(str(file))


def plain_as_well(folder, text, opened):
    return run(folder, text, opened), run(folder, text, "Plain")


@pytest.mark.parametrize(
    ("text", "options"),
    [(IN_MODULE, "stages=2"), (IN_METHOD, "stages=1")],
    ids=["module", "method"],
)
def test_a_loop_trained_by_ranks_leaves_what_the_loop_itself_leaves(
    tmp_path, monkeypatch, text, options
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    asked = f"epochs=2, ranks=2, {options}, listener=None"
    opened = f"lambda: ps.loop(model, optimizer, loader, {asked})"
    ours, plain = plain_as_well(tmp_path, text, opened)
    assert len(plain["losses"]) == 6
    torch.testing.assert_close(ours["losses"], plain["losses"], rtol=1e-5, atol=0)
    assert ours["total"] == pytest.approx(plain["total"], rel=1e-6)
    for name, value in plain["model"].state_dict().items():
        torch.testing.assert_close(ours["model"].state_dict()[name], value, rtol=1e-5, atol=1e-6)
    ours_state, plain_state = (names["optimizer"].state_dict()["state"] for names in (ours, plain))
    assert ours_state.keys() == plain_state.keys() == set(range(6))
    for parameter, state in plain_state.items():
        for key, value in state.items():
            torch.testing.assert_close(ours_state[parameter][key], value, rtol=1e-4, atol=1e-6)
    assert ours["optimizer"].param_groups[0]["lr"] == plain["optimizer"].param_groups[0]["lr"]
    assert ours["scheduler"].last_epoch == plain["scheduler"].last_epoch == 6


@pytest.mark.parametrize("options", ["stages=2", "replicas=2", "stages=1, ranks=1"])
def test_gradients_that_a_loop_sums_are_those_of_micro_batches(tmp_path, monkeypatch, options):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    asked = f"epochs=2, listener=None, {options}"
    opened = f"lambda: ps.loop(model, optimizer, loader, {asked})"
    begin = "EVERY = 4\nloader = DataLoader(loader.dataset, 5)\n"
    ours, plain = plain_as_well(tmp_path, begin + loop_of(SUMMED, **COUNTED), opened)
    assert [k for k, _ in ours["losses"]] == [k for k, _ in plain["losses"]] == [6, 10]
    sums = [[value for _, value in names["losses"]] for names in (ours, plain)]
    torch.testing.assert_close(*sums, rtol=1e-5, atol=0)
    for name, value in plain["model"].state_dict().items():
        torch.testing.assert_close(ours["model"].state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert ours["optimizer"].param_groups[0]["lr"] == plain["optimizer"].param_groups[0]["lr"]


def test_rates_of_each_epoch_are_those_of_the_loop(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    asked = "epochs=2, listener=None, ranks=1, stages=1"
    opened = f"lambda: ps.loop(model, optimizer, loader, {asked})"
    under = "if (k - 2) % len(loader) == 0:\n    scheduler.step()"
    text = loop_of(BODY.replace("scheduler.step()", under), **COUNTED)
    ours, plain = plain_as_well(tmp_path, text, opened)
    assert ours["scheduler"].last_epoch == plain["scheduler"].last_epoch == 2
    assert ours["optimizer"].param_groups[0]["lr"] == plain["optimizer"].param_groups[0]["lr"]
    for name, value in plain["model"].state_dict().items():
        torch.testing.assert_close(ours["model"].state_dict()[name], value, rtol=1e-5, atol=1e-6)


class Taken:
    """Stands in for `ps.train`: keeps the job, and tells of steps."""

    def __init__(self, rows=()):
        self.rows, self.job, self.options = rows, None, {}

    def __call__(self, job, *, on_step, listener, **options):
        self.job, self.options = job, options
        for row in self.rows:
            on_step(row)


OPENED = "lambda **more: ps.loop(model, optimizer, loader, **more)"


def taken(monkeypatch, folder, text, rows=()):
    """Return the job that a script makes, its options, and the names of the script."""
    stand_in = Taken(rows)
    monkeypatch.setattr(looped, "train", stand_in)
    names = run(folder, textwrap.dedent(text), OPENED)
    return stand_in, names


CLIP = "clip_grad_norm_(model.parameters(), 2 * 0.25)\n"
STEP = "loss.backward()\noptimizer.step()\noptimizer.zero_grad()\n"
UPDATE = "optimizer.step()\noptimizer.zero_grad()\n"
LOSS = "loss = F.cross_entropy(model(x), y)\n"


def test_the_job_of_a_loop_says_what_the_loop_says(monkeypatch, tmp_path):
    clip = STEP.replace("optimizer.step()", CLIP + "optimizer.step()")
    call = "opened(epochs=3, fields={'seed': 7}, ranks=2)"
    text = loop_of("model.train()\n" + LOSS + clip + "scheduler.step()", call=call)
    stand_in, names = taken(monkeypatch, tmp_path, text)
    job = stand_in.job
    assert (job.num_steps, job.micro_batches, job.clip_norm, job.seed) == (9, 1, 0.5, 7)
    assert stand_in.options == {"ranks": 2}
    assert job.model() is names["model"]
    batch = next(iter(names["loader"]))
    expected = torch.nn.functional.cross_entropy(names["model"](batch[0]), batch[1])
    assert torch.equal(job.loss(names["model"], batch), expected)
    other = copy.deepcopy(names["model"]).requires_grad_(False)
    other[0].weight.zero_()
    assert not job.loss(other, batch).requires_grad  # it is of the model that it is given
    weights = ps.job.Parameters(names["model"].named_parameters())
    made = job.optimizer(weights)
    assert made is not names["optimizer"]
    assert made.param_groups[0]["params"] == list(names["model"].parameters())
    assert made.defaults["weight_decay"] == 0.5
    assert made.param_groups[0]["lr"] == 1e-2  # as it was before there was a scheduler
    rates = job.scheduler(made)
    assert made.param_groups[0]["lr"] == 1e-2 / 4
    made.step()
    rates.step()
    assert made.param_groups[0]["lr"] == pytest.approx(1e-2 * (0.25 + 0.75 / 4))
    assert names["optimizer"].param_groups[0]["lr"] == 1e-2 / 4  # the script's own stands still


def test_the_copy_of_an_optimizer_has_the_weights_that_it_is_given(monkeypatch, tmp_path):
    stand_in, names = taken(monkeypatch, tmp_path, loop_of(LOSS + STEP))
    others = [(name, torch.nn.Parameter(p * 0)) for name, p in names["model"].named_parameters()]
    made = stand_in.job.optimizer(ps.job.Parameters(others))
    assert all(one is p for one, (_, p) in zip(made.param_groups[0]["params"], others, strict=True))
    assert stand_in.job.scheduler is None
    assert stand_in.job.clip_norm is None


def test_what_follows_the_update_is_said_of_each_step(monkeypatch, tmp_path):
    rows = [{"step": 1, "loss": 2.0, "right": 0.5}, {"step": 2, "loss": 1.0, "right": 0.75}]
    body = LOSS + "right = model(x).argmax(1).eq(y).float().mean()\n" + STEP
    body += "if k > 3:\n    OPEN[k] = math.exp(loss.item()), right.item()\ntotal += loss.item()\n"
    text = loop_of(body, **COUNTED)
    stand_in, names = taken(monkeypatch, tmp_path, text, rows)
    assert names["OPEN"] == {4: (pytest.approx(2.718281828), 0.75)}
    assert (names["total"], names["loss"].item()) == (3.0, 1.0)
    loss, figures = stand_in.job.loss(names["model"], next(iter(names["loader"])))
    assert loss.requires_grad
    assert list(figures) == ["right"]


def test_numbers_of_the_loss_are_numbers_behind_it(monkeypatch, tmp_path):
    rows = [{"step": 1, "loss": 2.0, "share": 0.5, "mean": 0.25, "size": 3.0}]
    body = "logits = model(x)\nshare = logits.mean().item()\nmean = float(logits.mean())\n"
    body += "size = logits.norm().item()\nsize = logits.norm()\n" + LOSS + STEP
    body += "losses.append((share, mean, size))\nHISTORY['share'].append(share)\n"
    text = loop_of(body)
    _, names = taken(monkeypatch, tmp_path, text, rows)
    ((share, mean, size),) = names["losses"]
    assert (share, mean, type(share), type(mean)) == (0.5, 0.25, float, float)
    assert isinstance(size, torch.Tensor)
    assert names["HISTORY"] == {"share": [0.5]}


TESTS = [
    ("(k - 2) % 4 == 0", 4),
    ("not (k + 2) % 4", 4),
    ("(1 + k) % 2 == 1", 2),
    ("k % len_of == 2", 3),
    ("k % 1 == 0", 1),
]


@pytest.mark.parametrize(("test", "count"), TESTS)
def test_an_update_each_so_many_batches_is_a_step_of_so_many_micro_batches(
    monkeypatch, tmp_path, test, count
):
    body = LOSS + f"loss.backward()\nif {test}:\n    optimizer.step()\n    optimizer.zero_grad()"
    begin = "len_of = 3\nloader = DataLoader(loader.dataset, 5)\n"
    call = "opened(epochs=3)"
    stand_in, names = taken(monkeypatch, tmp_path, begin + loop_of(body, call=call, **COUNTED))
    assert (stand_in.job.micro_batches, stand_in.job.num_steps) == (count, 12 // count)
    batch = next(iter(names["loader"]))
    expected = torch.nn.functional.cross_entropy(names["model"](batch[0]), batch[1])
    torch.testing.assert_close(stand_in.job.loss(names["model"], batch), expected * count)


BY_EPOCHS = {
    "each step": (STEP + "scheduler.step()", 1),
    "each epoch": (STEP + "if (k + 1) % len(loader) == 0:\n    scheduler.step()", 4),
    "each second": (STEP + "if k % 2 == 1:\n    scheduler.step()", 2),
    "behind a sum": (
        "loss.backward()\nif k % 2 == 1:\n    optimizer.step()\n    optimizer.zero_grad()\n"
        + "if (k + 1) % len(loader) == 0:\n    scheduler.step()",
        2,
    ),
    "in a sum": (
        "loss.backward()\nif k % 2 == 1:\n    optimizer.step()\n    optimizer.zero_grad()\n"
        + "    if (k + 1) % len(loader) == 0:\n        scheduler.step()",
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "updates"), BY_EPOCHS.values(), ids=BY_EPOCHS)
def test_a_scheduler_under_a_count_is_stepped_after_so_many_updates(
    monkeypatch, tmp_path, body, updates
):
    begin = "loader = DataLoader(loader.dataset, 5)\n"
    call = {"target": "k, (x, y)", "steps": "enumerate(steps)", "call": "opened(epochs=3)"}
    stand_in, names = taken(monkeypatch, tmp_path, begin + loop_of(LOSS + body, **call))
    optimizer = stand_in.job.optimizer(ps.job.Parameters(list(names["model"].named_parameters())))
    scheduler = stand_in.job.scheduler(optimizer)
    rates = []
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    plain = [1e-2 * (0.25 + 0.75 * min(step // updates, 4) / 4) for step in range(1, 9)]
    assert rates == pytest.approx(plain)


RATES_OTHERWISE = {
    "too soon": ("if (k + 2) % 3 == 0:\n    scheduler.step()", "first change of rates does not"),
    "an else": ("if (k + 1) % 3 == 0:\n    scheduler.step()\nelse:\n    total = 0.0", "others"),
    "before": ("if (k + 1) % 3 == 0:\n    scheduler.step()\n" + UPDATE, "before the optimizer"),
    "an unknown count": ("if (k + 1) % len(x) == 0:\n    scheduler.step()", "no whole number"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "said"), RATES_OTHERWISE.values(), ids=RATES_OTHERWISE)
def test_rates_that_no_count_says_are_refused_with_their_line(monkeypatch, tmp_path, body, said):
    call = {"target": "k, (x, y)", "steps": "enumerate(steps)"}
    update = "" if UPDATE in body else UPDATE
    text = loop_of(LOSS + "loss.backward()\n" + update + body, **call)
    with pytest.raises(JobError, match=said) as problem:
        taken(monkeypatch, tmp_path, text)
    assert problem.value.message.startswith("line ")


def test_rates_that_change_within_an_update_are_refused(monkeypatch, tmp_path):
    body = LOSS + "loss.backward()\n"
    body += "if k % 2 == 1:\n    optimizer.step()\n    optimizer.zero_grad()\n"
    body += "if (k + 1) % 3 == 0:\n    scheduler.step()"
    text = loop_of(body, target="k, (x, y)", steps="enumerate(steps)", call="opened(epochs=2)")
    with pytest.raises(JobError, match="after 3 batches, an update follows 2"):
        taken(monkeypatch, tmp_path, text)


EACH_4TH = "if (k + 2) % 4 == 0:\n    optimizer.step()\n    optimizer.zero_grad()"
SUMMED_OTHERWISE = {
    "too soon": (EACH_4TH.replace("k + 2", "k + 1"), "the first update does not follow 4"),
    "the last too": (EACH_4TH.replace("== 0", "== 0 or k == 9"), "not said by a count"),
    "a count in the loop": (EACH_4TH.replace("4", "count"), "`count` is no whole number"),
    "another number": (EACH_4TH.replace("k + 2", "2 * k"), "is not the number of the batch"),
    "rates of each batch": ("scheduler.step()\n" + EACH_4TH, "each batch does it"),
    "cleared by each batch": ("optimizer.zero_grad()\n" + EACH_4TH, "each batch does it"),
    "never cleared": (EACH_4TH.rpartition("\n")[0], "nothing clears"),
    "cleared first": (
        "if (k + 2) % 4 == 0:\n    optimizer.zero_grad()\n    optimizer.step()",
        "cleared before they are used",
    ),
    "losses of each batch": ("losses.append(loss.item())\n" + EACH_4TH, "each batch says it"),
    "the last loss": (EACH_4TH + "\n    print(loss.item())", "of the last batch alone"),
    "behind the update": (EACH_4TH + "\ntotal += loss.item()", "behind the update"),
    "an else": (EACH_4TH + "\nelse:\n    total = 0.0", "does more than to add"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "said"), SUMMED_OTHERWISE.values(), ids=SUMMED_OTHERWISE)
def test_sums_that_no_micro_batches_have_are_refused_with_their_line(
    monkeypatch, tmp_path, body, said
):
    begin = "count = len(losses) + 4\n" + LOSS if "count" in body else LOSS
    text = loop_of(begin + "loss.backward()\n" + body, call="opened(epochs=4)", **COUNTED)
    with pytest.raises(JobError, match=said) as problem:
        taken(monkeypatch, tmp_path, text)
    assert problem.value.message.startswith("line ")
    assert problem.value.hint


@pytest.mark.parametrize(
    ("epochs", "hint"), [(3, "say num_steps=2 to ps.loop: these are left out"), (1, "sum fewer")]
)
def test_batches_that_no_update_follows_are_refused(monkeypatch, tmp_path, epochs, hint):
    text = loop_of(
        LOSS + "loss.backward()\n" + EACH_4TH, call=f"opened(epochs={epochs})", **COUNTED
    )
    with pytest.raises(JobError, match=r"the last \d have none") as problem:
        taken(monkeypatch, tmp_path, text)
    assert problem.value.hint == hint


def test_the_last_loss_of_a_sum_is_not_read_behind(monkeypatch, tmp_path):
    text = loop_of(LOSS + "loss.backward()\n" + EACH_4TH, call="opened(epochs=4)", **COUNTED)
    with pytest.raises(JobError, match="`loss` behind the loop is the last batch's alone"):
        taken(monkeypatch, tmp_path, text + "print(loss)\n")


REFUSED = {
    "two backwards": (LOSS + "loss.backward()\n" + STEP, "a second time"),
    "accumulated": (
        LOSS + "loss.backward()\nif total:\n    optimizer.step()\n    optimizer.zero_grad()",
        "not said by a count of batches",
    ),
    "accumulated later": (
        LOSS + "loss.backward()\noptimizer.step()\nif total:\n    optimizer.zero_grad()",
        "nothing clears the gradients",
    ),
    "never cleared": (LOSS + "loss.backward()\noptimizer.step()", "nothing clears"),
    "cleared too soon": (
        LOSS + "loss.backward()\noptimizer.zero_grad()\noptimizer.step()",
        "cleared before they are used",
    ),
    "an update first": (LOSS + UPDATE + "loss.backward()\n", "the update comes"),
    "a closure": (LOSS + STEP.replace("step()", "step(lambda: 0)"), "is given something"),
    "a kept graph": (LOSS + STEP.replace("backward()", "backward(retain_graph=True)"), "given"),
    "rates first": (LOSS + "scheduler.step()\n" + STEP, "before the optimizer"),
    "rates in its own way": (
        LOSS + STEP + "if total:\n    scheduler.step()\n    total = 0.0",
        "in its own way",
    ),
    "rates by what was": (
        LOSS + STEP + "if total:\n    scheduler.step()",
        "when rates change is not said by a count",
    ),
    "clipped before": ("clip_grad_norm_(model.parameters(), 1)\n" + LOSS + STEP, "there are none"),
    "clipped in part": (
        LOSS + "loss.backward()\n" + CLIP.replace("model.", "model[0].") + UPDATE,
        "the whole model's",
    ),
    "an end": (LOSS + STEP + "if loss.item() < 1:\n    break", "number of steps is known"),
    "left out": ("if x.sum() > 0:\n    continue\n" + LOSS + STEP, "number of steps is known"),
    "a count": ("total += 1\n" + LOSS + STEP, "goes on from step to step"),
    "a mean that goes on": (
        LOSS.replace("loss = ", "loss = (1 + total) * ") + STEP + "total = 0.9 * loss.item()",
        "`total` is set from step to step",
    ),
    "a list that grows": (
        "weight = 1 / (1 + len(losses))\n" + LOSS + STEP + "losses.append(loss.item())",
        "`losses` is set from step to step",
    ),
    "an entry by name": (
        LOSS.replace("loss = ", "loss = OPEN.get(0, 1) * ") + STEP + "OPEN[0] = loss.item()",
        "`OPEN` is set from step to step",
    ),
    "what a function reads": (
        "loss = weighted(model(x).square().mean())\n" + STEP + "FACTORS['mean'] = loss.item()",
        "`FACTORS` is set from step to step",
    ),
    "a list that grows before": (
        LOSS + "losses.append(loss.item())\n" + STEP + "print(losses)",
        "`losses` is changed with the loss",
    ),
    "a look at the optimizer": (
        LOSS + STEP + "print(optimizer.param_groups[0]['lr'])",
        "`optimizer.*in its own way",
    ),
    "a look at the model": (LOSS + STEP + "print(model[0].weight)", "in its own way"),
    "a look by a function": (LOSS + STEP + "losses.append(scaled(1))", "may look at the model"),
    "backward inside": (
        "with torch.enable_grad():\n    loss = model(x).sum()\n    loss.backward()\n" + STEP,
        "inside another statement",
    ),
    "eval behind": (LOSS + STEP + "model.train()", "after its loss"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "said"), REFUSED.values(), ids=REFUSED)
def test_a_statement_that_no_job_has_is_refused_with_its_line(monkeypatch, tmp_path, body, said):
    with pytest.raises(JobError, match=said) as problem:
        taken(monkeypatch, tmp_path, loop_of(body))
    assert problem.value.message.startswith("line ")
    assert problem.value.hint


READ_ELSEWHERE = {  # what the loss reads through other objects; what a step does behind it
    "a criterion": (
        "class Crit(nn.Module):\n    def forward(self, o, y):\n"
        "        return w * F.cross_entropy(o, y)\nw, crit = 1.0, Crit()",
        "w = w * 0.5",
    ),
    "a class above": (
        "class Above:\n    def __call__(self, o, y):\n        return w * F.cross_entropy(o, y)\n"
        "class Crit(Above):\n    pass\nw, crit = 1.0, Crit()",
        "w = w * 0.5",
    ),
    "a partial": (
        "def _c(o, y, k):\n    return W[0] * F.cross_entropy(o, y)\n"
        "W, crit = [1.0], functools.partial(_c, k=1)",
        "W[0] = W[0] * 0.5",
    ),
    "an argument of a partial": (
        "def _c(ws, o, y):\n    return ws[0] * F.cross_entropy(o, y)\n"
        "W = [1.0]\ncrit = functools.partial(_c, W)",
        "W[0] = W[0] * 0.5",
    ),
    "an alias": (
        "def crit(o, y):\n    return ws[0] * F.cross_entropy(o, y)\nws = [1.0]\nalias = ws",
        "alias[0] = alias[0] * 0.5",
    ),
    "an alias of the loop": (
        "def crit(o, y):\n    return ws[0] * F.cross_entropy(o, y)\nws = [1.0]",
        "alias = ws\nalias[0] = alias[0] * 0.5",
    ),
    "an item of the loop": (
        "def crit(o, y):\n    return ws[0] * F.cross_entropy(o, y)\nws = [1.0]\nall = [ws]",
        "for one in all:\n    one[0] = 0.5",
    ),
    "an alias inside": (
        "def crit(o, y):\n    return ws[0] * F.cross_entropy(o, y)\nws = [1.0]\nall = {'a': [ws]}",
        "all['a'][0][0] = 0.5",
    ),
    "a list that it keeps": (
        "class Crit:\n    def __init__(self):\n        self.ws = W\n"
        "    def __call__(self, o, y):\n        return self.ws[0] * F.cross_entropy(o, y)\n"
        "W = [1.0]\ncrit = Crit()",
        "W[0] = W[0] * 0.5",
    ),
    "a slot": (
        "class Crit:\n    __slots__ = ('ws',)\n"
        "    def __call__(self, o, y):\n        return self.ws[0] * F.cross_entropy(o, y)\n"
        "W, crit = [1.0], Crit()\ncrit.ws = W",
        "W[0] = W[0] * 0.5",
    ),
    "a closure": (
        "def made(ws):\n    def c(o, y):\n        return ws[0] * F.cross_entropy(o, y)\n"
        "    return c\nW = [1.0]\ncrit = made(W)",
        "W[0] = W[0] * 0.5",
    ),
    "a default": (
        "W = [1.0]\ndef crit(o, y, ws=W):\n    return ws[0] * F.cross_entropy(o, y)",
        "W[0] = W[0] * 0.5",
    ),
    "a wrapped function": (
        "@functools.lru_cache\ndef factor():\n    return W[0]\nW = [1.0]\n"
        "def crit(o, y):\n    return factor() * F.cross_entropy(o, y)",
        "W[0] = W[0] * 0.5",
    ),
    "a wrapper of a library": (
        "@torch.enable_grad()\ndef crit(o, y):\n    return W[0] * F.cross_entropy(o, y)\nW = [1.0]",
        "W[0] = W[0] * 0.5",
    ),
    "a property": (
        "class Cfg:\n    @property\n    def w(self):\n        return W[0]\ncfg, W = Cfg(), [1.0]\n"
        "def crit(o, y):\n    return cfg.w * F.cross_entropy(o, y)",
        "W[0] = W[0] * 0.5",
    ),
    "a method of a class": (
        "class cfg:\n    w = 1.0\n    @classmethod\n    def of(cls):\n        return cls.w\n"
        "def crit(o, y):\n    return cfg.of() * F.cross_entropy(o, y)",
        "cfg.w = cfg.w * 0.5",
    ),
    "the same attribute": (
        "class cfg:\n    w = 1.0\ndef crit(o, y):\n    return cfg.w * F.cross_entropy(o, y)",
        "cfg.w *= 0.5",
    ),
    "an attribute by its name": (
        "class cfg:\n    w = 1.0\ndef crit(o, y):\n    return cfg.w * F.cross_entropy(o, y)",
        "setattr(cfg, 'w', 0.5)",
    ),
    "an attribute behind another": (
        "class Cfg:\n    def __init__(self):\n        self.w = 1.0\n"
        "    half = property(lambda self: self.w, lambda self, w: setattr(self, 'w', w))\n"
        "cfg = Cfg()\ndef crit(o, y):\n    return cfg.w * F.cross_entropy(o, y)",
        "cfg.half = 0.5",
    ),
    "an object passed whole": (
        "class cfg:\n    w = 1.0\ndef factor(one):\n    return one.w\n"
        "def crit(o, y):\n    return factor(cfg) * F.cross_entropy(o, y)",
        "cfg.w *= 0.5",
    ),
    "a list in place": (
        "def crit(o, y):\n    return sum(ws) * F.cross_entropy(o, y)\nws = [1.0]\nalias = ws",
        "alias += [loss.item()]",
    ),
    "a module beside": ("import beside\ncrit = beside.crit", "beside.w = beside.w * 0.5"),
    "a list of a module beside": (
        "import beside\nfrom beside import W\ncrit = beside.crit",
        "W[0] = W[0] * 0.5",
    ),
}  # fmt: skip
BESIDE = "w, W = 1.0, [1.0]\ndef crit(o, y):\n    return w * W[0] * (o.sum() - y.sum())\n"
CRIT = "loss = crit(model(x), y)\n"


@pytest.mark.parametrize(("begin", "behind"), READ_ELSEWHERE.values(), ids=READ_ELSEWHERE)
def test_what_the_loss_reads_through_others_is_not_changed_by_a_step(
    monkeypatch, tmp_path, begin, behind
):
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    text = f"import functools\n{begin}\n" + loop_of(CRIT + STEP + behind)
    with pytest.raises(JobError, match="is set from step to step, and the loss reads it"):
        taken(monkeypatch, tmp_path, text)


def test_what_a_function_around_the_loop_gives_its_loss_is_not_changed_by_a_step(
    monkeypatch, tmp_path
):
    for value, behind in (("1.5", "w = w * 0.5"), ("[1.5]", "w[0] = w[0] * 0.5")):
        begin = (
            f"w = {value}\ndef crit(o, y):\n    return torch.tensor(w) * F.cross_entropy(o, y)\n"
        )
        text = "def main():\n" + textwrap.indent(begin + loop_of(CRIT + STEP + behind), "    ")
        with pytest.raises(JobError, match="`w` is set from step to step"):
            taken(monkeypatch, tmp_path, text + "main()\n")


TAKEN = {
    "a criterion of torch": ("crit = nn.CrossEntropyLoss()", "total += loss.item()"),
    "a criterion of its own": (
        "class Crit(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = [1.0]\n    def forward(self, o, y):\n"
        "        return SCALE * self.w[0] * F.cross_entropy(o, y)\nSCALE, crit = 0.5, Crit()",
        "total += loss.item()\nlosses.append(loss.item())\nHISTORY['share'].append(total)",
    ),
    "a counter beside": (
        "class cfg:\n    smooth, steps = 0.1, 0\n"
        "def crit(o, y):\n    return F.cross_entropy(o, y, label_smoothing=cfg.smooth)",
        "cfg.steps += 1",
    ),
    "a counter in a closure": (
        "class Cfg:\n    def __init__(self):\n        self.smooth, self.steps = 0.1, 0\n"
        "def made(cfg):\n    def c(o, y):\n"
        "        return F.cross_entropy(o, y, label_smoothing=cfg.smooth)\n    return c\n"
        "cfg = Cfg()\ncrit = made(cfg)",
        "cfg.steps += 1",
    ),
    "a row of what the loss reads": (
        "class cfg:\n    smooth = 0.1\nfactors = [1.0]\ndef crit(o, y):\n"
        "    return factors[0] * F.cross_entropy(o, y, label_smoothing=cfg.smooth)",
        "row = [cfg.smooth, *factors]\nrow.append(loss.item())\ntotal += row[-1]\ncfg.steps = 1",
    ),
    "a name that is an attribute": (
        "def crit(o, y):\n    return F.nll_loss(o.log_softmax(1), y)\nlog_softmax = 0",
        "log_softmax = loss.item()",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("begin", "behind"), TAKEN.values(), ids=TAKEN)
def test_what_the_loss_does_not_read_may_be_changed_by_a_step(monkeypatch, tmp_path, begin, behind):
    rows = [{"step": 1, "loss": 2.0}]
    stand_in, names = taken(
        monkeypatch, tmp_path, f"{begin}\n" + loop_of(CRIT + STEP + behind), rows
    )
    assert stand_in.job.num_steps == 3
    told = names["cfg"].steps if "cfg" in names else names.get("log_softmax", names["total"])
    assert told == (1 if "cfg" in names else 2.0)


def test_an_object_may_have_the_model_and_keep_what_is_said(monkeypatch, tmp_path):
    body = LOSS.replace("model(x)", "self.net(x)") + STEP
    body += "self.steps += 1\nself.history.append(loss.item())\n"
    text = "class Trainer:\n    def __init__(self):\n        self.net = model\n"
    text += "        self.steps, self.history = 0, []\n\n    def fit(self):\n"
    text += textwrap.indent(loop_of(body), " " * 8) + "\ntrainer = Trainer()\ntrainer.fit()\n"
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    _, names = taken(monkeypatch, tmp_path, text, rows)
    assert (names["trainer"].steps, names["trainer"].history) == (2, [2.0, 1.0])


BOTH = "opened(epochs=1, num_steps=3)"
AROUND = {
    "in a loop": (
        "with opened() as steps:\n    for _ in range(3):\n        for x, y in steps:\n"
        + textwrap.indent(LOSS + STEP, " " * 12),
        "stands in another one",
    ),
    "with an else": (loop_of(LOSS + STEP) + "    else:\n        pass\n", "has an else"),
    "in a bar": (loop_of(LOSS + STEP, steps="reversed(list(steps))"), "takes `for"),
    "not at all": ("with opened() as steps:\n    pass\n", "nothing went through"),
    "twice": (loop_of(LOSS + STEP) + "    for x, y in steps:\n        pass\n", "gone through once"),
    "an index in the loss": (
        loop_of("loss = model(x).sum() * k\n" + STEP, **COUNTED),
        "not of its number",
    ),
    "what is read behind": (
        "logits = 0\n" + loop_of("logits = model(x)\nloss = logits.sum()\n" + STEP) + "logits\n",
        "`logits` is read behind",
    ),
    "what a function counts": (
        "def main():\n    count = 0\n"
        + textwrap.indent(loop_of(LOSS + STEP + "count += 1\n"), "    ")
        + "main()\n",
        "cannot be set from elsewhere",
    ),
    "both ends": (loop_of(LOSS + STEP, call=BOTH), "epochs and num_steps"),
    "its own field": (loop_of(LOSS + STEP, call="opened(fields={'loss': 1})"), "fields has loss"),
    "eval mode": ("model.eval()\n" + loop_of(LOSS + STEP), "in eval mode"),
    "weights of others": (
        "optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})\n"
        + loop_of(LOSS + STEP),
        "weights that the model",
    ),
    "a hook": (
        "optimizer.register_step_post_hook(lambda *_: None)\n" + loop_of(LOSS + STEP),
        "no copy of it",
    ),
    "an optimizer that has begun": (
        "model(inputs).sum().backward()\noptimizer.step()\n" + loop_of(LOSS + STEP),
        "has made steps already",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "said"), AROUND.values(), ids=AROUND)
def test_a_loop_that_no_job_has_is_refused(monkeypatch, tmp_path, text, said):
    with pytest.raises(JobError, match=said) as problem:
        taken(monkeypatch, tmp_path, text)
    assert problem.value.hint


def test_a_loop_without_lines_is_refused(monkeypatch):
    monkeypatch.setattr(looped, "train", Taken())
    text = SETUP + f"opened = {OPENED}\n" + loop_of(LOSS + STEP)
    with pytest.raises(JobError, match="there are none of <typed>"):
        exec(compile(text, "<typed>", "exec"), {"__name__": "typed"})


def test_only_a_module_and_an_optimizer_are_taken():
    with pytest.raises(JobError, match="a Linear and a float"):
        ps.loop(torch.nn.Linear(1, 1), 0.1, [])
