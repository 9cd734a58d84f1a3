"""Checkpoints: for how long training stands still, beside torch's ways; and killed while writing.

    python -m bench.checkpoint [--json] [--mib N] [--rounds N] [--kills N]

One rank with AdamW-like state of so many MiB, in float32, in tensors of 4 MiB.  All ways take
turns; each writes to the same disk, and the next one begins when it is done.

way                 ours: a copy into memory that another process writes from; at_once: ours, waited
                    for; torch_save, dcp_save, dcp_async (a thread) and dcp_async_process (its
                    process, into shared memory that is kept); memcpy: one thread, the floor
first_s             for which training stands still, the first time
blocked_s           afterwards: median, least, most
whole_s             until the checkpoint is there: median

elastic             one rank of an elastic run; and at once, as it is where there is no memory for a
                    copy: by how much a step takes longer for it

beside              a product of matrices: median seconds alone, and while ours is written

kills               SIGKILL to a rank and its writer at a random moment, so often: how many left a
                    checkpoint half-written, at which part of its bytes (deciles), and how often the
                    newest whole one was there, with the values of its step
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.machine import machine
from penstock.checkpoints import checkpoint, saver
from penstock.checkpoints.control import Control
from penstock.checkpoints.saver import SavePolicy, Saver, State, saving
from penstock.choose.choose import Choice, Joining
from penstock.choose.run_windows import windows_of
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.members.launch_members import Scribe, Start, run_members
from penstock.members.words import View
from penstock.pilot.losses import PlanBasis, committing
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import stages_of
from penstock.profile.measure import measure
from penstock.runtime.launch import run_threads
from penstock.runtime.worker import RankResult, Report, Task
from penstock.search import Fixed
from penstock.training.begin import Begin
from penstock.training.elastic_run import ElasticRun, RunPilot, text_of
from penstock.transport import Transport

MiB = 2**20
TENSOR_BYTES = 4 * MiB
State_dict = dict[str, Tensor]
Way = Callable[[Path, int], tuple[float, float]]  # (folder, number) -> seconds blocked, until whole


def state_of(size_bytes: int) -> State_dict:
    """Return weights and two moments, in tensors of 4 MiB."""
    kinds = "weights/{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq"
    count = max(1, size_bytes // TENSOR_BYTES)
    keys = [kinds[at % 3].format(f"layers.{at // 3}.weight") for at in range(count)]
    return {key: torch.empty(TENSOR_BYTES // 4).uniform_() for key in keys}


def ways_of(tensors: State_dict, own: Saver) -> dict[str, Way]:
    """Return the ways to save, by name."""
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager, copy = DefaultStager(options), {key: torch.empty_like(v) for key, v in tensors.items()}
    state: State = (tensors, {})

    def ours(folder: Path, number: int) -> tuple[float, float]:
        start = time.perf_counter()
        own.save(number, state, waits=False)
        blocked = time.perf_counter() - start
        own.settle()
        return blocked, time.perf_counter() - start

    def at_once(folder: Path, number: int) -> tuple[float, float]:
        return _whole(lambda: own.save(number, state, waits=True))

    def asynchronous(kind: AsyncCheckpointerType, **more: Any) -> Way:
        def save(folder: Path, number: int) -> tuple[float, float]:
            start = time.perf_counter()
            found: Any = dcp.async_save(
                tensors, checkpoint_id=folder, async_checkpointer_type=kind, **more
            )
            blocked = time.perf_counter() - start
            getattr(found, "upload_completion", found).result()
            return blocked, time.perf_counter() - start

        return save

    def memcpy(folder: Path, number: int) -> tuple[float, float]:
        return _whole(lambda: [copy[key].copy_(value) for key, value in tensors.items()])

    return {
        "memcpy": memcpy,
        "ours": ours,
        "at_once": at_once,
        "torch_save": lambda folder, _: _whole(lambda: torch.save(tensors, folder)),
        "dcp_save": lambda folder, _: _whole(lambda: dcp.save(tensors, checkpoint_id=folder)),
        "dcp_async": asynchronous(AsyncCheckpointerType.THREAD),
        "dcp_async_process": asynchronous(AsyncCheckpointerType.PROCESS, async_stager=stager),
    }


def _whole(call: Callable[[], object]) -> tuple[float, float]:
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return seconds, seconds


def measured(place: Path, size_bytes: int, rounds: int) -> dict[str, Any]:
    """Return a row for each way, and what training beside ours takes."""
    tensors, found = state_of(size_bytes), dict[str, Any]()

    def work(transport: Transport, report: Report) -> RankResult:
        with saving(SavePolicy(place / "ours"), transport, Control(None)) as own:
            assert own is not None, "there is a folder"
            own.begin((tensors, {}))
            ways = ways_of(tensors, own)
            rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for number in range(1, rounds + 2):
                for name, way in ways.items():
                    rows[name].append(way(place / name, 10 * number + (name == "at_once")))
                    if name not in ("ours", "at_once"):
                        shutil.rmtree(place / name, ignore_errors=True)
                        (place / name).unlink(missing_ok=True)
            found["rows"] = [_row(name, each) for name, each in rows.items()]
            found["beside"] = _beside(own, (tensors, {}), 10 * rounds + 100)
        return RankResult(0, (), (), 0, (0.0,), 0.0, {})

    run_threads(work, 1, lambda step: None)
    return found


def _row(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
    (first, _), *rest = pairs
    blocked = [seconds for seconds, _ in rest]
    return {
        "way": name,
        "first_s": first,
        "blocked_s": [statistics.median(blocked), min(blocked), max(blocked)],
        "whole_s": statistics.median(seconds for _, seconds in rest),
    }


def _beside(own: Saver, state: State, number: int) -> dict[str, float]:
    """Return the seconds of a computation alone and beside the process that writes."""
    left, right = torch.rand(300, 300), torch.rand(300, 300)

    def seconds() -> float:
        return _whole(lambda: left @ right)[0]

    alone = [seconds() for _ in range(500)]
    beside: list[float] = []
    own.save(number, state, waits=False)
    while own.is_writing():
        beside.append(seconds())
    return {"alone_s": statistics.median(alone), "while_written_s": statistics.median(beside)}


# -- elastic --------------------------------------------------------------------------------------

WIDTH, EVERY = (
    1024,
    12,
)  # of a layer, 4 MiB; steps from a checkpoint to the next, which is there then


def model_of(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def batches(start: int) -> Iterator[Tensor]:
    for index in itertools.count(start):
        yield torch.full((1, WIDTH), 1.0 / (1 + index))


def elastic(place: Path, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return for how long checkpoints block a rank: the first, then median, least and most."""
    layers = max(1, size_bytes // 3 // TENSOR_BYTES)
    every = 12 * max(1, 512 * MiB // size_bytes)  # steps: the one before is there then
    job = Job(
        partial(model_of, layers),
        lambda net, batch: net(batch).square().mean(),
        batches,
        lambda weights: torch.optim.AdamW(weights, 1e-4),
        micro_batches=1,
        num_steps=every * (rounds + 1) + 1,
    )
    free, found = saver.free_bytes, dict[str, list[float]]()
    for name, there in (("elastic", free), ("elastic_at_once", lambda: 0)):
        saver.free_bytes = there
        (place / name).mkdir()
        found[name] = _elastic_once(job, place / name, every)
    saver.free_bytes = free
    return found


def _elastic_once(job: Job, folder: Path, every: int) -> list[float]:
    captured = capture(job)
    graph = captured.graph
    plan = plan_by_hand(graph, [], "one_f_one_b", num_micro_batches=1, num_ranks=1)
    way = Joining(1, job, captured, (measure(captured, job),))
    basis = PlanBasis((way,), Cluster.here(1), Fixed())
    plan = committing(plan, basis)

    def task(choice: Choice, begin: Begin) -> Task:
        windows = windows_of(graph, choice.plan, range(begin.step, job.num_steps), [])
        about = captured, stages_of(choice.plan, graph), job, windows
        policy = SavePolicy(folder / "checkpoints", every)
        return Task(*about, policy=policy, resume=begin.checkpoint)

    told: list[float] = []

    def finish(results: list[RankResult] | None) -> None:
        blocked = [each for one in results or () for each in one.saves.blocked_s]
        (folder / "blocked").write_text(json.dumps(blocked))

    run = ElasticRun(basis, task, {1: plan}, Begin(), job.num_steps, folder)
    start = Start(View(1, 0, text_of(plan), (0,)), b"bench", lambda: RunPilot(run))
    run_members(start, lambda step: told.append(time.perf_counter()), Scribe(_nothing, finish))
    took = [after - before for before, after in itertools.pairwise(told)]
    after_one = took[every - 1 :: every]
    others = statistics.median(s for at, s in enumerate(took) if (at + 1) % every)
    blocked = json.loads((folder / "blocked").read_text()) or [s - others for s in after_one]
    return [blocked[0], statistics.median(blocked[1:]), min(blocked[1:]), max(blocked[1:])]


def _nothing(step: object) -> None:
    """Steps are told to the process that began the run, too."""


# -- killed ---------------------------------------------------------------------------------------


def _victim(place: Path, size_bytes: int, told: int) -> None:
    """Save again and again, as a rank does, until somebody kills this process."""
    os.setsid()

    def work(transport: Transport, report: Report) -> RankResult:
        count = size_bytes // 4
        with saving(SavePolicy(place), transport, Control(None)) as own:
            assert own is not None, "there is a folder"
            own.begin(({"weights/a": torch.zeros(count)}, {}))
            for step in range(1, 10_000):
                state: State = {"weights/a": torch.full((count,), float(step))}, {"step": step}
                own.save(step, state, waits=step == 1)
                own.settle()
                os.write(told, b".")
        return RankResult(0, (), (), 0, (0.0,), 0.0, {})

    run_threads(work, 1, lambda step: None)


def killed(place: Path, size_bytes: int, count: int) -> dict[str, object]:
    """Kill a rank with its writer `count` times; return what was found there each time."""
    draw, parts, whole = random.Random(0), list[float](), 0
    for number in range(count):
        folder = place / str(number)
        reader, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            _victim(folder, size_bytes, told)
        os.close(told)
        times = [time.perf_counter() for _ in range(4) if os.read(reader, 1)]
        time.sleep(draw.uniform(0.0, 2 * (times[-1] - times[1]) / 2))
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        done = 4 + len(_rest(reader))
        sizes = [path.stat().st_size for path in folder.glob(".step-*-*/rank-0.safetensors")]
        parts += [size / size_bytes for size in sizes[:1]]
        found = checkpoint.newest_whole(folder)
        if found is not None and found[1] in (done, done + 1):
            state = checkpoint.load(found[0])
            values = state.tensors["weights/a"]
            whole += bool((values == found[1]).all()) and state.plain == {"step": found[1]}
        shutil.rmtree(folder)
    deciles = statistics.quantiles(parts, n=10) if len(parts) > 1 else parts
    return {"kills": count, "half_written": len(parts), "at": deciles, "resumed_whole": whole}


def _rest(reader: int) -> bytes:
    found = b""
    while more := os.read(reader, 4096):
        found += more
    os.close(reader)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--mib", type=int, default=512, help="of the state")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine(), "mib": options.mib}
    with tempfile.TemporaryDirectory() as folder:
        found |= killed(Path(folder), min(8, options.mib) * MiB, options.kills)
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        found |= measured(Path(folder), options.mib * MiB, options.rounds)
        dist.destroy_process_group()
        found["elastic"] = elastic(Path(folder), options.mib * MiB, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    head = "way", "first", "blocked", "least", "most", "whole"
    timed = {r["way"]: (r["first_s"], *r["blocked_s"], r["whole_s"]) for r in found["rows"]}
    rows = [(way, *(f"{s:.3f}" for s in row)) for way, row in timed.items()]
    rows += [(way, *(f"{s:.3f}" for s in row), "") for way, row in found["elastic"].items()]
    print(face.table(head, rows))
    print({name: found[name] for name in ("beside", "kills", "half_written", "resumed_whole")})


if __name__ == "__main__":
    main()
