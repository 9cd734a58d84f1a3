"""Shapes: texts padded, in buckets and packed, beside plain loops and transformers' collators.

    python -m bench.shapes [--json] [--quick] [--compile] [--rounds N]

A GPT of 4 layers, 128 wide, on one core, over the same texts (lengths log-normal, 8 to 256), about
2,048 places a step, AdamW.  Ways take turns; a way's steps are those of its own data.

way             padded: all to 256; buckets: 32, 64, 128 and 256, of one number of places each;
                packed: rows of 256 under a mask that keeps documents apart; longest: padded to the
                longest of a batch by transformers' collator; flattened: a batch as one row by its
                collator, under the same mask
by              loop: a plain loop, eager; ours: a plan of one rank, traced
tokens_per_s    tokens, padding aside, over the seconds of the steps: median of the rounds
waste           of all places, those without a token
shapes          how many there are among the steps
trace_s         seconds of tracing all shapes; compile_s: of compiling them (--compile)
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import penstock as ps
from bench.machine import machine
from penstock.batches.one_key import job_of_key, keys_of
from penstock.choose.choose import Choice, PlannedKey
from penstock.cli import face
from penstock.graph.trace import build_model, capture
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.of_key import for_key
from penstock.runtime.launch import run_threads
from penstock.runtime.run import Steps, windows_of
from penstock.runtime.worker import Task, work
from penstock.training.task import steps_of_keys

WIDTH, LAYERS, VOCABULARY, LONGEST, PLACES = 128, 4, 256, 256, 2048
BUCKETS = (32, 64, 128, 256)
IGNORED = -100
Row = dict[str, float | int | str | None]
Batch = dict[str, Tensor]


class Block(nn.Module):
    """Attention and two layers, under a mask or causal."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.within, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        parts = self.within(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        made = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(made.transpose(1, 2).flatten(-2))
        return x + self.back(torch.relu(self.wide(self.between(x))))


class Gpt(nn.Module):
    """Says which token follows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.tokens(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the tokens of a batch; documents of a row are kept apart."""
    ids, documents = batch["input_ids"], batch.get("document_ids")
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
    mask = None if documents is None else ps.document_mask(documents)
    logits = model(ids, positions, mask)
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def texts(how_many: int) -> list[Batch]:
    """Return texts: tokens, and what follows each."""
    drawn = torch.Generator().manual_seed(0)
    lengths = (3.9 + 0.8 * torch.randn(how_many, generator=drawn)).exp().long().clamp(8, LONGEST)
    found: list[Batch] = []
    for length in lengths.tolist():
        ids = torch.randint(1, VOCABULARY, (length + 1,), generator=drawn)
        found.append({"input_ids": ids[:-1], "targets": ids[1:]})
    return found


# -- ways -----------------------------------------------------------------------------------------


class Way(NamedTuple):
    """Data, by whom it is trained on, and what that is called."""

    name: str
    by: str
    data: Callable[[int], Iterator[Any]]


def ways(samples: Sequence[Batch]) -> list[Way]:
    """Return all ways that can be tried here."""
    rows = PLACES // LONGEST
    padded = ps.bucketed(samples, (LONGEST,), rows)
    buckets = ps.bucketed(samples, BUCKETS, [PLACES // n for n in BUCKETS], last="pad")
    packed = ps.packed(samples, LONGEST, rows)
    found = [
        Way(name, by, data)
        for name, data in (("padded", padded), ("buckets", buckets), ("packed", packed))
        for by in ("loop", "ours")
    ]
    try:
        import transformers
    except ImportError:
        return found
    hf: Any = transformers
    size = round(PLACES / statistics.fmean(len(each["input_ids"]) for each in samples))
    flat = hf.DataCollatorWithFlattening(return_seq_idx=True)
    found.append(Way("longest", "loop", collated(samples, rows, partial(longest, hf))))
    found.append(Way("flattened", "loop", collated(samples, size, partial(flattened, flat))))
    return found


def collated(
    samples: Sequence[Batch], size: int, collate: Callable[[list[Batch]], Batch]
) -> Callable[[int], Iterator[Batch]]:
    """Return data in which a collator makes batches of so many samples, epoch after epoch."""
    return ps.batches(samples, size, collate=collate)


def longest(hf: Any, samples: list[Batch]) -> Batch:
    """Return a batch padded to its longest, by transformers."""
    collate = hf.DataCollatorForTokenClassification(Tokenizer(), return_tensors="pt")
    rows = [
        {"input_ids": each["input_ids"].tolist(), "labels": each["targets"].tolist()}
        for each in samples
    ]
    made = collate(rows)
    return {"input_ids": made["input_ids"], "targets": made["labels"]}


class Tokenizer:
    """As much of a tokenizer as the collator asks for."""

    padding_side, pad_token_id = "right", 0

    def pad(self, rows: Any, **_: object) -> dict[str, Tensor]:
        """Return `input_ids` padded to the longest."""
        ids = [torch.as_tensor(each["input_ids"]) for each in rows]
        return {"input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True)}


def flattened(collate: Any, samples: list[Batch]) -> Batch:
    """Return a batch as one row, by transformers."""
    rows = [
        {"input_ids": each["input_ids"].tolist(), "labels": each["targets"].tolist()}
        for each in samples
    ]
    made = collate(rows)
    targets = torch.cat([each["targets"] for each in samples])[None]
    return {
        "input_ids": made["input_ids"],
        "targets": targets,
        "position_ids": made["position_ids"],
        "document_ids": made["seq_idx"].long() + 1,
    }


# -- a turn ---------------------------------------------------------------------------------------


def sizes_of(way: Way, steps: int) -> tuple[int, int, int]:
    """Return tokens and places of the first steps, and how many shapes these have."""
    batches = list(islice(way.data(0), steps))
    tokens = sum(int((each["targets"] != IGNORED).sum()) for each in batches)
    shapes = {tuple(each["input_ids"].shape) for each in batches}
    return tokens, sum(each["input_ids"].numel() for each in batches), len(shapes)


def loop(way: Way, steps: int) -> Callable[[], float]:
    """Return what takes a turn: the seconds of so many steps of a plain loop."""
    model = build_model(job_of(way))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def turn() -> float:
        spent = 0.0
        for batch in islice(way.data(0), steps):
            start = time.perf_counter()
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            spent += time.perf_counter() - start
        return spent

    return turn


def job_of(way: Way) -> ps.Job:
    return ps.Job(
        model=Gpt,
        loss=loss_of,
        data=way.data,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
        micro_batches=1,
    )


def ours(way: Way, steps: int, *, compiles: bool) -> tuple[Callable[[], float], float, float]:
    """Return what takes a turn, and the seconds of tracing and of compiling."""
    start = time.perf_counter()
    choice = traced(way)
    trace_s = time.perf_counter() - start
    task = task_of(choice, steps)
    start = time.perf_counter()
    if compiles:
        task = task.remade(compiled=True).compile_ahead()
    compile_s = time.perf_counter() - start

    def turn() -> float:
        told = Steps(1)
        run_threads(partial(work, task), 1, told.add, groups=task.groups)
        return sum(step.seconds for step in told.finished)

    return turn, trace_s, compile_s


def traced(way: Way) -> Choice:
    """Return a plan of one rank for all shapes of a way."""
    job = job_of(way)
    keys = list(keys_of(job)) or [None]
    captures = [capture(job if key is None else job_of_key(job, key)) for key in keys]
    first = captures[0].graph
    plan = plan_by_hand(first, [], "gpipe", num_micro_batches=1)
    others: list[PlannedKey] = []
    for key, captured in zip(keys[1:], captures[1:], strict=True):
        made, graph = for_key(plan, first, captured.graph)
        of_key = replace(captured, graph=graph, model=captures[0].model)
        others.append(PlannedKey(key, 0.0, of_key, made))
    return Choice(job, captures[0], plan, keys[0], tuple(others))


def task_of(choice: Choice, steps: int) -> Task:
    stages = stages_of(choice.plan, choice.captured.graph)
    if choice.others:
        keys, windows = steps_of_keys(choice, range(steps))
        return Task(choice.captured, stages, choice.job, windows, keys=keys)
    program = lower_plan(choice.plan, choice.captured.graph)
    return Task(choice.captured, stages, choice.job, windows_of(program, steps))


def rows_of(how_many: int, steps: int, rounds: int, *, compiles: bool) -> list[Row]:
    """Return a row for each way."""
    samples = texts(how_many)
    found = ways(samples)
    turns: list[tuple[Callable[[], float], float | None, float | None]] = []
    for way in found:
        if way.by == "ours":
            turn, trace_s, compile_s = ours(way, steps, compiles=compiles)
            turns.append((turn, trace_s, compile_s if compiles else None))
        else:
            turns.append((loop(way, steps), None, None))
    for turn, *_ in turns:
        turn()  # warm
    spent: list[list[float]] = [[] for _ in found]
    for number in range(rounds):
        places = range(len(found)) if number % 2 == 0 else reversed(range(len(found)))
        for at in places:
            spent[at].append(turns[at][0]())
    rows: list[Row] = []
    for way, seconds, (_, trace_s, compile_s) in zip(found, spent, turns, strict=True):
        tokens, size, shapes = sizes_of(way, steps)
        rows.append(
            {
                "way": way.name,
                "by": way.by,
                "tokens_per_s": tokens / statistics.median(seconds),
                "waste": 1 - tokens / size,
                "shapes": shapes,
                "step_s": statistics.median(seconds) / steps,
                "trace_s": trace_s,
                "compile_s": compile_s,
            }
        )
    return rows


def _shown(value: float | str | None) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def main(arguments: Sequence[str]) -> int:
    """Print the rows; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.shapes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="few steps: that it works")
    parser.add_argument("--compile", action="store_true", help="compile the ops of our ways")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    how_many, steps, rounds = (400, 4, 1) if asked.quick else (3000, 24, asked.rounds)
    rows = rows_of(how_many, steps, rounds, compiles=asked.compile)
    if asked.json:
        print(json.dumps({"rows": rows, "machine": machine()}))
    else:
        print(face.table(list(rows[0]), [list(map(_shown, row.values())) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
