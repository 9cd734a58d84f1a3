"""Elastic run: a run whose ranks may come and go: what it is guided by, and its files.

events.jsonl   a line for each generation: when, who, why, what it took, predicted and measured
elastic.json   what a newcomer has to know (addresses.py)
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

import msgspec

from penstock.checkpoints import checkpoint, folders
from penstock.choose.choose import Choice, joining_of
from penstock.choose.key_plans import key_plans, text_of_key_plans
from penstock.choose.keys import find_key
from penstock.choose.run_windows import windows_of_keys
from penstock.choose.same_start import run_facts
from penstock.choose.told_data import ToldData, told_by_data
from penstock.errors import PlanError
from penstock.files import add_line
from penstock.graph.merge import unjoined
from penstock.graph.parts import key_in
from penstock.members.member import START, RunEvent, RunSeen
from penstock.members.mesh import Mesh
from penstock.members.moving import missing_of
from penstock.members.placing import OnHosts, placed, sizes_of
from penstock.members.views import Left
from penstock.members.words import Cursor, HeldTensor, View, Where
from penstock.pilot.by_ranks import grown, job_at, save_cursors
from penstock.pilot.losses import (
    MOVE_BYTES_PER_S,
    PRICED_S,
    READY_S,
    PlanBasis,
    WayOn,
    needs_of,
    told_of,
    try_rerouted,
)
from penstock.pilot.redundancy import costly_hosts
from penstock.pilot.replan import SHARE_WORTH
from penstock.pilot.slow_ranks import is_like, slowed
from penstock.pilot.wishes import is_followed, is_to_leave
from penstock.plan.lower_plan import lower_plan
from penstock.plan.plan import Plan, Prediction, is_asynchronous
from penstock.program.program import Program
from penstock.runtime.windows import Windows, repeated
from penstock.schedule.recipe import name_of
from penstock.schedule.recipe import words_of as words_of_schedule
from penstock.search.judge import Judge
from penstock.search.shifted import keeps_state, shifted
from penstock.training.addresses import Addresses, RunTerms, job_digest, write_addresses
from penstock.training.begin import Begin
from penstock.training.ending import why_over
from penstock.training.events import EVENTS
from penstock.training.lock import holder_of

if TYPE_CHECKING:
    from penstock.pilot.machine_policy import Follower
    from penstock.runtime.worker import Task
    from penstock.training.lock import Holder

_WIDTH = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "bool": 1}


class ReadyPlan(NamedTuple):
    """A plan with all that running it takes, made once.

    task:    what its ranks do, from the run's first step on.
    facts:   what all members have to have alike of it, as a digest.
    """

    choice: Choice
    program: Program
    task: "Task"
    facts: str

    def windows(self, steps: range) -> Windows:
        """Return the windows of these steps, by the program of each one's key."""
        if not self.choice.others:
            return repeated(self.program, steps)
        keys = (self.choice.key, *(each.key for each in self.choice.others))
        programs = dict(zip(keys, self.task.windows.programs, strict=True))
        return windows_of_keys(programs, find_key(self.choice), steps)


@dataclass(frozen=True, slots=True)
class ElasticRun:
    """What all members of a run have alike.

    task:    makes what ranks do of a plan from somewhere on.
    plans:   by number of ranks, made ahead.
    folder:  where the run's files are; None: nothing is written, as in tests.
    token:   what whoever joins has to know.
    by_ranks: whether the batch follows the ranks; `cursors`: of what was done before.
    terms:   what else was asked of it.
    keyed:   where its steps have several shapes, the plans of all by number of ranks; each rank has
             the whole model then, and no plan is made on the way.
    """

    ways: PlanBasis
    task: "Callable[[Choice, Begin], Task]"
    plans: Mapping[int, Plan]
    begin: Begin
    last_step: int
    folder: Path | None = None
    token: bytes = b""
    terms: RunTerms = RunTerms()  # noqa: RUF009 - a frozen record
    by_ranks: bool = False
    cursors: tuple[Cursor, ...] = ()
    keyed: Mapping[int, Choice] = field(default_factory=dict[int, Choice])

    @property
    def is_keyed(self) -> bool:
        """Return whether its steps have several shapes."""
        return bool(self.keyed)

    def choice_of(self, plan: Plan) -> Choice:
        """Return one of its plans with what it is made of.

        Raises:   PlanError: as `PlanBasis.choice_of`; steps of other shapes have no such plan.
        """
        if not self.keyed:
            return self.ways.choice_of(plan)
        found, bare = self.keyed.get(plan.total_ranks), {"decisions": (), "predicted": None}
        if found is None or replace(found.plan, **bare) != replace(plan, **bare):
            message = "the plan is none of those that were made ahead for steps of several shapes"
            raise PlanError(message, hint="give all members the same job file")
        return found._replace(plan=plan)

    def cursors_from(self, before: Sequence[Cursor], step: int, plan: Plan) -> tuple[Cursor, ...]:
        """Return where in the data steps begin that a plan does from a step on, written down."""
        if not self.by_ranks:
            return ()
        found = grown(before, step, plan.job_micro_batches)
        if self.folder is not None:
            save_cursors(self.folder, found)
        return found

    @property
    def addresses(self) -> Addresses:
        """Return what a newcomer has to know, but where members are."""
        folder = "" if self.folder is None else str(self.folder.absolute())
        plans = tuple(text_of(plan) for plan in self.plans.values())
        job = "" if self.folder is None else job_digest(self.folder)
        keyed = tuple(text_of_key_plans(key_plans(choice)) for choice in self.keyed.values())
        told = next((told_by_data(unjoined(way.job)[0]) for way in self.ways.ways), ToldData())
        about = plans, self.last_step, self.terms, job, keyed, told
        return Addresses(self.token.hex(), folder, {}, *about)


@final
@dataclass(eq=False)
class RunPilot:
    """What one member asks: tasks of views, the next view, and where events go."""

    run: ElasticRun
    now: Callable[[], float] = time.time
    _ready: dict[str, ReadyPlan] = field(default_factory=dict[str, ReadyPlan])
    _by_text: dict[str, ReadyPlan] = field(default_factory=dict[str, ReadyPlan])
    _options: tuple[WayOn, ...] = ()
    _rate: float = MOVE_BYTES_PER_S
    _ready_s: float = READY_S
    _slow: dict[int, float] = field(default_factory=dict[int, float])  # by member
    _weighed: dict[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    _looked: bool = False
    _follower: "Follower | None" = None
    _holder: "Holder | None" = None  # of the folder's lock, when this began

    def __post_init__(self) -> None:
        self._holder = None if self.run.folder is None else holder_of(self.run.folder)

    @property
    def last_step(self) -> int:
        """Return the steps of the run."""
        return self.run.last_step

    @property
    def graph(self) -> str:
        """Return the digest of the step that is trained."""
        return self.run.ways.ways[0].captured.graph.digest

    @property
    def about(self) -> str:
        """Return what a newcomer on another host has to know of the run."""
        return self.run.addresses.public

    def prepare(self) -> None:
        """Make ready all plans that were made ahead."""
        for plan in self.run.plans.values():
            self._of(text_of(plan)).task.make_ahead()

    def _of(self, text: str) -> ReadyPlan:
        """Return a plan, made ready; why it was decided on makes no difference."""
        if text not in self._by_text:  # it is asked for at each step
            plan = replace(Plan.from_text(text), decisions=())
            key = text_of(plan)
            if key not in self._ready:
                self._ready[key] = self._made_ready(plan)
            self._by_text[text] = self._ready[key]
        return self._by_text[text]

    def _made_ready(self, plan: Plan) -> ReadyPlan:
        choice = self.run.choice_of(plan)
        for other in () if self.run.is_keyed else self._ready.values():
            there = other.choice.plan
            if (there.cuts, there.terms.joined) == (plan.cuts, plan.terms.joined):
                program = lower_plan(plan, choice.captured.graph)
                if keeps_state(other.program, program):
                    return self._shared_ready(other, choice, program)
        task = self.run.task(choice, Begin(self.run.begin.step))
        program, *_ = task.windows.programs
        facts = " ".join(run_facts(choice, task.windows).values())
        return ReadyPlan(choice, program, task, facts)

    def _shared_ready(self, other: ReadyPlan, choice: Choice, program: Program) -> ReadyPlan:
        """Return a plan whose ranks hold what they hold by another one that is ready."""
        windows = repeated(program, range(self.run.begin.step, self.run.last_step))
        facts = " ".join(run_facts(choice, windows).values())
        return ReadyPlan(choice, program, other.task.at(windows), facts)

    def task(self, view: View) -> "Task":
        """Return what all ranks of a view do; of a run that is over, its last step once more."""
        ready, last = self._of(view.plan), self.run.last_step
        windows = ready.windows(range(min(view.step, last - 1), last))
        resume = Path(view.resume) if view.resume not in ("", START) else None
        task = ready.task.at(windows, resume)
        if not view.cursors:
            return task
        choice = ready.choice
        return task.of(job_at(choice.job, choice.plan, view.cursors, windows.first_step))

    def facts(self, view: View) -> str:
        """Return what all members have to have alike of a view."""
        return self._of(view.plan).facts

    def may_grow(self, count: int) -> bool:
        """Return whether there is a plan for so many ranks."""
        return count in self.run.plans

    # -- what to do about a loss ------------------------------------------------------------------

    def decide(self, view: View, left: Left, mesh: Mesh, joining: tuple[int, ...]) -> View:
        """Return the view that follows: the way to go on that takes the least time in all.

        Raises:   PlanError: there is no plan for the ranks that are left.
        """
        stay = {*view.members} & {*left.members}  # those that go can give nothing any more
        holds = {m: s.holds for m, s in mesh.stopped.items() if m in stay and m not in mesh.lost}
        plain: dict[str, msgspec.Raw] = {}
        for member in holds:
            told = mesh.stopped[member]
            plain = {**told.plain, **plain} if told.done == left.done else {**plain}
        kept = (m for m in view.members if m in left.members)  # by rank: they have read its data
        members = (*kept, *joining)
        where = {m: mesh.where[m] for m in members if m in mesh.where}
        options = self._options_for(view, where, members, left.done, holds)
        chosen = min(options, key=lambda option: option.cost_s)
        lacks = missing_of(self._everything(), holds)
        step, resume = left.done, ""
        why = "; ".join(str(o) for o in sorted(options, key=lambda option: option.cost_s))
        if lacks:
            step, resume = self._back()
            why = f"nobody has {lacks[0]} any more ({len(lacks)} tensors): {why}"
        why += self._at_risk(chosen, where)
        self._options = (chosen, *(o for o in options if o is not chosen))
        plan = told_of(
            chosen.plan, f"from step {step} on", f"{words_of(left.gone, joining)}; {why}"
        )
        return View(
            view.generation + 1,
            step,
            text_of(plan),
            chosen.members,
            view.members,
            dict(left.gone),
            where,
            {} if lacks else holds,
            plain,
            resume,
            left.newest if not lacks else None,
            f"{words_of(left.gone, joining)}: {why}",
            self.run.cursors_from(view.cursors, step, plan),
        )

    def _everything(self) -> list[str]:
        """Return the keys of all parameters and buffers of the model."""
        way = self.run.ways.ways[0]
        kinds = {"parameter": "weights", "buffer": "buffers"}
        nodes = (node for node in way.captured.graph.nodes if node.kind in kinds)
        return sorted({f"{kinds[node.kind]}/{key_in(node.name)}" for node in nodes})

    def _back(self) -> tuple[int, str]:
        """Return the step of the newest checkpoint, and its folder; or those of the run's start."""
        folder = None if self.run.folder is None else self.run.folder / "checkpoints"
        if folder is not None:
            folders.wait_for_writers(folder)  # one may be nearly there
        newest = None if folder is None else checkpoint.latest(folder)
        if newest is None:
            return self.run.begin.step, str(self.run.begin.checkpoint or START)
        return checkpoint.load(newest).step, str(newest)

    def _options_for(
        self,
        view: View,
        where: Mapping[int, Where],
        members: tuple[int, ...],
        done: int,
        holds: Mapping[int, Sequence[HeldTensor]],
    ) -> list[WayOn]:
        """Return all ways to go on with some members, priced.

        where:  they are, as far as that is known.

        Raises:   PlanError: there is none.
        """
        sizes, left = sizes_of(holds, _WIDTH), self.last_step - done
        found: list[WayOn] = []
        plan = self.run.plans.get(len(members))
        if plan is not None:
            ready = self._of(text_of(plan))
            needs = needs_of(ready.choice, ready.program, sizes)
            order, moved = placed(members, needs, holds, _on_hosts(ready.program, members, where))
            plan = self._shared(plan, order) or plan
            found.append(self._option("reshape", plan, order, moved, left))
        if {*members} == {*view.members}:
            now = self._of(view.plan).choice.plan
            if (other := self._shared(now, view.members)) is not None:
                found.insert(0, self._option("share", other, view.members, 0, left))
        saves_s = max((option.moved_bytes / self._rate for option in found), default=math.inf)
        stays = self.run.by_ranks or self.run.is_keyed
        if {*members} < {*view.members} and not stays and saves_s > PRICED_S:
            ranks = [rank for rank, member in enumerate(view.members) if member in members]
            old = self._of(view.plan)
            made = try_rerouted(old.choice.plan, old.program, ranks, self.run.ways)
            if made is not None:
                order = tuple(view.members[rank] for rank in made[1])
                found.append(self._option("reroute", made[0], order, 0, left))
        if not found:
            counts = ", ".join(map(str, sorted(self.run.plans)))
            message = f"{len(members)} ranks are left, and there are plans for {counts}"
            raise PlanError(message, hint="resume=True continues from the last checkpoint")
        return found

    def _at_risk(self, chosen: WayOn, where: Mapping[int, Where]) -> str:
        """Return with which hosts state would be lost from now on, in words; "": with none."""
        program = self._of(text_of(chosen.plan)).program
        on = _on_hosts(program, chosen.members, where)
        if on is None:
            return ""
        names = [on.homes[member] for member in chosen.members]
        costly = ", ".join(costly_hosts(program, names, program.end.guard))
        return f"; with {costly} the run would go back to its last checkpoint" if costly else ""

    def _option(
        self, what: str, plan: Plan, members: tuple[int, ...], moved: int, left: int
    ) -> WayOn:
        step_s = self._step_s(plan, members)
        cost_s = self._ready_s + moved / self._rate + left * step_s
        return WayOn(what, plan, members, moved, step_s, cost_s)

    # -- slow ranks -------------------------------------------------------------------------------

    def hears(self, view: View, factors: Sequence[float]) -> None:
        """Note by how much each rank of a view is slower than at first."""
        self._slow = dict(zip(view.members, factors, strict=True))

    def shares(self, view: View, step: int) -> bool:
        """Return whether to share micro-batches otherwise; once for each change of speeds."""
        now = tuple(self._slow.get(member, 1.0) for member in view.members)
        before = self._weighed.get(view.generation, (1.0,) * len(now))
        is_new = view.generation not in self._weighed
        is_uneven = is_new and self._is_uneven(self._of(view.plan).choice.plan)
        if not is_uneven and all(is_like(a / b) for a, b in zip(now, before, strict=True)):
            return False
        self._weighed = {view.generation: now}
        plan = self._of(view.plan).choice.plan
        found = self._shared(plan, view.members)
        if found is None:
            return False
        assert found.predicted is not None, "it was simulated"
        was_s = self._step_s(plan, view.members)
        gain_s = was_s - found.predicted.step_s
        is_little = gain_s * (self.last_step - step) < 2 * self._ready_s
        return not is_little and gain_s > SHARE_WORTH * was_s

    def _is_uneven(self, plan: Plan) -> bool:
        """Return whether one who takes micro-batches takes more of them than another."""
        shares = plan.grid.shares
        return max(shares) - min(shares) > 1 or "+" in words_of_schedule(plan.schedule)

    def _shared(self, plan: Plan, members: Sequence[int]) -> Plan | None:
        """Return a plan with the best shares for what these members take now, predicted.

        None where it has them: even ones, as long as nobody is slow; where each keeps its own; and
        where steps of several shapes would each be shared otherwise.
        """
        if self.run.by_ranks or self.run.is_keyed:
            return None
        if not self._is_uneven(plan) and all(is_like(self._slow.get(m, 1.0)) for m in members):
            return None
        judge = self._judge(plan, members)
        found = shifted(judge, plan.changed(hosts=()))
        if found is None:
            return None
        expected = Prediction(found.step_s, found.peak_bytes, found.usd)
        return found.plan.changed(hosts=plan.place.hosts, predicted=expected)

    def _judge(self, plan: Plan, members: Sequence[int]) -> Judge:
        way, ways = joining_of(self.run.ways.ways, plan), self.run.ways
        now = slowed(ways.cluster, [self._slow.get(member, 1.0) for member in members])
        return Judge(way.captured.graph, now.profiles(way.profiles), now.cluster)

    def _step_s(self, plan: Plan, members: Sequence[int]) -> float:
        """Return the seconds of a step on some members, with what they take now."""
        assert plan.predicted is not None, "it was simulated"
        if all(is_like(self._slow.get(member, 1.0)) for member in members):
            return plan.predicted.step_s
        own = plan.changed(hosts=())
        return self._judge(plan, members).candidate(own, as_said=True).step_s

    # -- which machines are wanted ----------------------------------------------------------------

    def follows(self, seen: Callable[[], RunSeen]) -> tuple[bool, Sequence[str]]:
        """Return whether this member is to leave, by the policy that the run follows, if any."""
        if not self._looked:
            self._looked, self._follower = True, follower_in(self.run.folder, self.last_step)
        return (False, ()) if self._follower is None else self._follower.follows(seen())

    def is_to_leave(self, member: int) -> bool:
        """Return whether a machine of the run is not wanted any more."""
        return self.run.folder is not None and is_to_leave(self.run.folder, member)

    def why_over(self) -> str:
        """Return why ranks may not go on without the others; "": they may."""
        folder = self.run.folder
        return "" if folder is None else why_over(folder, self.run.token.hex(), self._holder)

    # -- the run's files --------------------------------------------------------------------------

    def happened(self, event: RunEvent) -> None:
        """Write a line about an event, the plan that is run now, and where members are."""
        if event.moved_bytes and event.ready_s > 0:
            self._rate = event.moved_bytes / event.ready_s
        folder, view = self.run.folder, event.view
        if folder is None:
            return
        plan = Plan.from_text(view.plan)
        option = next((o for o in self._options if o.members == view.members), None)
        row: dict[str, object] = {
            "time": self.now(),
            "step": view.step,
            "generation": view.generation,
            "what": event.what,
            "members": list(view.members),
            "gone": {str(member): how for member, how in view.gone.items()},
            "plan": shape_of(plan),
            "way": option.what if option else "",
            "why": view.why,
            "agreed_s": event.agreed_s,
            "ready_s": event.ready_s,
            "stepped_s": event.stepped_s,
            "moved_bytes": event.moved_bytes,
            "predicted_moved_bytes": option.moved_bytes if option else 0,
            "predicted_step_s": plan.predicted.step_s if plan.predicted else None,
            "micro_batches": plan.job_micro_batches,
            "back_to": view.resume,
        }
        add_line(folder / EVENTS, json.dumps(row))
        if event.what != "begins":
            write_addresses(self.run.addresses, view.where)
            plan.save(folder / "plan.json")


def _on_hosts(
    program: Program, members: Sequence[int], where: Mapping[int, Where]
) -> OnHosts | None:
    """Return where members are, if on several hosts, and with how many of those state is lost."""
    homes = {member: where[member].host for member in members if member in where}
    if len({*homes.values()}) < 2 or len(homes) < len(members):
        return None

    def losses(names: Sequence[str]) -> int:
        return len(costly_hosts(program, names, program.end.guard))

    return OnHosts(homes, losses)


def follower_in(folder: Path | None, steps: int) -> "Follower | None":
    """Return who asks the policy that a run follows; None where it follows none."""
    if folder is None or not is_followed(folder):
        return None
    from penstock.pilot.machine_policy import Follower

    return Follower(folder, steps)


def text_of(plan: Plan) -> str:
    """Return a plan as text."""
    return json.dumps(plan.to_json())


def shape_of(plan: Plan) -> str:
    """Return the shape of a plan in a few words."""
    words = f"{plan.replicas} x {plan.num_stages} stages on {plan.total_ranks} ranks"
    return f"{words}, {name_of(plan.schedule)}, {plan.share_words}"


def words_of(gone: Mapping[int, str], joining: Sequence[int]) -> str:
    """Return who went and who came."""
    words = [f"rank {member} {how}" for member, how in gone.items()]
    words += [f"member {member} joined" for member in joining]
    return ", ".join(words) or "asked for"


def check_elastic(plan: Plan) -> None:
    """Raise unless ranks of a plan may come and go.

    Raises:   PlanError: it is asynchronous: its steps have no end at which all could agree.
    """
    if is_asynchronous(plan):
        message = f"{name_of(plan.schedule)} has no end of a step at which all ranks could agree"
        raise PlanError(message, hint="leave out schedule, or name a synchronous one")
