"""What the learner of `penstock fleet predict` foresees of the published measurements.

Each set is judged by groups that were left out whole - models, placements, runs, devices - and so
are all choices within: ridge, regression and interval are made again without the group.

set           what is predicted
held_out_by   what is left out together
mape          mean relative error in percent, over rows
best_known    the best published or refitted figure for the same split, in percent
coverage      share of rows inside the interval that should hold 80 %, in percent
aim           what the issue asks for
"""

import csv
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from penstock.fleet.learn import held_out, learn
from penstock.fleet.measurement import (
    Measurement,
    StepWork,
    of_placement,
    of_start,
    of_step,
    of_transfer,
    peaks_of,
)
from penstock.fleet.together import ClusterMember, Course, scaling, together
from penstock.units import MB

DATA = Path(__file__).parents[2] / "shared" / "data"
APPS = "bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"


class Row(NamedTuple):
    """A line of the table."""

    set: str
    held_out_by: str
    mape: float
    best_known: float | None
    coverage: float | None
    aim: float | None
    rows: int


def words(row: Row) -> tuple[str, ...]:
    """Return a line of the table as text."""
    return tuple(
        "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        for value in row
    )


def rows(data: Path = DATA) -> Iterator[Row]:
    """Yield every set's figures."""
    steps, sizes = cmdare_steps(data), cmdare_transfers(data)
    for name, known, aim in (("k80", 5.8, 5.5), ("p100", 10.1, 9.5)):
        own = [row for row in steps if row.device == name]
        yield judged(f"cmdare step, {name}", "model", own, known, aim)
    yield judged("cmdare step, any device", "model", steps, 9.4, 9.0)
    yield device_left_out(steps, data)
    yield judged("cmdare checkpoint, campaign known", "model", sizes, 6.9, 5.5)
    alone = [replace(row, campaign="") for row in sizes]
    yield judged("cmdare checkpoint, campaign not known", "model", alone, 6.9, None)
    yield judged("cmdare start", "model", cmdare_starts(data), None, None)
    yield eleven(data)
    every: list[tuple[float, bool]] = []
    for app in APPS:
        found = left_out(pollux(data, app))
        every += found
        yield _row(f"pollux {app}", "placement", found, None, None)
    yield _row("pollux, all", "placement", every, 6.8, 7.0)
    yield from clusters(data)


def judged(
    name: str, by: str, of: Sequence[Measurement], known: float | None, aim: float | None
) -> Row:
    """Return the figures of a set, each group left out once."""
    return _row(name, by, left_out(of), known, aim)


def _row(
    name: str,
    by: str,
    found: Sequence[tuple[float, bool]],
    known: float | None,
    aim: float | None,
) -> Row:
    mape = 100 * statistics.fmean(error for error, _ in found)
    covered = 100 * statistics.fmean(inside for _, inside in found)
    return Row(name, by, mape, known, covered, aim, len(found))


def left_out(of: Sequence[Measurement]) -> list[tuple[float, bool]]:
    """Return of each row |predicted / measured - 1| and whether the interval holds it."""
    return [
        (abs(one.seconds / row.seconds - 1), one.low <= row.seconds <= one.high)
        for row, one in zip(of, held_out(of), strict=True)
        if row.seconds is not None
    ]


# -- the sets --------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file by column."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def works(data: Path) -> dict[str, StepWork]:
    """Return the work of a step of each CNN of CM-DARE, for 128 images."""
    table = read(data / "cmdare/speed_data/0latency_norm_computation.csv")
    return {
        row["Model (temp)"]: StepWork(
            128 * float(row["Model FLOPs"]),
            float(row["Number of Parameters"]),
            float(row["Number of Tensors"]),
        )
        for row in table
        if row["Number of Tensors"]
    }


def cmdare_steps(data: Path) -> list[Measurement]:
    """Return 13 steps of each of 20 CNNs on K80 and P100."""
    table = read(data / "cmdare/speed_data/0latency_norm_computation.csv")
    known = works(data)
    return [
        of_step(model, device, peaks_of(device), known[model], seconds=float(row["Step Time (s)"]))
        for row in table
        for model, device in [(row["Model (temp)"], row["GPU (temp)"].lower())]
    ]


def device_left_out(steps: Sequence[Measurement], data: Path) -> Row:
    """Return the figures of the V100's four models, learned from the K80 and the P100 alone.

    The models too are left out, each in its turn.
    """
    known, found = works(data), list[tuple[float, bool]]()
    files = {"res15": "Res15", "res32": "Res32", "shakesmall": "shakesmall", "shakebig": "shakebig"}
    for file, model in files.items():
        speeds = [
            float(row["Value"])
            for row in read(data / f"cmdare/speed_data_base/{file}v100.csv")
            if float(row["Value"] or 0) > 0
        ]
        learned = learn([row for row in steps if row.group != model])
        row = of_step(model, "v100", peaks_of("v100"), known[model])
        (one,) = learned.foresee([row])
        seconds = 1 / statistics.median(speeds)
        found.append((abs(one.seconds / seconds - 1), one.low <= seconds <= one.high))
    return _row("cmdare step, v100", "device and model", found, None, None)


_TENSORS = {
    "Custom ResNet 9": 122,
    "Custom ResNet 10": 242,
    "Shake small 32d": 264,
    "Shake mid 32d": 264,
}  # as the table of steps has them; that of checkpoints has them not


def cmdare_transfers(data: Path) -> list[Measurement]:
    """Return five checkpoints of each model; the last four models were measured on another day."""
    folder = data / "cmdare/checkpoint"
    tensors = {
        row["Model"]: float(row["Number of Tensors"] or _TENSORS.get(row["Model"], 0))
        for row in read(folder / "aggregated.csv")
    }
    tensors |= _TENSORS
    later = {row["Model"] for row in read(folder / "unaggregated_test.csv")}
    names = {name.lower(): name for name in tensors}
    return [
        of_transfer(
            row["Model"],
            float(row["Weight File Size"]) * MB,
            tensors[names[row["Model"].lower()]],
            campaign="later" if row["Model"] in later else "first",
            seconds=float(row["Duration"]),
        )
        for row in read(folder / "whole_data.csv")
    ]


def eleven(data: Path) -> Row:
    """Return the figures of eleven runs from the loss of a rank to their end; nothing is fitted.

    The source says neither model nor machines; 18.2 steps per second and 64,000 steps are those of
    its example, ResNet-32 on four K80.  The speed is four times that of one, measured alone; the
    rank that is lost is missed until another machine has started and a process on it.
    """
    found = json.loads((data / "cmdare/revocations_and_scaling.json").read_text())
    one = found["cluster_speed_mean_std_steps_per_s"]["res32k80"][0]
    replace_s = found["replacement_startup_s"]["immediate"]["k80"]
    replace_s += statistics.fmean(found["worker_restart_seconds"]["res32cold"])
    speed = together([ClusterMember("k80", 4, 1 / one, 1 / one, 1 / one)], {}).steps_per_s
    runs = found["training_time_prediction_11_runs"]
    errors = [
        (
            abs(
                Course(64_000 - at, losses=1, replace_s=replace_s, stays=0.75).seconds(speed) / took
                - 1
            ),
            True,
        )
        for at, took in zip(runs["rev_step"], runs["act_time"], strict=True)
    ]
    return _row("cmdare end to end", "run", errors, 0.8, 2.0)._replace(coverage=None)


def clusters(data: Path) -> Iterator[Row]:
    """Yield the figures of 5 to 8 ranks with one server, from single ranks and other models' caps.

    A server's seconds for a step are those of the largest clusters that it holds; of a model left
    out they are learned from the other three: tensors and bytes.
    """
    found = json.loads((data / "cmdare/revocations_and_scaling.json").read_text())
    speeds, known = found["cluster_speed_mean_std_steps_per_s"], works(data)
    models = {
        "res15": "Res15",
        "res32": "Res32",
        "shakesmall": "shakesmall",
        "shakebig": "shakebig",
    }
    servers = [
        of_transfer(
            name,
            4 * known[model].parameters,
            known[model].tensors,
            seconds=1 / max(speeds[f"{name}p100"]),
        )
        for name, model in models.items()
    ]
    errors = dict[str, list[tuple[float, bool]]](members=[], capped=[], law=[])
    for at, name in enumerate(models):
        own = speeds[f"{name}p100"]
        (server,) = learn(servers[:at] + servers[at + 1 :]).foresee([servers[at]])
        law = scaling({n: own[n - 1] for n in range(1, 5)})
        for ranks in range(5, 9):
            member = [ClusterMember("p100", ranks, 1 / own[0], 1 / own[0], 1 / own[0])]
            foreseen = {
                "members": together(member, {}).steps_per_s,
                "capped": together(member, {"server": 1 / server.seconds}).steps_per_s,
                "law": together(member, {}, law=law).steps_per_s,
            }
            for how, speed in foreseen.items():
                errors[how].append((abs(speed / own[ranks - 1] - 1), True))
    for how, by in (("members", "cluster size"), ("law", "cluster size"), ("capped", "model")):
        name = f"cmdare cluster, 5 to 8 p100, {how}"
        aim = 10.0 if how == "capped" else None
        yield _row(name, by, errors[how], 9.0, aim)._replace(coverage=None)


def cmdare_starts(data: Path) -> list[Measurement]:
    """Return starts of processes, machines cold and warm, of four models."""
    found = json.loads((data / "cmdare/revocations_and_scaling.json").read_text())
    files = {"res15": "Res15", "res32": "Res32", "shakesmall": "shakesmall", "shakebig": "shakebig"}
    known = works(data)
    return [
        of_start(file, kind, known[model].tensors, seconds=seconds)
        for file, model in files.items()
        for kind in ("cold", "warm")
        for seconds in found["worker_restart_seconds"][file + kind]
    ]


def pollux(data: Path, app: str) -> list[Measurement]:
    """Return the steps of an application on T4s, by placement and batch."""
    return [
        of_placement(
            app,
            [int(letter) for letter in row["placement"]],
            float(row["local_bsz"]),
            seconds=float(row["step_time"]),
        )
        for row in read(data / f"pollux/{app}/placements.csv")
    ]
