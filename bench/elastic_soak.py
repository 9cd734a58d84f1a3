"""Soak: an elastic run that ranks leave by SIGKILL and join at random moments, for half an hour.

    python -m bench.elastic_soak [--json] [--minutes M] [--every S] [--seed N] [--hosts 2]

`penstock train --elastic --ranks 4` as a process of its own, whose ranks are killed, and replaced
by `penstock join`, as two Poisson processes with a mean of S seconds each; at least one rank is
left, at most four are there.  A chain of three layers in float64, SGD with momentum; a step has 8
micro-batches, each a function of its number alone, which takes 20 ms to read.  The run is asked to
stop by SIGINT; its losses are compared with those of a plain loop in this process, step by step.

steps             that it made; `lost` and `repeated`: rows of metrics.jsonl that lack or come twice
went_back         generations that began with a checkpoint
largest_error     of a step's loss, relative to the plain loop's
kills, joins      that happened, and `generations` that there were
memory            resident MiB of the process that began the run, a minute after the first step and
                  at the end, and of its largest rank; `files` likewise: open ones
left              processes and files of shared memory that are there when all is over
recovered_s       with --hosts 2, from the kill of a host to the end of the next step: the median,
                  and `worst_recovered_s`; hosts are killed whole, and come back (soak_hosts.py)
replayed_s        until the last generation began, by `penstock fleet`: the run's own trace of
                  ranks, speeds and pauses of its first third; `measured_s`: by the clock
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.machine import machine
from bench.soak_hosts import HOSTS, on_hosts, recoveries
from bench.soak_hosts import disturb as disturb_hosts
from penstock.fleet import policies
from penstock.fleet.market import priced
from penstock.fleet.of_run import recorded
from penstock.fleet.replay import Ruler, replay
from penstock.fleet.traces import read_market
from penstock.job import Job
from penstock.training.events import EVENTS

WIDTH, SAMPLES, MICRO_BATCHES, RANKS = 32, 4, 8, 4
_START_S, _END_S = 300.0, 120.0  # at most
_SETTLED_S = 60.0  # after the first step: what is held from then on is all that is ever held
_READ_S = 0.02  # of a micro-batch
_SHM = Path("/dev/shm")
Row = dict[str, float | int | str]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = ((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*itertools.chain(*layers)).double()


def batches(start: int) -> Iterator[Tensor]:
    for index in itertools.count(start):
        source = torch.Generator().manual_seed(index)
        yield torch.randn(SAMPLES, WIDTH, generator=source, dtype=torch.float64)


def loss(net: nn.Module, batch: Tensor) -> Tensor:
    return (net(batch) - 0.5 * batch.roll(1, 1)).square().mean()


def optimizer(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.05, momentum=0.9)


def slow_batches(start: int) -> Iterator[Tensor]:
    for batch in batches(start):
        time.sleep(_READ_S)
        yield batch


def job() -> Job:
    return Job(model, loss, slow_batches, optimizer, micro_batches=MICRO_BATCHES, num_steps=10**8)


def plain_losses(count: int) -> Iterator[float]:
    """Yield the losses of a plain loop."""
    net, data = model(), batches(0)
    update = optimizer(net.parameters())
    for _ in range(count):
        update.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            part = loss(net, next(data)) / MICRO_BATCHES
            part.backward()
            total += part.item()
        update.step()
        yield total


# -- the run --------------------------------------------------------------------------------------


@dataclass
class Disturbed:
    """A run under way, and who takes part in it.

    joined:    processes of `penstock join` that were started; killed: when ranks were.
    """

    folder: Path
    source: random.Random
    every_s: float
    joined: list[subprocess.Popen[bytes]] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process = self._penstock(
            "train", "bench.elastic_soak:job", "--elastic", "--ranks", str(RANKS),
            "--set", "trial=false", "--set", "checkpoint_every=20s", "--out", str(self.folder),
        )  # fmt: skip

    def _penstock(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder.parent / "said").open("ab") as said:
            command = [sys.executable, "-m", "penstock", *words]
            return subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)

    def said(self) -> str:
        """Return the last of what the commands have said."""
        return (self.folder.parent / "said").read_text()[-4000:]

    def began(self) -> bool:
        """Return whether a step is over."""
        path = self.folder / "metrics.jsonl"
        return path.exists() and path.stat().st_size > 0

    def ranks(self) -> list[int]:
        """Return the processes that are ranks now, or will be."""
        children = _children(self.process.pid)
        return children + [each.pid for each in self.joined if each.poll() is None]

    def left(self) -> int:
        """Return how many ranks take part for certain: of the newest generation, less the killed.

        Who has been started and is not taken in yet is none of them.
        """
        event = json.loads((self.folder / EVENTS).read_text().splitlines()[-1])
        return len(event["members"]) - sum(at > event["time"] for at in self.killed)

    def kill(self) -> None:
        """Kill one of the ranks, unless it may be the last one that takes part.

        Of those that began the run one stays: through it the run is asked to end.
        """
        own, ranks = _children(self.process.pid), self.ranks()
        victims = ranks if len(own) > 1 else [rank for rank in ranks if rank not in own]
        if self.left() > 1 and victims:
            os.kill(self.source.choice(victims), signal.SIGKILL)
            self.killed.append(time.time())

    def join(self) -> None:
        """Let another process join where there is room."""
        if len(self.ranks()) < RANKS:
            self.joined.append(self._penstock("join", str(self.folder)))

    def end(self) -> None:
        """Ask all to stop, and return once they have."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(_END_S)
        for each in self.joined:
            each.wait(_END_S)

    def close(self) -> None:
        """Let nothing of it live on."""
        for each in (self.process, *self.joined):
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()


def _children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


class Held(NamedTuple):
    """Resident MiB, and open files."""

    mib: float
    files: int


def _held(process: int) -> Held:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Held(mib, len(os.listdir(f"/proc/{process}/fd")))


def _most_held(run: Disturbed) -> tuple[Held, Held]:
    """Return the bytes that the first process holds, and the most that a rank holds."""
    found = [Held(0.0, 0)]
    for rank in run.ranks():
        with suppress(OSError):  # it has just been killed
            found.append(_held(rank))
    return _held(run.process.pid), Held(*(max(column) for column in zip(*found, strict=True)))


def disturb(run: Disturbed, lasts_s: float, told: Any) -> tuple[tuple[Held, Held], ...]:
    """Kill and let join for so long; return what is held early, and at the end."""
    until = time.monotonic() + _START_S
    while not run.began():
        if run.process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"no step: {run.said()}")
        time.sleep(0.1)
    start, early = time.monotonic(), None
    kill_s, join_s = (run.source.expovariate(1 / run.every_s) for _ in range(2))
    while (now_s := time.monotonic() - start) < lasts_s:
        if run.process.poll() is not None:
            raise RuntimeError(f"the run has ended: {run.said()}")
        if now_s > kill_s:
            run.kill()
            kill_s += run.source.expovariate(1 / run.every_s)
        if now_s > join_s:
            run.join()
            join_s += run.source.expovariate(1 / run.every_s)
        if early is None and now_s > min(_SETTLED_S, lasts_s / 2):
            early = _most_held(run)
        told(f"{now_s:,.0f} of {lasts_s:,.0f} s, {len(run.killed)} kills, {len(run.joined)} joins")
        time.sleep(0.2)
    assert early is not None, "it lasts longer than that"
    return early, _most_held(run)


def soak(folder: Path, minutes: float, every_s: float, seed: int, told: Any) -> Row:
    """Return the row of one run."""
    before = set(os.listdir(_SHM))
    run = Disturbed(folder / "run", random.Random(seed), every_s)
    try:
        early, late = disturb(run, 60 * minutes, told)
        own = [run.process.pid, *run.ranks()]
        run.end()
    finally:
        run.close()
    left = [pid for pid in own if Path(f"/proc/{pid}").exists()]
    return {
        "minutes": minutes,
        "every_s": every_s,
        **steps_of(folder / "run", told),
        "kills": len(run.killed),
        "memory_early": early[0].mib,
        "memory_late": late[0].mib,
        "rank_memory_early": early[1].mib,
        "rank_memory_late": late[1].mib,
        "files_early": max(held.files for held in early),
        "files_late": max(held.files for held in late),
        **replayed(folder / "run", 60 * minutes / 3),
        "left": len(left) + len(set(os.listdir(_SHM)) - before),
    }


def soak_hosts(folder: Path, minutes: float, every_s: float, seed: int, told: Any) -> Row:
    """Return the row of one run on two hosts, which are killed whole."""
    before = set(os.listdir(_SHM))
    with on_hosts(folder / "run", random.Random(seed)) as run:
        disturb_hosts(run, 60 * minutes, every_s, told)
        run.end()
        left = sum(len(run.processes(host)) for host in range(HOSTS))
    return {
        "minutes": minutes,
        "every_s": every_s,
        **steps_of(folder / "run", told),
        "kills": len(run.killed),
        **recoveries(run.recovered_s()),
        "left": left + len(set(os.listdir(_SHM)) - before),
    }


def steps_of(folder: Path, told: Any) -> Row:
    """Return what became of the steps of a run, beside a plain loop, and of its generations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    events = (folder / EVENTS).read_text().splitlines()
    steps, count = [row["step"] for row in rows], rows[-1]["step"]
    losses = {row["step"]: row["loss"] for row in rows}
    told(f"a plain loop of {count:,} steps")
    plain = dict(enumerate(plain_losses(count), 1))
    told_back = (json.loads(event)["back_to"] for event in events[1:])
    return {
        "steps": count,
        "went_back": sum(back not in ("", "start") for back in told_back),
        "lost": len(set(range(1, count + 1)) - set(steps)),
        "repeated": len(steps) - len(set(steps)),
        "largest_error": max(abs(losses[step] / plain[step] - 1) for step in losses),
        "first_loss": losses[1],
        "last_loss": losses[count],
        "joins": sum(json.loads(event)["what"] == "joined" for event in events),
        "generations": len(events),
    }


def replayed(folder: Path, first_s: float) -> Row:
    """Return the seconds of the run to its last generation, replayed and by the clock."""
    found = recorded(folder, first_s)
    (folder / "ranks.csv").write_text(found.csv)
    market = priced(read_market(folder / "ranks.csv"), 1.0, 0.3)
    ruler = Ruler("transient", policies.transient)
    run = replay(market, found.job, ruler, deadline_s=10 * found.seconds, tick_s=1.0)
    return {
        "replayed_s": 3600 * run.hours,
        "measured_s": found.seconds,
        "replay_error": 3600 * run.hours / found.seconds - 1,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.elastic_soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="as namespaces")
    asked = parser.parse_args(arguments)
    is_shown = sys.stderr.isatty()

    def told(words: str) -> None:
        if is_shown:
            sys.stderr.write(f"\r\x1b[K{words}")

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        soaks = soak if asked.hosts == 1 else soak_hosts
        row = soaks(Path(folder), asked.minutes, asked.every, asked.seed, told)
    told("")
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": [row]}))
    else:
        print(
            "\n".join(
                f"{name:<16}{value:>14,.4g}"
                if isinstance(value, float)
                else f"{name:<16}{value:>14}"
                for name, value in row.items()
            )
        )
    return int(bool(row["lost"] or row["repeated"] or row["left"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
