"""Replan: the plan is made again between the steps of a run, where what its ranks take has moved.

Every rank samples its own steps, and posts what they took and whether that has moved (by its ranks,
profile/drift.py).  The leading rank looks at the posts, and weighs:

    what is lost   the plan that runs may take as much longer as its ranks have moved apart
    searching      once what was lost so far is what searching costs, and what will be lost in the
                   steps that are left is twice what searching and moving cost
    moving         if the plan that was found is predicted to be a tenth faster than the one that
                   runs, both with what ranks take now; once what was lost by that is what moving
                   costs, and what is left to gain is twice that

    going back     once the new plan has been sampled, if its steps take longer than those before
    sharing        before any of that: where micro-batches that are shared otherwise make the step
                   of the same plan shorter (search/shifted.py), which moves nothing and needs no
                   checkpoint; another plan is searched for only if much more is lost then

Where steps take longer than they did, or less, and no rank's own actions do, messages may.  So
before a search for several hosts all ranks measure the links between these (gauge/links.py), and
what has moved is another link of the cluster that is searched.

So a disturbance that comes and goes costs at most about as much again as it costs anyway.  The
search runs between two steps, or beside them where the leading rank's host has a core to spare.
Moving is a checkpoint, from which each rank goes on by the other plan, in the same process.

Source:   SpanTrain, arXiv:2505.15536 (a plan that follows the network: micro-batches).
Ignores:  links inside a host; that memory may be shorter; on a GPU the clock, which only
          queues work, tells nothing, so nothing moves.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from penstock import taken
from penstock.choose.choose import (
    Choice,
    Joining,
    Machines,
    best_of,
    decided,
    for_plan,
    found_in_units,
    joining_of,
    predicted,
    save,
)
from penstock.choose.flag_text import to_fill
from penstock.choose.learned import ratios_of
from penstock.cluster.cluster import Cluster
from penstock.cluster.machine import HERE
from penstock.errors import PlanError
from penstock.listener import SILENT
from penstock.pilot.moved_links import pairs_used, relinked
from penstock.pilot.replan_log import Replan, replans_in, write_replans
from penstock.pilot.slow_ranks import slowed
from penstock.plan.plan import Decision, Plan, Units
from penstock.profile.drift import NEW
from penstock.profile.kinds import load_profiles
from penstock.profile.profile import Profile
from penstock.profile.sampled import StepRatios, of_another_step, resting_on, with_run
from penstock.schedule.recipe import Recipe, name_of, units_of
from penstock.search.judge import Judge
from penstock.search.shapes import Fixed
from penstock.search.shifted import shifted
from penstock.typed import typed
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board
    from penstock.processes.child import Aside
    from penstock.runtime.sampler import Sampler, Samples
    from penstock.runtime.windows import Windows
    from penstock.runtime.worker import Task
    from penstock.transport.transport import Transport

WORTH = 0.1  # of a step: what another plan has to gain, by its prediction
_PROBED, _APART = 2**20, 2**10  # edges on which links are measured: the first, and each time
SHARE_WORTH = 0.03  # likewise other shares of the same plan
_BIND_S = 0.1  # of changing to other shares: to be replaced by the first time
_SHARING_S = 2.0  # of looking for them, at most
_SEARCH_S = 10.0  # at most, and about what was lost so far
_DISK_BYTES_PER_S = 2e8  # of a checkpoint, written and read: to be replaced by the first move


class SearchBasis(NamedTuple):
    """What a plan of a run was found by, and another one can be.

    ways:     of joining micro-batches, with the profiles by which the search predicts.
    fixed:    what the user and the job have decided.
    units:    as asked for.
    search_s: that the search took.
    """

    ways: tuple[Joining, ...]
    fixed: Fixed
    units: Units | None
    search_s: float


@dataclass(slots=True)
class _Lead:
    """What the leading rank knows of the state under a plan.

    moves:       how often each rank had moved when it last looked.
    since:       the step at which it saw that.
    is_settled:  nothing is to be done until something moves again.
    is_probed:   the links between hosts were measured in this state; None: ranks were asked to.
    links:       what has moved of them since the plan was made, by pair of hosts.
    now:         the cluster with what was measured; None: with the links as they were.
    is_weighed:  whether other shares were thought of in this state.
    aside:       a search that is under way.
    found:       a plan that is worth it, and its text.
    lost:        of a step, by shares that were found; None: they stand as they did at first.
    is_shared:   whether the plan before is this one, its micro-batches shared otherwise.
    replaced:    text of the plan before this one, its seconds of a step then, as sampled, and as
                 predicted for what ranks took; None: there was none, or it is no longer a question.
    """

    moves: tuple[int, ...] = ()
    since: int = 0
    is_settled: bool = False
    is_probed: bool | None = False
    links: tuple[tuple[str, str, float], ...] = ()
    now: Cluster | None = None
    is_weighed: bool = False
    is_asked: bool = False
    aside: "Aside | None" = None
    found: tuple[Replan, str] | None = None
    replaced: tuple[str, float, float] | None = None
    lost: float | None = None
    is_shared: bool = False

    def forget(self, moves: tuple[int, ...], step: int) -> None:
        """Begin with another state."""
        if self.aside is not None:
            self.aside.close()
        self.moves, self.since, self.is_settled, self.is_weighed = moves, step, False, False
        self.is_probed, self.links, self.now = False, (), None
        self.aside = self.found = None


@final
class Replanner:
    """One rank's view; every rank makes one of the same, and one of them leads."""

    def __init__(  # noqa: PLR0913 - what a run is guided by
        self,
        basis: SearchBasis,
        choice: Choice,
        windows: "Callable[[Choice, int], Windows]",
        board: "Board",
        *,
        folder: Path,
        last_step: int,
        leads: bool | None = None,
        stays: bool = False,
    ) -> None:
        """Guide a rank of a run in `folder`, where the plan's files are.

        windows:  those that are left of the run, by a choice, from a step on.
        leads:    whether this rank is the one that decides; None: rank 0 is.
        stays:    whether micro-batches are shared otherwise, and that is all: with another plan an
                  optimizer is made anew, and what its hooks keep begins anew.
        """
        self.basis, self.choice, self.windows, self.board = basis, choice, windows, board
        self.folder, self.last_step, self._leads, self._stays = folder, last_step, leads, stays
        self.count = self._posted = self._seen = self._planned = self._shares = self._probes = 0
        self._ready_s = self._asked_s = self._move_took_s = self._step_s = 0.0
        self._share_s, self._looked_s, self._probe_s = _BIND_S, 0.0, 0.0
        self._search_s = basis.search_s
        self._factors = self._last_factors = (1.0,) * choice.plan.total_ranks
        self._plain: Cluster | None = None  # as `_there`, once it is known
        self._is_corrected = False
        self._lead = _Lead()
        self._read: tuple[list[str], list[Samples] | None] = [], None  # posts

    def leads(self, rank: int) -> bool:
        """Return whether `rank`, this one, decides for all."""
        return rank == 0 if self._leads is None else self._leads

    # -- what the ranks of a run ask (runtime/guide.py) -------------------------------------------

    def begun(self, rank: int, seconds: float) -> None:
        """Note what it took to be ready for a plan."""
        self._ready_s = seconds
        if self.count and self.leads(rank):
            self._move_took_s = time.perf_counter() - self._asked_s
            *before, last = replans_in(self.folder)
            write_replans(self.folder, [*before, replace(last, move_s=self._move_took_s)])

    def look(self, rank: int, step: int, sampler: "Sampler") -> None:
        """Post what was sampled; where this rank leads, weigh what all have posted."""
        moves = self._seen = sampler.drift.moves + sampler.paces.moves
        if moves != self._posted or sampler.since % NEW == 0:
            self._posted = moves
            told = {"plan": self.count, "samples": asdict(sampler.told())}
            self.board.post(rank, json.dumps(told))
        if self.leads(rank) and time.monotonic() - self._looked_s >= 4 * self.board.look_s:
            self._looked_s, self._step_s = time.monotonic(), sampler.step_s
            self._weigh(step)

    def probe(self, task: "Task", transport: "Transport") -> None:
        """Measure the links between the hosts; where this rank leads, search by what they are."""
        from penstock.gauge.hosts import compared_now, seat_here

        seat = seat_here(platform.node() or "host", HERE)
        used, first_edge = pairs_used(task.windows.programs[0]), _PROBED + self._probes * _APART
        start = time.perf_counter()
        compared = compared_now(transport, seat, used, first_edge)
        self._probes += 1
        if self.leads(transport.rank):
            found, lead = relinked(self._there, compared), self._lead
            lead.is_probed, lead.links, lead.now = True, found.moved, found.cluster
            self._probe_s = time.perf_counter() - start

    def next(self, task: "Task", step: int, transport: "Transport") -> "Task":
        """Return the task of the plan that was found, which all ranks compare.

        Raises:   PlanError: a rank made another program of it than this one.
        """
        from penstock.checkpoints.checkpoint import folder_of
        from penstock.choose.run_windows import memory_window
        from penstock.plan.lower_plan import stages_of

        windows, choice = self._told(step, transport), self.choice
        self._planned += 1
        assert task.policy.folder is not None, "who else could ask for another plan"
        stages = stages_of(choice.plan, choice.captured.graph)
        is_rounded = bool(choice.job.sums) or choice.plan.terms.rounds
        return task.remade(
            audits=None if is_rounded else task.audits,
            capture=choice.captured,
            stages=stages,
            job=choice.job,
            windows=windows,
            resume=folder_of(task.policy.folder, step),
            memory_window=memory_window(windows),
            joined=choice.plan.terms.joined,
            first_edge=task.first_edge + len(task.stages.edges),
        )

    def shared(self, task: "Task", step: int, transport: "Transport") -> "Task":
        """Return the task with micro-batches shared as was found, which all ranks compare.

        Raises:   PlanError: a rank made another program of it than this one.
        """
        windows = self._told(step, transport)
        self._posted = self._seen  # what has moved before is known
        return task.at(windows)

    def _told(self, step: int, transport: "Transport") -> "Windows":
        """Take the choice that the leading rank has found; return the windows that are left.

        Raises:   PlanError: a rank makes another program of it.
        """
        everyone = tuple(range(transport.num_ranks))
        found = self._lead.found if self.leads(transport.rank) else None
        own = b"" if found is None else found[1].encode()
        text = next(filter(None, transport.all_gather_bytes(own, everyone))).decode()
        choice = self.choice_of(Plan.from_text(text))
        windows = self.windows(choice, step)
        self._agree(choice, windows, transport)
        before, self.choice = self.choice.plan, choice
        self.count, self._posted, self._read = self.count + 1, 0, ([], None)
        if found is not None:
            self._moved(replace(found[0], step=step), before)
        return windows

    def ready(self, rank: int) -> None:
        """Note that a rank has changed to other shares."""
        if self.leads(rank):
            self._share_s = time.perf_counter() - self._asked_s
            *before, last = replans_in(self.folder)
            write_replans(self.folder, [*before, replace(last, move_s=self._share_s)])

    def choice_of(self, plan: Plan) -> Choice:
        """Return a plan with the job and the step that it is of."""
        try:
            return joining_of(self.basis.ways, plan).choice(plan)
        except LookupError:  # this rank has not traced the step of the plan
            pass
        whole = next(way for way in self.basis.ways if way.joined == 1)
        return Choice(*for_plan(whole.job, plan, whole.captured, SILENT), plan)

    def _agree(self, choice: Choice, windows: "Windows", transport: "Transport") -> None:
        from penstock.choose.same_start import run_facts

        own, everyone = run_facts(choice, windows), tuple(range(transport.num_ranks))
        texts = transport.all_gather_bytes(json.dumps(own).encode(), everyone)
        for rank, text in enumerate(texts):
            theirs = typed(dict[str, str], json.loads(text))
            for what in own:
                if theirs[what] != own[what]:
                    message = f"rank {transport.rank} has {what} {own[what]} of the plan made again"
                    hint = "resume=True continues; have all ranks the same files and packages?"
                    raise PlanError(f"{message}; rank {rank} has {theirs[what]}", hint=hint)

    # -- what the leading rank does ---------------------------------------------------------------

    def _weigh(self, step: int) -> None:
        """Ask for another plan where that pays, by what is posted."""
        lead, posts = self._lead, self._posts()
        if posts is None or lead.is_asked:
            return
        moves = tuple(told.moves + told.paces for told in posts)
        if lead.replaced is not None:
            self._judge(*lead.replaced)
        if moves != lead.moves and not lead.is_asked:  # what was found was for another state
            lead.forget(moves, step)
        if lead.is_settled or lead.is_asked or not any(moves):
            return
        left, since = self.last_step - step, step - lead.since + NEW // 2
        if not lead.is_weighed:
            lead.is_weighed = True
            if self._shared(posts, left):
                return
            compiled = self.choice.plan.terms.compiled  # other cuts would have to be, too
            lead.is_settled = compiled or self._stays
        if lead.is_settled:
            return
        if lead.aside is not None:
            self._take(lead.aside.poll())
        elif lead.found is None:
            self._look_for_another(posts, left, since)
        if lead.found is not None:
            gain_s = lead.found[0].before_s - lead.found[0].after_s
            if gain_s * left < 2 * self._move_s():
                lead.is_settled, lead.found = True, None
            elif gain_s * since >= self._move_s():
                self._ask()

    def _look_for_another(self, posts: "Sequence[Samples]", left: int, since: int) -> None:
        """Search, or have links measured before it, once what is lost is what that costs."""
        lead, is_far = self._lead, len(self._there.hosts) > 1
        ranks_s, links_s = _lost_s(posts)
        if lead.lost is not None:  # with other shares ranks stand apart, and yet little is lost
            ranks_s = lead.lost * max(told.step_s for told in posts)
        lost_s = max(ranks_s, links_s if is_far else 0.0)
        costs_s = self._search_s + (self._probe_s if is_far and not lead.is_probed else 0.0)
        is_known = lead.is_probed is True and not lead.links and not ranks_s
        is_little = lost_s * left < 2 * (costs_s + self._move_s())
        lead.is_settled = is_little or not lost_s or is_known
        if lead.is_settled or lead.is_probed is None or lost_s * since < costs_s:
            return
        if is_far and not lead.is_probed:
            lead.is_probed = None
            self.board.ask_to_probe(self._probes + 1)
        else:
            self._search(posts, min(lost_s * since, _SEARCH_S))

    @property
    def _there(self) -> Cluster:
        """Return the plan's hosts and the links that it was made for, no rank slowed."""
        if self._plain is None:
            there = Cluster.load(self.folder / "cluster.toml")
            self._plain = there.within(to_fill(self.basis.fixed.memory))
        return self._plain

    def _ask(self) -> None:
        lead = self._lead
        assert lead.found is not None, "it is asked for"
        lead.is_asked, self._asked_s = True, time.perf_counter()
        if lead.found[0].is_shared:
            self._shares += 1
            self.board.ask_to_share(self._shares)
        else:
            self.board.ask_to_plan(self._planned + 1)

    def _shared(self, posts: "Sequence[Samples]", left: int) -> bool:
        """Ask for other shares of the plan that runs, if they make its step shorter."""
        start, plan = time.perf_counter(), self.choice.plan
        factors, now = self._now(posts), slowed(self._corrected(posts), self._now(posts))
        profiles = now.profiles(joining_of(self.basis.ways, plan).profiles)
        judge = Judge(self.choice.captured.graph, profiles, now.cluster)
        own = plan.changed(hosts=())
        found = shifted(judge, own, is_over=lambda: time.perf_counter() - start > _SHARING_S)
        if found is None:
            return False
        before_s, after_s = judge.candidate(own, as_said=True).step_s, found.step_s
        is_little = (before_s - after_s) * left < 2 * self._share_s
        if is_little or after_s > (1 - SHARE_WORTH) * before_s:
            return False
        made = found.plan.changed(hosts=plan.place.hosts)
        changes = f"{_words(made)} in place of {_words(plan)}"
        search_s = time.perf_counter() - start
        row = Replan(0, factors, before_s, after_s, search_s, 0.0, changes, is_shared=True)
        self._lead.found = row, json.dumps(made.to_json())
        self._ask()
        return True

    def _now(self, posts: "Sequence[Samples]") -> tuple[float, ...]:
        """Return by how much each rank is slower than when the run began."""
        own = (told.factor for told in posts)
        return tuple(a * b for a, b in zip(self._factors, own, strict=True))

    def _corrected(self, posts: "Sequence[Samples]") -> Cluster:
        """Return `_there`; profiles rest on what this run has sampled before anything moved."""
        if not self._is_corrected:
            self._correct(self._there, posts)
            self._is_corrected = True
        return self._there

    def _judge(self, before: str, was_s: float, predicted_s: float) -> None:
        """Go back to the plan before, if steps take longer now than they took by it.

        before:       as text; `predicted_s`: its seconds with what ranks took when it was left.
        """
        lead, plan = self._lead, self.choice.plan
        lead.replaced = None
        if self._step_s > was_s:
            now = f"{format_seconds(self._step_s)} a step, {format_seconds(was_s)} before"
            back = f"back to {_words(Plan.from_text(before))}: {now}"
            own_s = plan.predicted.step_s if plan.predicted else 0.0
            about = self._last_factors, own_s, predicted_s, 0.0, 0.0, back
            made = Replan(0, *about, is_back=True, is_shared=lead.is_shared)
            lead.found = made, before
            self._ask()

    def _posts(self) -> "list[Samples] | None":
        """Return what all ranks have posted of this plan; None where one has not."""
        from penstock.runtime.sampler import Samples

        texts = self.board.posts(self.choice.plan.total_ranks)
        if texts != self._read[0]:  # they seldom are new
            rows = [json.loads(text) if text else {"plan": -1} for text in texts]
            is_whole = all(row["plan"] == self.count for row in rows)
            told = [typed(Samples, row["samples"]) for row in rows] if is_whole else None
            self._read = texts, told
        return self._read[1]

    def _move_s(self) -> float:
        """Return what moving to another plan takes: as the last time, or by the bytes."""
        state = self.basis.ways[0].profiles[0].update.state_bytes_per_byte
        nodes = self.choice.captured.graph.nodes
        size = sum(node.size_bytes for node in nodes if node.kind == "parameter")
        return self._move_took_s or self._ready_s + size * (1 + state) / _DISK_BYTES_PER_S

    def _search(self, posts: "Sequence[Samples]", limit_s: float) -> None:
        """Search: beside the steps where the host has a core for that, else between two of them."""
        from penstock.processes.child import Aside

        there, factors = self._corrected(posts), self._now(posts)
        plain = self._lead.now or there
        hosts = [plain.host_number(rank) for rank in range(len(posts))]
        if plain.hosts[hosts[0]].cores > hosts.count(hosts[0]):
            self._lead.aside = Aside(lambda: self._searched(plain, factors, limit_s))
        else:
            self._take((self._searched(plain, factors, limit_s),))

    def _correct(self, plain: Cluster, posts: "Sequence[Samples]") -> None:
        """Let all profiles rest on what this run has sampled before anything moved."""
        own = load_profiles(self.folder / "profile.json")
        told = list(ratios_of(self.choice, own, plain, posts))
        ways = (corrected(way, self.choice.plan, told) for way in self.basis.ways)
        self.basis = self.basis._replace(ways=tuple(ways))

    def _searched(self, plain: Cluster, factors: Sequence[float], limit_s: float) -> dict[str, Any]:
        """Return what is worth being run with what ranks take now, if anything, as JSON."""
        start = time.perf_counter()
        now = slowed(plain, factors)
        ways = [way._replace(profiles=now.profiles(way.profiles)) for way in self.basis.ways]
        old = self.choice.plan
        own = joining_of(ways, old).profiles
        judge = Judge(self.choice.captured.graph, own, now.cluster)
        before_s = judge.candidate(old.changed(hosts=()), as_said=True).step_s
        fixed = replace(self.basis.fixed, ranks=old.total_ranks).needing(as_placed=True)
        try:
            found = _found(ways, old, fixed, Machines(now.cluster), limit_s)
        except PlanError:  # in so short a time, or within the memory
            return {"search_s": time.perf_counter() - start, "replan": None, "plan": ""}
        rows = joining_of(ways, found.plan).profiles
        found = found_in_units(found, self.basis.units, fixed, profiles=rows, cluster=now.cluster)
        plan = found.plan.changed(hosts=old.place.hosts)
        after_s, search_s = _predicted_s(found), time.perf_counter() - start
        changes = f"{_words(plan)} in place of {_words(old)}"
        links = self._lead.links
        made = Replan(0, tuple(factors), before_s, after_s, search_s, 0.0, changes, links=links)
        is_worth_it = after_s <= (1 - WORTH) * before_s
        return {
            "search_s": search_s,
            "replan": asdict(made) if is_worth_it else None,
            "plan": json.dumps(plan.to_json()),
        }

    def _take(self, result: tuple[Any, ...] | None) -> None:
        """Take what a search has found, if it is over."""
        if result is None:
            return
        (told,), lead = result, self._lead
        lead.aside, self._search_s = None, told["search_s"]
        lead.is_settled = told["replan"] is None
        if not lead.is_settled:
            row = typed(Replan, json.loads(json.dumps(told["replan"])))
            lead.found = row, told["plan"]

    def _moved(self, made: Replan, before: Plan) -> None:
        """Write the files of the plan that is run from now on, in place of `before`."""
        self._plain = self._lead.now or self._there
        now, plan = slowed(self._plain, made.factors), self.choice.plan
        captured = self.choice.captured
        profiles = now.profiles(joining_of(self.basis.ways, plan).profiles)
        plan = predicted(plan, captured.graph, profiles, now.cluster)
        why = Decision("replanned", f"after {made.step:,} steps", "search", made.why)
        self.choice = self.choice._replace(plan=decided(plan, [why]))
        save(self.folder, captured, self.choice.plan, profiles, now.cluster)
        write_replans(self.folder, [*replans_in(self.folder), made])
        text = json.dumps(before.to_json())
        replaced = None if made.is_back else (text, self._step_s, made.before_s)
        self._last_factors = made.factors
        if not made.is_shared:
            self._factors, self._lead = made.factors, _Lead(replaced=replaced)
            return
        lost = _lost(before, made)
        self._lead = _Lead(
            self._lead.moves,
            made.step,
            is_settled=made.is_back or lost < WORTH,
            is_weighed=True,
            lost=lost,
            replaced=replaced,
            is_shared=True,
        )


def _found(
    ways: Sequence[Joining], old: Plan, fixed: Fixed, there: Machines, limit_s: float
) -> Choice:
    """Return the fastest plan that is found in about so many seconds.

    A part of them is for plans like the old one, with other cuts and shares.
    Raises:   PlanError: nothing was found.
    """
    whole, choices = len(units_of(old.schedule)) or old.num_stages, list[Choice]()
    problem = PlanError("nothing was found")
    alike = replace(fixed, stages=whole, replicas=old.replicas)
    if isinstance(old.schedule, Recipe) and fixed.schedule is None:
        alike = replace(alike, schedule=replace(old.schedule, seconds=None, units=()))
    own = sorted(ways, key=lambda way: not way.is_of(old))
    for each, part in ((alike, 0.4), (fixed, 0.6)):
        try:
            choices.append(best_of(own, each, there, part * limit_s))
        except PlanError as why:
            problem = why
    if not choices:
        raise problem
    return min(choices, key=_predicted_s)


def _lost_s(posts: "Sequence[Samples]") -> tuple[float, float]:
    """Return what a step may take too long as ranks have moved apart, and as its pace has.

    Nothing where that is less than a tenth.  A pace that is faster than it was is as much a reason
    to look: another plan may make more of it.
    """
    own, step_s = [told.factor for told in posts], max(told.step_s for told in posts)
    pace = statistics.median(told.pace for told in posts)
    ranks_s = step_s * (1 - min(own) / max(own)) if max(own) >= (1 + WORTH) * min(own) else 0.0
    return ranks_s, step_s * abs(1 - 1 / pace) if max(pace, 1 / pace) >= 1 + WORTH else 0.0


def _lost(before: Plan, made: Replan) -> float:
    """Return what part of a step is lost yet with other shares: beside work that is divided evenly.

    before:   the plan that was left, whose largest share took `before_s` on the slowest rank.
    """
    factors = made.factors
    ideal_s = made.before_s / max(factors) * len(factors) / sum(1 / each for each in factors)
    even = before.step_micro_batches / before.replicas
    ideal_s *= even / max(before.grid.shares)
    return max(0.0, 1 - ideal_s / made.after_s)


def corrected(way: Joining, ran: Plan, told: Sequence[tuple[Profile, StepRatios]]) -> Joining:
    """Return a way of joining micro-batches with profiles that rest on what a run has told.

    ran:   the plan that ran.
    told:  by the profiles of its own step; another step has other ops.
    """
    by_kind = {profile.kind: (profile, row) for profile, row in told}
    made: list[Profile] = []
    for profile in way.profiles:
        if profile.kind in by_kind:
            own, row = by_kind[profile.kind]
            row = row if way.is_of(ran) else of_another_step(own, row, profile)
            made.append(resting_on(profile, with_run(None, profile, row)))
        else:
            made.append(profile)
    return way._replace(profiles=tuple(made))


def _predicted_s(choice: Choice) -> float:
    assert choice.plan.predicted is not None, "a search predicts"
    return choice.plan.predicted.step_s


def _words(plan: Plan) -> str:
    """Return the shape of a plan."""
    what = f"{plan.replicas} x {plan.num_stages} stages by {name_of(plan.schedule)}"
    what = ", ".join(filter(None, (what, plan.share_words, taken.words(plan.terms.joined))))
    return what + (f", cut {', '.join(plan.cut_names)}" if plan.cuts else "")
