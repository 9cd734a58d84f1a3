"""Carry: the seconds recorded of one program as those of another with the same stages.

    compute, update   of the same stage and micro-batch (update: step) of the same replica; else the
                      mean of its kind at its stage
    B, or I and W     where only the other was recorded: I + W, or parts of B; each scaled as a
                      profile says
    message           of the same edge and micro-batch of the same replica; else the mean of the
                      edge; else the mean of all
    sum               of the same bucket and step on the same rank; else the mean of the bucket;
                      else what a cluster's link says
    start             0 s, for all ranks

Where one is a window of more steps than the other, means replace all values of the same
micro-batch: the first ones of a window are unlike the others.

Ignores:  that a stage may be faster on another rank; that computes slow each other in caches;
          that B and W of several micro-batches together take less than as many of one.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.errors import ProfileError
from penstock.program.codes import COPIES, COST_ROW, JOINS, REDUCE, SEND, WORKS
from penstock.program.program import Program
from penstock.program.reductions import Reduction
from penstock.schedule.orders import KINDS, B, I, W
from penstock.simulate.costs import Costs, with_copies
from penstock.simulate.matched import Floats
from penstock.simulate.recorded import Recorded

Work: TypeAlias = tuple[int, int, int, int]  # replica, kind, stage, micro-batch or step
Way: TypeAlias = tuple[str, int, int]  # kind, source and target of an edge


class CarriedOver(NamedTuple):
    """The seconds of another program, and what they rest on besides what was recorded of it."""

    recorded: Recorded
    rests_on: tuple[str, ...]


def carried(
    program: Program,
    recorded: Recorded,
    other: Program,
    *,
    costs: Costs | None = None,
    cluster: Cluster | None = None,
) -> CarriedOver:
    """Return for `other` the seconds recorded of `program`, which has the same stages.

    costs:    by profiles: how B divides into I and W, as on the first kind of device.
    cluster:  how long a sum takes that was not recorded.
    Raises:   ValueError: another number of stages, or messages that were not recorded.
              ProfileError: a B has to be divided (or made), and there are no costs; a kind of
              action of a stage was not run at all.
    """
    if other.num_stages != program.num_stages or recorded.message_s is None:
        raise ValueError("seconds are carried between programs of the same stages, with messages")
    alike = program.num_steps == other.num_steps
    work = _WorkSeconds(program, recorded, costs, alike)
    counts = {B: other.together, W: other.together}  # B and W of one micro-batch are known
    work_s = [counts.get(key[1], 1) * work.seconds(key) for key in _works(other)]
    message_s, new_ways = _messages(program, recorded.message_s, other, alike)
    sum_s, new_sums = _sums(program, recorded, other, cluster)
    notes = {**work.notes, **new_ways, **new_sums}
    start_s = np.zeros(other.num_ranks)
    return CarriedOver(Recorded(np.array(work_s), sum_s, message_s, start_s), tuple(notes))


Notes: TypeAlias = dict[str, None]  # in order, each once


def _works(program: Program) -> Iterable[Work]:
    """Return the key of all that works, in the order of the code."""
    code = program.code
    rows = np.flatnonzero(WORKS[code.op])
    kinds = COST_ROW[code.op[rows], code.kind[rows]]
    columns = kinds.tolist(), code.stage[rows].tolist(), code.micro_batch[rows].tolist()
    return zip(_replicas(program, rows), *columns, strict=True)


def _replicas(program: Program, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[int]:
    owners = np.searchsorted(program.code.offsets, rows, side="right") - 1
    return program.grid.places()[0][owners].tolist()


_DIVIDED, _JOINED = "I and W as the profile divides B", "B as the profile joins I and W"
_WAYS = {B: ((B,), (I, W)), I: ((I,), (B,)), W: ((W,), (B,))}


class _WorkSeconds:
    """What was recorded of computes and updates; `notes` collects what was not."""

    def __init__(
        self, program: Program, recorded: Recorded, costs: Costs | None, alike: bool
    ) -> None:
        self.costs, self.notes, self.alike = costs, Notes(), alike
        self.own: defaultdict[Work, list[float]] = defaultdict(list)
        self.all: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for key, seconds in zip(_works(program), recorded.work_s.tolist(), strict=True):
            each = seconds / program.together if key[1] in (B, W) else seconds
            self.own[key].append(each)
            self.all[key[1:3]].append(each)

    def seconds(self, key: Work) -> float:
        """Return the seconds of one compute or update.

        From what was recorded for this very micro-batch, else for others; for its own kind, else
        for the kinds that it is a part of or is made of.
        """
        replica, kind, stage, number = key
        ways = _WAYS.get(kind, ((kind,),))
        for way in ways:
            keys = [(replica, each, stage, number) for each in way]
            if self.alike and all(each in self.own for each in keys):
                return self._by(kind, way, stage, [self.own[each] for each in keys])
        for way in ways:
            if all((each, stage) in self.all for each in way):
                new = (
                    "for micro-batches that were not run"
                    if self.alike
                    else "over the steps that were run"
                )
                self.notes[f"the mean of a stage {new}"] = None
                return self._by(kind, way, stage, [self.all[each, stage] for each in way])
        if kind >= len(KINDS) and self.costs is not None:
            self.notes["copies to far memory as profiled"] = None
            return float(with_copies(self.costs.action_s)[kind, stage, 0])
        name = (*KINDS, *COPIES)[kind]
        message = f"{name} of stage {stage} was not run, and follows from nothing that was"
        raise ProfileError(message, hint="replay a run that trains")

    def _by(
        self, kind: int, way: tuple[int, ...], stage: int, recorded: Iterable[list[float]]
    ) -> float:
        """Return the seconds of a kind from those of the kinds of `way`."""
        seconds = sum(map(_mean, recorded))
        if way == (kind,):
            return seconds
        self.notes[_DIVIDED if way == (B,) else _JOINED] = None
        return seconds * self._share((kind,), way, stage)

    def _share(self, kinds: tuple[int, ...], of: tuple[int, ...], stage: int) -> float:
        """Return the share of `kinds` in the seconds of the kinds `of` in the profile."""
        if self.costs is None:
            names = "".join(KINDS[kind] for kind in of)
            message = f"{names} of stage {stage} was recorded, and no profile says what part of it"
            wanted = " and ".join(KINDS[kind] for kind in kinds)
            raise ProfileError(f"{message} {wanted} is", hint="give the profile of the run")
        seconds = self.costs.action_s[:, stage, 0]
        whole = float(seconds[list(of)].sum())
        return float(seconds[list(kinds)].sum()) / whole if whole > 0 else 1.0 / len(of)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _messages(
    program: Program, message_s: Floats, other: Program, alike: bool
) -> tuple[Floats, Notes]:
    own: dict[tuple[int, Way, int], Floats] = {}
    all_of: defaultdict[Way, list[Floats]] = defaultdict(list)
    for (replica, way, number), seconds in zip(_sends(program), message_s, strict=True):
        own[replica, way, number] = seconds
        all_of[way].append(seconds)
    means = {way: np.mean(rows, axis=0) for way, rows in all_of.items()}
    mean = np.mean(message_s, axis=0) if len(message_s) else np.zeros(3)
    found, notes = list[Floats](), Notes()
    for key in _sends(other):
        if alike and key in own:
            found.append(own[key])
        elif key[1] in means:
            found.append(means[key[1]])
        else:
            kind, source, target = key[1]
            notes[f"{kind} {source}->{target} as messages of other edges"] = None
            found.append(mean)
    return np.array(found).reshape(-1, 3), notes


def _sends(program: Program) -> Iterable[tuple[int, Way, int]]:
    """Return replica, edge and micro-batch of every Send, in the order of the code."""
    code = program.code
    rows = np.flatnonzero(code.op == SEND)
    ways: list[Way] = [(edge.kind, edge.source, edge.target) for edge in program.edges]
    edges = [ways[int(edge)] for edge in code.edge[rows]]
    return zip(_replicas(program, rows), edges, code.micro_batch[rows].tolist(), strict=True)


def _sums(
    program: Program, recorded: Recorded, other: Program, cluster: Cluster | None
) -> tuple[Floats, Notes]:
    own: dict[tuple[int, int, str, str], float] = {}
    all_of: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    is_sum = program.code.op[np.flatnonzero(JOINS[program.code.op])] == REDUCE
    sums_s, gathers_s = recorded.sum_s[is_sum].tolist(), recorded.sum_s[~is_sum].tolist()
    for (where, reduction), seconds in zip(_reduces(program), sums_s, strict=True):
        own[*where, reduction.word, reduction.bucket] = seconds
        all_of[reduction.word, reduction.bucket].append(seconds)
    found, notes = list[float](), Notes()
    for where, reduction in _reduces(other):
        key = reduction.word, reduction.bucket
        if (*where, *key) in own:
            found.append(own[*where, *key])
        elif key in all_of:
            found.append(_mean(all_of[key]))
        else:
            found.append(_linked_s(other, reduction, cluster))
            notes["sums that were not run as the link says"] = None
    others = other.code.op[np.flatnonzero(JOINS[other.code.op])] == REDUCE
    taken_s = np.full(len(others), _mean(gathers_s) if gathers_s else 0.0)
    taken_s[others] = found  # a gather takes what those of the run took, in the mean
    return taken_s, notes


def _linked_s(program: Program, reduction: Reduction, cluster: Cluster | None) -> float:
    if cluster is None:
        return 0.0
    topology = program.end.topology_of(reduction.word)
    return cluster.sum_s(reduction.size_bytes, reduction.ranks, topology)


def _reduces(program: Program) -> Iterable[tuple[tuple[int, int], Reduction]]:
    """Return (rank, step) and reduction of each of them, in the order of the code."""
    code = program.code
    rows = np.flatnonzero(code.op == REDUCE)
    owners = (np.searchsorted(code.offsets, rows, side="right") - 1).tolist()
    where = zip(owners, code.micro_batch[rows].tolist(), strict=True)
    return zip(where, (code.reductions[int(edge)] for edge in code.edge[rows]), strict=True)
