"""A toy run: programs on real threads, with integers for tensors, against one plain loop.

Every rank is a thread, which puts its sums on a lane and goes on until it needs them: a lane comes
to them in the order of the code, to each when the one before is over.  A channel (sender, receiver)
matches the k-th Send with the k-th Receive, as untagged transports do; a Receive empties its slot
when it is posted; a Send blocks while `capacity` messages of its channel have no Receive posted (0:
rendezvous, None: never).  Backwards read the received values again, so a slot that is reused too
early gives a wrong result.  Nothing here looks at the verifier: it runs what it is given, and a run
is right when the weights at the end are those of `reference`.
"""

import threading
from collections import defaultdict

from penstock.program.program import (
    BeginOffload,
    BeginReload,
    Compute,
    Offload,
    Receive,
    Reload,
    Reshard,
    Send,
    Unshard,
    Update,
)
from penstock.program.reductions import Reduction
from penstock.schedule import Action

PRIME = (1 << 61) - 1
TIMEOUT_S = 20.0  # never reached: a run in which all threads wait is stopped at once


class Fault(Exception):  # noqa: N818 - of the run, not of the caller
    """What a real run would do wrong: hang, read what is not there, do something twice."""


def mix(*numbers):
    """Return a number that depends on all of `numbers` and their order."""
    result = 17
    for number in numbers:
        result = (result * 1_000_003 + number * 7919 + 12345) % PRIME
    return result


def initial(stage, version):
    return mix(99, stage, version)


def data(replica, stage, micro_batch):
    return mix(5, replica, stage, micro_batch)


class Law:
    """The mathematics of one stage, shared by the run and the reference."""

    def __init__(self, program):
        self.program = program
        self.into = defaultdict(list)
        for number, edge in enumerate(program.edges):
            self.into[edge.target, edge.kind].append(number)

    def forward(self, weights, replica, stage, micro_batch, inputs):
        return mix(weights, data(replica, stage, micro_batch), *inputs)

    def input_gradient(self, weights, out, inputs, gradients):
        return mix(weights, out, 1, *inputs, 2, *gradients)

    def weight_gradients(self, weights, stage, out, inputs, gradients):
        """Return the gradient of the stage's own weights, and of each tied parameter in it."""
        base = mix(weights, out, *inputs, 3, *gradients)
        tied = {
            group.name: mix(base, 4) for group in self.program.graph.tied if stage in group.stages
        }
        return base, tied

    def update(self, weights, own, tied, norm):
        return mix(weights, own, *(tied[name] for name in sorted(tied)), norm)


def oldest(program):
    return int(program.weight_rule.history(program.num_stages, program.num_micro_batches).max())


def reads(program, stage, micro_batch):
    sizes = program.num_stages, program.num_micro_batches
    return program.weight_rule.law(stage, micro_batch, *sizes)


def reference(program, backward=True):
    """Return all outputs and the weights after the window, by a loop that knows the law alone."""
    law, window = Law(program), program.num_micro_batches
    outs = {}
    weights = {
        (stage, version): initial(stage, version)
        for stage in range(program.num_stages)
        for version in range(-oldest(program), 1)
    }
    for step in range(program.num_steps):
        own, tied = defaultdict(int), defaultdict(int)
        for replica in range(program.replicas):
            share = program.shares[replica] if program.shares else window
            for m in range(step * window, step * window + share):
                back = _forward(law, weights, (replica, m), outs)
                if backward:
                    _backward(law, weights, (replica, m), (outs, back, own, tied))
        for stage in range(program.num_stages if backward else 0):
            mine = {g.name: tied[g.name] for g in program.graph.tied if stage in g.stages}
            shared = [tied[group.name] for group in program.graph.tied for _ in group.stages]
            norm = squares([*own.values(), *shared]) if program.end.clip else 0
            weights[stage, step + 1] = law.update(weights[stage, step], own[stage], mine, norm)
    last = program.num_steps if backward else 0
    return outs, {stage: weights[stage, last] for stage in range(program.num_stages)}


def squares(numbers):
    return sum(number * number for number in numbers) % PRIME


def _forward(law, weights, where, outs):
    (replica, m), program = where, law.program
    for stage in range(program.num_stages):
        read = weights[stage, reads(program, stage, m).forward]
        inputs = [outs[replica, program.edges[e].source, m] for e in law.into[stage, "F"]]
        outs[replica, stage, m] = law.forward(read, replica, stage, m, inputs)
    return {}


def _backward(law, weights, where, sums):
    (replica, m), (outs, back, own, tied), program = where, sums, law.program
    for stage in reversed(range(program.num_stages)):
        read = weights[stage, reads(program, stage, m).backward]
        inputs = [outs[replica, program.edges[e].source, m] for e in law.into[stage, "F"]]
        gradients = [back[program.edges[e].source] for e in law.into[stage, "B"]]
        args = outs[replica, stage, m], inputs, gradients
        back[stage] = law.input_gradient(read, *args)
        mine, shared = law.weight_gradients(read, stage, *args)
        own[stage] += mine
        for name, number in shared.items():
            tied[name] += number


class Wires:
    """All that the threads share, behind one lock."""

    def __init__(self, num_ranks, capacity):
        self.changed = threading.Condition()
        self.capacity = capacity
        self.sent = defaultdict(list)  # (sender, receiver) -> [(value, send)]
        self.posted = defaultdict(list)  # (sender, receiver) -> [receive]
        self.memory = defaultdict(dict)  # rank -> {(edge, slot): value or None}
        self.met = defaultdict(dict)  # (group, k) -> {rank: (instruction, payload)}
        self.running = set(range(num_ranks))
        self.ranks = []
        self.waiting = {}  # rank -> what it waits for to be true
        self.faults = []

    def fault(self, text):
        self.faults.append(text)
        self.changed.notify_all()
        raise Fault(text)

    def wait(self, rank, ready):
        """Wait, with the lock held, until `ready()`; a Fault when nobody can make it so."""
        self.waiting[rank] = ready
        while not ready():
            if set(self.waiting) == self.running and not any(go() for go in self.waiting.values()):
                self.fault("hang")
            if self.faults or not self.changed.wait(TIMEOUT_S):
                self.fault("stopped")
        del self.waiting[rank]
        if self.faults:
            self.fault("stopped")

    def advance(self):
        """Let all lanes go on as far as they can."""
        while any(rank.begin() or rank.finish() for rank in self.ranks):
            self.changed.notify_all()

    def match(self, channel):
        """Hand the newest pair of a Send and a Receive over, if there is one."""
        pairs = min(len(self.sent[channel]), len(self.posted[channel]))
        value, send = self.sent[channel][pairs - 1]
        receive = self.posted[channel][pairs - 1]
        if (send.of, send.edge, send.slot) != (receive.of, receive.edge, receive.slot):
            self.fault(f"{send} meets {receive}")  # untagged: a wrong value; tagged: a hang
        self.memory[channel[1]][receive.edge, receive.slot] = value


class Rank(threading.Thread):
    """One rank: its code, its values, its weights."""

    def __init__(self, program, rank, wires):
        super().__init__(daemon=True)
        self.program, self.rank, self.wires, self.law = program, rank, wires, Law(program)
        self.code = program.code[rank]
        self.replica = rank // program.grid.num_ranks
        self.used = set()
        self.slot_of = {
            (one.edge, one.of.micro_batch): one.slot
            for one in self.code
            if isinstance(one, Receive)
        }
        self.done = set()  # instructions that must not come twice
        self.made = {}  # (edge kind, stage, micro-batch) -> value
        self.outs, self.own, self.tied, self.norm = {}, defaultdict(int), defaultdict(int), {}
        self.weights = {
            (one.action.stage, version): initial(one.action.stage, version)
            for one in self.code
            if isinstance(one, Compute)
            for version in range(-oldest(program), 1)
        }
        self.gathered = {
            one.stage: False for one in self.code if isinstance(one, Unshard | Reshard)
        }
        self.meetings = defaultdict(int)
        self.lane, self.begun = [], None  # sums that are issued and not over; where the first meets
        self.closed = set()  # (stage, step) of which a sum was issued
        self.far = {}  # what F keeps, by (stage, micro-batch)
        copies = [one for one in self.code if isinstance(one, Offload | Reload)]
        self.is_far = {  # by kind and stage: the state of the optimizer, and weights
            one.of[:2]: isinstance(one, Reload) for one in reversed(copies) if one.of.kind in "UW"
        }
        self.began_far = dict(self.is_far)
        self.left_there = set()  # (stage, step) whose sum left the gradients with the weights
        self.copying = set()  # actions of which a copy was begun

    def run(self):
        try:
            for instruction in self.code:
                with self.wires.changed:
                    self.do(instruction)
                    self.wires.changed.notify_all()
            with self.wires.changed:
                self.wait_for_sums()
                if self.is_far != self.began_far or self.copying:
                    self.wires.fault("a state, or weights, end elsewhere than they began")
        except Fault:
            pass
        finally:
            with self.wires.changed:
                self.wires.running.discard(self.rank)
                self.wires.changed.notify_all()

    def do(self, instruction):
        key = (type(instruction), instruction)
        if isinstance(instruction, Compute):
            key = instruction.action
        if isinstance(instruction, Send | Receive):
            key = (type(instruction), instruction.edge, instruction.of.micro_batch)
        if key in self.done and not isinstance(instruction, Unshard | Reshard):
            self.wires.fault(f"{instruction} for the second time")
        self.done.add(key)
        match instruction:
            case Compute(action, version):
                self.compute(action, version)
            case Send():
                self.send(instruction)
            case Receive():
                self.post(instruction)
            case _ if isinstance(instruction, Reduction):
                self.reduce(instruction)
            case Update(stage, step):
                self.wait_for_sums()
                self.update(stage, step)
            case Unshard(stage):
                self.wait_for_sums()
                self.meet(self.column(), instruction, None)
                moves = any(one.kind == "W" and one.stage == stage for one in self.copying)
                if not self.is_far.get(("W", stage), True) or moves:
                    self.wires.fault(f"stage {stage} is gathered while its weights are near")
                self.switch(stage, True)
            case Reshard(stage):
                self.switch(stage, False)
            case Offload(of):
                self.copy(of, away=True)
            case Reload(of):
                self.copy(of, away=False)
            case BeginOffload(of):
                self.begin_copy(of, away=True)
            case BeginReload(of):
                self.begin_copy(of, away=False)

    def wait_for_sums(self):
        self.wires.wait(self.rank, lambda: not self.lane)

    def begin_copy(self, of, *, away):
        self.await_gradients(of, away)
        self.check_place(of, away)
        if of in self.copying:
            self.wires.fault(f"{of}: a copy is under way")
        self.copying.add(of)

    def await_gradients(self, of, away):
        if of.kind == "W" and not away:
            self.wait_for_sums()
            if of[1:] not in self.left_there or (self.program.end.clip and of[2] not in self.norm):
                self.wires.fault(f"{of}: its gradients are not there")

    def copy(self, of, *, away):
        self.await_gradients(of, away)
        self.check_place(of, away)
        self.copying.discard(of)
        kind, *where = of
        if kind == "F":
            here, there = (self.outs, self.far) if away else (self.far, self.outs)
            there[tuple(where)] = here.pop(tuple(where))
        else:
            self.is_far[kind, of.stage] = away

    def check_place(self, of, away):
        kind, stage, number = of
        steps = number + away  # updates that were made
        made = (stage, steps) in self.weights and (stage, steps + 1) not in self.weights
        if kind == "F":
            used = any((one, stage, number) in self.done for one in "BIW")
            fits = (stage, number) in (self.outs if away else self.far) and not used
        else:
            fits = made and self.is_far[kind, stage] != away
        if not fits:
            self.wires.fault(f"{of}: not where it should be")

    def column(self):
        return tuple(
            range(
                self.rank % self.program.grid.num_ranks,
                self.program.num_ranks,
                self.program.grid.num_ranks,
            )
        )

    def switch(self, stage, gathered):
        if self.gathered[stage] == gathered or not self.holds(stage):
            self.wires.fault(f"stage {stage} is gathered or dropped twice, or not here")
        self.gathered[stage] = gathered

    def holds(self, stage):
        return (stage, 0) in self.weights

    def send(self, send):
        channel = (self.rank, send.peer)
        kind = "F" if send.of.kind == "F" else "B"
        key = (kind, send.of.stage, send.of.micro_batch)
        if key not in self.made or (kind == "B" and send.of not in self.done):
            self.wires.fault(f"{send}: not made")
        if send.peer == self.rank:
            self.wires.fault(f"{send}: to itself")
        self.wires.sent[channel].append((self.made[key], send))
        number = len(self.wires.sent[channel])
        if len(self.wires.posted[channel]) >= number:
            self.wires.match(channel)
        if (capacity := self.wires.capacity) is not None:
            self.wires.changed.notify_all()
            self.wires.wait(self.rank, lambda: len(self.wires.posted[channel]) >= number - capacity)

    def post(self, receive):
        channel = (receive.peer, self.rank)
        if receive.slot >= self.program.num_micro_batches * self.program.num_steps:
            self.wires.fault(f"{receive}: there is no such slot")
        self.wires.memory[self.rank][receive.edge, receive.slot] = None
        self.wires.posted[channel].append(receive)
        if len(self.wires.sent[channel]) >= len(self.wires.posted[channel]):
            self.wires.match(channel)

    def read(self, edge_number, micro_batch, *, wait):
        """Return the value of an edge: made here, or in the slot that its Receive named."""
        edge = self.program.edges[edge_number]
        key = (edge.kind, edge.source, micro_batch)
        if self.holds_action(edge.source, micro_batch):
            if key not in self.made:
                self.wires.fault(f"{edge} of {micro_batch} is not made yet")
            return self.made[key]
        memory = self.wires.memory[self.rank]
        place = (edge_number, self.slot_of.get((edge_number, micro_batch), -1))
        if place not in memory or (Receive, edge_number, micro_batch) not in self.done:
            self.wires.fault(f"{edge} of {micro_batch} has no receive posted")
        if wait:
            self.wires.wait(self.rank, lambda: memory[place] is not None)
        self.used.add((edge_number, micro_batch))
        if memory[place] is None:
            self.wires.fault(f"slot {place} was emptied while in use")
        return memory[place]

    def holds_action(self, stage, micro_batch):
        return any(
            isinstance(one, Compute) and one.action[1:] == (stage, micro_batch) for one in self.code
        )

    def compute(self, action, version):
        kind, stage, m = action
        if self.gathered.get(stage) is False:
            self.wires.fault(f"{action}: stage is sharded")
        if (stage, version) not in self.weights:
            self.wires.fault(f"{action}: no version {version}")
        weights = self.weights[stage, version]
        inputs = [self.read(e, m, wait=kind == "F") for e in self.law.into[stage, "F"]]
        if kind == "F":
            out = self.law.forward(weights, self.replica, stage, m, inputs)
            self.outs[stage, m] = self.made["F", stage, m] = out
            return
        need = {"B": ["F"], "I": ["F"], "W": ["F", "I"]}[kind]
        bad = {"B": ["I", "W"], "I": ["B"], "W": ["B"]}[kind]
        done = {one for one in "FBIW" if (one, stage, m) in self.done}
        if not done.issuperset(need) or done.intersection(bad):
            self.wires.fault(f"{action}: after {done}")
        gradients = [self.read(e, m, wait=kind != "W") for e in self.law.into[stage, "B"]]
        if (stage, m) not in self.outs or ("F", stage, m) in self.copying:
            self.wires.fault(f"{action}: what F kept is far")
        args = self.outs[stage, m], inputs, gradients
        if kind in "BI":
            self.made["B", stage, m] = self.law.input_gradient(weights, *args)
        if kind in "BW":
            step = m // self.program.num_micro_batches
            if (stage, step) in self.closed:
                self.wires.fault(f"{action}: its gradient is being summed")
            own, tied = self.law.weight_gradients(weights, stage, *args)
            self.own[stage, step] += own
            for name, number in tied.items():
                self.tied[stage, name, step] += number

    def reduce(self, one):
        stages = self.stages_of(one)
        if self.rank not in one.ranks or not stages:
            self.wires.fault(f"{one} is not for rank {self.rank}")
        if any((stage, one.step) not in self.weights for stage in stages):
            self.wires.fault(f"{one}: the step before has not ended")  # one gradient at a time
        self.closed |= {(stage, one.step) for stage in stages}
        self.lane.append(one)
        self.wires.advance()
        if one.word in ("norm", "validate"):
            self.wait_for_sums()

    def begin(self):
        """Come with the first sum of the lane to the others; return whether that was new."""
        if self.begun is not None or not self.lane:
            return False
        one = self.lane[0]
        stages = self.stages_of(one)
        payload = {
            s: self.tied[s, one.bucket, one.step] if one.word == "tied" else self.own[s, one.step]
            for s in stages
        }
        shared = {(s, n): v for (s, n, t), v in self.tied.items() if s in stages and t == one.step}
        group = "lane", one.ranks
        number = self.meetings[group]
        self.meetings[group] += 1
        self.begun = self.wires.met[group, number]
        self.begun[self.rank] = (one, (payload, shared))
        return True

    def finish(self):
        """End the first sum of the lane, if all members have come; return whether that was so."""
        if self.begun is None or len(self.begun) < len(self.lane[0].ranks):
            return False
        one, met, self.begun = self.lane.pop(0), self.begun, None
        if len({other for other, _ in met.values()}) > 1:
            self.wires.fault(f"{one} meets another collective")
        others, stages = [met[rank][1] for rank in sorted(met)], self.stages_of(one)
        if one.word == "norm":
            by_stage = {stage: value for mine, _ in others for stage, value in mine.items()}
            by_group = {key: value for _, tied in others for key, value in tied.items()}
            self.norm[one.step] = squares([*by_stage.values(), *by_group.values()])
        elif one.word == "tied":
            total = sum(value for mine, _ in others for value in mine.values())
            for stage in stages:
                self.tied[stage, one.bucket, one.step] = total
        else:
            (stage,) = stages
            if one.word == "shards":
                self.left_there.add((stage, one.step))
            self.own[stage, one.step] = sum(mine[stage] for mine, _ in others)
            for name in {name for _, tied in others for s, name in tied if s == stage}:
                brought = (tied.get((stage, name), 0) for _, tied in others)
                self.tied[stage, name, one.step] = sum(brought)
        return True

    def stages_of(self, one):
        """Return the stages here whose gradient a reduction is of, by the meaning of its bucket."""
        stages = range(self.program.num_stages)
        if one.word == "tied":
            stages = next((g.stages for g in self.program.graph.tied if g.name == one.bucket), ())
        if one.word in ("replicas", "shards"):
            stages = [int(one.bucket.removeprefix("stage"))]
        return [stage for stage in stages if self.holds(stage)]

    def meet(self, group, instruction, payload):
        """Come to the next collective of a group; return what all members brought."""
        number = self.meetings[group]
        self.meetings[group] += 1
        met = self.wires.met[group, number]
        met[self.rank] = (instruction, payload)
        self.wires.changed.notify_all()
        self.wires.wait(self.rank, lambda: len(met) == len(group))
        if len({one for one, _ in met.values()}) > 1:
            self.wires.fault(f"{instruction} meets another collective")
        return [met[rank][1] for rank in sorted(met)]

    def update(self, stage, step):
        if self.gathered.get(stage):
            self.wires.fault(f"U{stage}.{step}: stage is gathered")
        if (stage, step) not in self.weights or (stage, step + 1) in self.weights:
            self.wires.fault(f"U{stage}.{step}: not its turn")
        under_way = any(one.kind in "UW" and one.stage == stage for one in self.copying)
        if any(self.is_far.get((kind, stage)) for kind in "UW") or under_way:
            self.wires.fault(f"U{stage}.{step}: its state is far, or its weights")
        if self.program.end.clip and step not in self.norm:
            self.wires.fault(f"U{stage}.{step}: no norm")
        tied = {
            g.name: self.tied[stage, g.name, step]
            for g in self.program.graph.tied
            if stage in g.stages
        }
        self.weights[stage, step + 1] = self.law.update(
            self.weights[stage, step], self.own[stage, step], tied, self.norm.get(step, 0)
        )


def run_toy(program, capacity):
    """Return "" when a run of `program` is right, else what went wrong."""
    wires = Wires(program.num_ranks, capacity)
    ranks = wires.ranks = [Rank(program, rank, wires) for rank in range(program.num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT_S)
    assert not any(rank.is_alive() for rank in ranks)
    if wires.faults:
        return wires.faults[0]
    return _compare(program, ranks, wires)


def _compare(program, ranks, wires):
    backward = any(
        isinstance(key, Action) and key.kind != "F" for rank in ranks for key in rank.done
    )
    outs, weights = reference(program, backward)
    found = {(rank.replica, *key): out for rank in ranks for key, out in rank.outs.items()}
    if found != outs or sum(len(rank.outs) for rank in ranks) > len(found):
        return "other outputs, or one made on two ranks"
    for rank in ranks:
        last = program.num_steps if backward else 0
        for stage in {stage for stage, _ in rank.weights}:
            if rank.weights.get((stage, last)) != weights[stage]:
                return f"other weights of stage {stage} on rank {rank.rank}"
        if rank.used != rank.slot_of.keys():
            return "a message for nobody: its slot is never free again"
        if any(rank.gathered.values()):
            return "left gathered"
        if not backward and any(type(one) is Update for one in rank.code):
            return "an update without gradients"
    for channel in set(wires.sent) | set(wires.posted):
        if len(wires.sent[channel]) != len(wires.posted[channel]):
            return f"messages left on channel {channel}"
    return ""
