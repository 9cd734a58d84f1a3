"""Breaks: the product with one thing wrong, in each of its rooms; some test must notice every one.

    python -m tests.breaks [NAME ...] [--list] [--json]

Each break is made in a copy of src, in a folder for temporary files; the working tree stays as it
is.  Exits 1 where one passes unseen, or where the text that it changes is not there any more.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = Path("src") / "penstock"
LIMIT_S = 600.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?: [^-]\S*)*)", re.MULTILINE)


class Break(NamedTuple):
    """One thing wrong.

    file:   below src/penstock.
    old:    stands exactly once in it; `new` stands there instead.
    tests:  test files or test ids, of which one at least has to fail.
    means:  what a person could have got wrong.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    means: str

    @property
    def room(self) -> str:
        """Return the folder of src/penstock in which it is, or the file without its ending."""
        return self.file.partition("/")[0].removesuffix(".py")


class Seen(NamedTuple):
    """What became of a break: the first test that failed, or "" and why there is none."""

    name: str
    room: str
    noticed_by: str
    problem: str
    seconds: float


BREAKS = (
    Break(
        "half_a_line",
        "report/watched.py",
        'whole, _, _ = text.rpartition(b"\\n")',
        "whole = text",
        ("tests/report/test_watched.py",),
        "a line of metrics that is being written is taken for a damaged one",
    ),
    Break(
        "who_may_look",
        "report/live.py",
        'if host not in (f"{HERE}:{self.server_port}", f"localhost:{self.server_port}"):',
        "if not host:",
        ("tests/report/test_watched.py",),
        "pages of other places read the live page by a name that stands for this host",
    ),
    Break(
        "pace_of_now",
        "report/watched.py",
        "if each.step > first + 1",
        "if each.step > 1",
        ("tests/report/test_watched.py",),
        "the speed of earlier generations is shown as that of now",
    ),
    Break(
        "markets_go_on",
        "fleet/market.py",
        "times_s = times_s[times_s < until_s]",
        "times_s = times_s[times_s <= until_s]",
        ("tests/fleet/test_traces.py",),
        "two traces go on after the first of them has ended",
    ),
    Break(
        "ratio_of_what_was_late",
        "fleet/outcome.py",
        "missed=int(np.count_nonzero(can & ~in_time))",
        "missed=int(np.count_nonzero(can & in_time))",
        ("tests/fleet/test_replay.py",),
        "deadlines that are met count as missed",
    ),
    Break(
        "steps_without_machines",
        "fleet/replay.py",
        "found = float(shares.sum(axis=0).max()) * machines / market.until_s",
        "found = float(shares.sum(axis=0).max()) / market.until_s",
        ("tests/fleet/test_replay.py",),
        "the more machines, the sooner one is lost: forgotten",
    ),
    Break(
        "numbers_of_a_policy_dropped",
        "fleet/rulers.py",
        "if len(numbers) != len(wanted):",
        "if len(numbers) > len(wanted):",
        ("tests/cli/test_fleet_market.py",),
        "a policy runs without the numbers that it takes",
    ),
    Break(
        "liveput_without_pauses",
        "fleet/liveput.py",
        "drops = (left[:, 1:] < left[:, :-1]).sum(axis=1)",
        "drops = 0 * (left[:, 1:] < left[:, :-1]).sum(axis=1)",
        ("tests/fleet/test_advise.py",),
        "the largest plan looks best however often it is lost",
    ),
    Break(
        "front_with_what_is_beaten",
        "fleet/advise.py",
        "all(one.late_h < other.late_h for other in found)",
        "any(one.late_h < other.late_h for other in [*found, one, *tried])",
        ("tests/fleet/test_advise.py",),
        "the front holds choices that others beat",
    ),
    Break(
        "hosts_at_the_end",
        "fleet/policy_file.py",
        "_, preemptible, sure, *_ = held[0]",
        "_, sure, preemptible, *_ = held[0]",
        ("tests/fleet/test_advise.py",),
        "hosts are named on demand that are preemptible",
    ),
    Break(
        "page_without_the_chosen",
        "fleet/pictures.py",
        'section("Why", tag("ul", *(tag("li", reason) for reason in found.reasons)))',
        'section("Why")',
        ("tests/fleet/test_advise.py",),
        "the page does not say why",
    ),
    Break(
        "trace_rows_unsorted",
        "fleet/traces.py",
        'order = np.argsort(long.times_s, kind="stable")',
        "order = np.arange(len(long.times_s))",
        ("tests/fleet/test_traces.py",),
        "rows of a trace are believed to be in order",
    ),
    Break(
        "trace_lines_forgotten",
        "fleet/rows.py",
        "line = self.lines[row] if row >= 0 else 1",
        "line = row + 2",
        ("tests/fleet/test_traces.py",),
        "an error names another row than the editor shows",
    ),
    Break(
        "machines_free_while_starting",
        "fleet/kernel.py",
        "figures[DOLLARS] += (spot + sure) * (until - now)",
        "figures[DOLLARS] += (spot + sure) * (until - now) * (rate > 0)",
        ("tests/fleet/test_replay.py",),
        "what is paid while nothing is done is forgotten",
    ),
    Break(
        "late_a_tick_later",
        "fleet/policies.py",
        "margin = 0.0 if view[READY] >= machines else view[TICK]",
        "margin = 0.0",
        ("tests/fleet/test_replay.py",),
        "a policy turns to machines on demand when it is too late",
    ),
    Break(
        "omniscient_starts_at_once",
        "fleet/omniscient.py",
        "both = np.minimum(fleets[:, None], fleets[None])",
        "both = (fleets[None] + 0 * fleets[:, None])",
        ("tests/fleet/test_omniscient.py",),
        "a machine works in the slot in which it is ordered",
    ),
    Break(
        "pools_resampled_apart",
        "fleet/futures.py",
        "machines = market.machines[row_of]",
        "machines = np.column_stack([random.permutation(c) for c in market.machines[row_of].T])",
        ("tests/fleet/test_futures.py",),
        "zones that lose machines together no longer do",
    ),
    Break(
        "unseen_ends_counted",
        "fleet/lifetimes.py",
        "ends = np.bincount(at, weights=lives.ended)",
        "ends = np.bincount(at)",
        ("tests/fleet/test_futures.py",),
        "lifetimes that were not seen to end count as if they had",
    ),
    Break(
        "slots_of_the_most_machines",
        "fleet/futures.py",
        "np.minimum.reduceat",
        "np.maximum.reduceat",
        ("tests/fleet/test_futures.py",),
        "a slot offers machines that were lost in it",
    ),
    Break(
        "look_ahead_at_the_wrong_side",
        "fleet/look_ahead.py",
        "usd[1::2, ~up] = _NEVER",
        "usd[1::2, up] = _NEVER",
        ("tests/fleet/test_replay.py",),
        "preemptible machines are planned for when there are none",
    ),
    Break(
        "large_batches_worth_all",
        "fleet/work.py",
        "return (1 + noise / first) / (1 + noise / batch)",
        "return batch / first",
        ("tests/fleet/test_replay.py",),
        "a larger batch is worth as many steps as it costs",
    ),
    Break(
        "spells_seen_to_end",
        "fleet/spells.py",
        "ended = np.arange(len(begins)) < len(begins) - 1",
        "ended = np.arange(len(begins)) < len(begins)",
        ("tests/fleet/test_futures.py",),
        "the spell that the trace breaks off counts as whole",
    ),
    Break(
        "half_without_the_first",
        "elastic/views.py",
        "(twice == len(maybe) and maybe[0] in here)",
        "(twice == len(maybe))",
        ("tests/elastic/test_views.py",),
        "both halves of a cut network go on",
    ),
    Break(
        "the_least_that_was_done",
        "elastic/views.py",
        "if any(each.done != done for each in told.values()):",
        "if any(each.done < 0 for each in told.values()):",
        ("tests/elastic/test_views.py",),
        "a step that has happened is done again",
    ),
    Break(
        "buffers_of_a_step_that_does_not_count",
        "elastic/steps.py",
        "value.copy_(before)",
        "value.copy_(value)",
        ("tests/elastic/test_kills.py",),
        "running statistics see micro-batches twice",
    ),
    Break(
        "guards_that_sleep",
        "elastic/guard.py",
        "updates.step(step, reached)",
        "updates.held()",
        ("tests/elastic/test_kills.py",),
        "what a dead rank had alone comes back as it was at the start",
    ),
    Break(
        "any_token",
        "elastic/words.py",
        "if not hmac.compare_digest(proof.encode(), self._proof(role).encode()):",
        "if not proof:",
        ("tests/elastic/test_words.py",),
        "whoever connects is a member",
    ),
    Break(
        "parts_that_overlap",
        "elastic/moving.py",
        "for end, transfer in parts.get(start, ()):",
        "for end, transfer in sum(parts.values(), []):",
        ("tests/elastic/test_moving.py",),
        "a tensor is put together of parts that are not its own",
    ),
    Break(
        "anyone_anywhere",
        "elastic/placing.py",
        "costs = lacks + apart",
        "costs = 0 * lacks + apart",
        ("tests/elastic/test_placing.py",),
        "state moves that could stay",
    ),
    Break(
        "checkpoint_without_checksums",
        "runtime/part_file.py",
        "if _words(zlib.crc32(view[first:last])) != sums.get(key):",
        "if key not in sums:",
        ("tests/runtime/test_saver.py",),
        "training goes on from weights of which a byte has changed",
    ),
    Break(
        "interval_of_the_cost_twice",
        "runtime/saver.py",
        "math.sqrt(2 * cost_s * mtbf_s)",
        "math.sqrt(2 * cost_s) * mtbf_s",
        ("tests/runtime/test_saver.py",),
        "checkpoints are written far too seldom",
    ),
    Break(
        "tied_weights_must_be_there_twice",
        "training/imported.py",
        " and _memory(own[name]) not in held]",
        "]",
        ("tests/training/test_imported.py",),
        "files of Hugging Face, which leave out one of two tied weights, are refused",
    ),
    Break(
        "node_ranks_begin_anew",
        "manifest.py",
        "firsts = accumulate((len(row) for row in rows), initial=0)",
        "firsts = accumulate((0 for _ in rows), initial=0)",
        ("tests/test_manifest.py",),
        "hosts of a second kind have the numbers of the first ones, and wait for ever",
    ),
    Break(
        "manifest_without_its_digest",
        "runtime/checkpoint.py",
        "if state.digest and state.digest != digest_of(rest):",
        "if not state.parts:",
        ("tests/runtime/test_saver.py",),
        "training goes on from another step, or by another rate, than was written",
    ),
    Break(
        "checkpoint_of_a_later_step",
        "runtime/saver.py",
        "        self.settle()\n        if state is not None and self._writer is not None:",
        "        if state is not None and self._writer is not None:",
        ("tests/runtime/test_saver.py",),
        "the copy is written over while it is still being written from",
    ),
    Break(
        "conjugates_as_they_lie",
        "runtime/snapshot.py",
        "return dense.resolve_conj().resolve_neg()",
        "return dense",
        ("tests/runtime/test_saver.py",),
        "tensors that are conjugated or negated in view only are saved without that, or not at all",
    ),
    Break(
        "writer_follows_in_silence",
        "runtime/writer.py",
        "            problem, hint = found.message, found.hint\n",
        "            hint = found.hint\n",
        ("tests/runtime/test_saver.py",),
        "a full disk is told as another rank's, and nobody says what it was",
    ),
    Break(
        "rules_of_whole_stages",
        "rules/rewrite.py",
        "{*rules.required, *_ends_inside(plan, graph, rules)}",
        "rules.required",
        ("tests/rules/test_rules.py",),
        "what is said of a part of a stage becomes of all of it",
    ),
    Break(
        "rules_for_the_user_only",
        "search/judge.py",
        "if broken := self.rules.broken(plan, self.graph):",
        "if (broken := self.rules.broken(plan, self.graph)) and plan.decisions:",
        ("tests/rules/test_rules.py",),
        "the search moves cuts and recomputes where a rule says otherwise",
    ),
    Break(
        "ranks_agree_on_less",
        "training/agree.py",
        "if theirs != ours:",
        'if theirs != ours and what != "program":',
        ("tests/cli/test_torchrun.py",),
        "ranks with different programs begin, and wait for each other for ever",
    ),
    Break(
        "compiled_for_others",
        "graph/fuse.py",
        "if [(each.stride(), each.dtype) for each in arguments] == expected:",
        "if len(arguments) == len(expected):",
        ("tests/graph/test_fuse.py",),
        "tensors in other strides or of another dtype are read as if they were as traced",
    ),
    Break(
        "views_are_kept_beside_their_bases",
        "graph/segments.py",
        "        may -= shared\n",
        "        break\n",
        ("tests/graph/test_memory.py",),
        "a value is repeated while its memory is kept for a view of it, and counted once",
    ),
    Break(
        "weights_of_f_and_b_mixed",
        "program/lower_plan.py",
        "    _check_repeats(plan, largest)\n",
        "",
        ("tests/parity/test_recompute.py",),
        "a stage repeats some ops with newer weights, beside values of older ones",
    ),
    Break(
        "recompute_above_its_budget",
        "search/min_cut.py",
        "LinearConstraint(self.bytes[None, :], -np.inf, budget)",
        "LinearConstraint(self.bytes[None, :], -np.inf, budget + 1)",
        ("tests/search/test_min_cut.py",),
        "a stage keeps more than it has room for",
    ),
    Break(
        "compiled_draws_its_own",
        "graph/fuse.py",
        'if graph.nodes[op].effect != "pure" or node.target in IN_GRAD_MODE:',
        "if node.target in IN_GRAD_MODE:",
        ("tests/graph/test_fuse.py",),
        "random numbers are the compiler's own, and buffers are written inside a compiled run",
    ),
    Break(
        "compiled_is_not_predicted",
        "search/judge.py",
        "ways = ways._replace(compiled=plan.compiled)",
        "ways = ways._replace(compiled=False)",
        ("tests/training/test_compiling.py",),
        "a compiled plan is predicted op by op, so that it never pays",
    ),
    Break(
        "classes_learn_alone",
        "profile/latency.py",
        "_DEVICE_STD**2 * np.ones((NUM_PARTS, NUM_PARTS)) +",
        "_DEVICE_STD**2 * np.eye(NUM_PARTS) +",
        ("tests/profile/test_latency.py",),
        "a measured segment says nothing of other classes",
    ),
    Break(
        "end_of_message_for_free",
        "search/inference.py",
        "stand.last_s + end_s, size",
        "stand.last_s, size",
        ("tests/search/test_inference.py",),
        "sending a message costs the stage before it nothing",
    ),
    Break(
        "inference_in_training_mode",
        "runtime/infer.py",
        "return made.eval()",
        "return made",
        ("tests/runtime/test_infer.py",),
        "dropout and running statistics behave as in training",
    ),
    Break(
        "codes_cut_off",
        "graph/codec.py",
        "(rows / scales).round_()",
        "(rows / scales)",
        ("tests/graph/test_codec.py", "tests/parity/test_rounded.py"),
        "codes are cut off towards zero, not rounded",
    ),
    Break(
        "packs_what_stays",
        "runtime/rounded.py",
        "not in self.sent:",
        "is None:",
        ("tests/parity/test_rounded.py",),
        "the proof rounds what stays on its rank",
    ),
    Break(
        "unpacking_for_free",
        "simulate/kernel.py",
        "end_s[message] += packing_s[UNPACKING",
        "end_s[message] += 0.0 * packing_s[UNPACKING",
        ("tests/simulate/test_costs.py",),
        "the receiver of a packed message pays nothing for it",
    ),
    Break(
        "justified_over_the_limit",
        "schedule/justify.py",
        "held[rank, room - 1] < limit",
        "held[rank, room - 1] <= limit",
        ("tests/schedule/test_justify.py", "tests/schedule/test_found.py"),
        "a forward moved early makes one activation too many",
    ),
    Break(
        "patterns_over_the_limit",
        "schedule/found.py",
        "_held(pattern, homes) <= limit",
        "_held(pattern, homes) <= limit + 1",
        ("tests/schedule/test_found.py",),
        "a pattern is justified that holds too much from the start",
    ),
    Break(
        "unknown_taken_for_impossible",
        "schedule/exact_waves.py",
        "bool(np.isinf(solved[1]))",
        "True",
        ("tests/schedule/test_exact_waves.py",),
        "the solver ran out of time, and that is called a proof",
    ),
    Break(
        "provisional_reads_later",
        "program/provisional.py",
        "        if not late:",
        "        if True:",
        ("tests/parity/test_post_validation.py",),
        "a rank runs on over a message that another sends after its first backward",
    ),
    Break(
        "old_messages_kept",
        "runtime/post_validation.py",
        "        for drain in self.drains:",
        "        for drain in ():",
        ("tests/parity/test_post_validation.py",),
        "the old message is read in place of the new one",
    ),
    Break(
        "receives_posted_twice",
        "runtime/post_validation.py",
        "kept[_channel(bound)] -= 1",
        "self.again.append(bound)",
        ("tests/parity/test_post_validation.py",),
        "a receive that is still posted is posted again",
    ),
    Break(
        "buffers_changed_twice",
        "runtime/post_validation.py",
        "            buffer.copy_(value)",
        "            pass",
        ("tests/parity/test_post_validation.py",),
        "a running mean takes a micro-batch in twice",
    ),
    Break(
        "loss_judged_early",
        "runtime/bind.py",
        "isfinite(loss.item()) and not rank.unsettled",
        "isfinite(loss.item())",
        ("tests/parity/test_post_validation.py",),
        "a run ends by a loss of weights that would be taken back",
    ),
    Break(
        "every_update_a_guess",
        "runtime/post_validation.py",
        "        self.is_clipped = self.rank.expects_clipping",
        "        self.is_clipped = False",
        ("tests/parity/test_post_validation.py",),
        "where each step is clipped, each update and its forwards are made twice",
    ),
    Break(
        "threads_still_ending",
        "runtime/child.py",
        'while Path(f"/proc/self/task/{thread.native_id}").exists():',
        "while False:",
        ("tests/runtime/test_launch.py",),
        "a process forked meanwhile waits for a lock of MKL for ever",
    ),
    Break(
        "replicas_alike",
        "schedule/grid.py",
        "return step, sum(self.shares[:replica]) + place",
        "return step, replica * self.shares[replica] + place",
        ("tests/parity/test_shares.py",),
        "places of micro-batches counted as if all replicas took as many",
    ),
    Break(
        "mean_of_means",
        "runtime/bind.py",
        "count = program.grid.step_micro_batches",
        "count = program.replicas * program.grid.shares[rank.replica]",
        ("tests/parity/test_shares.py",),
        "the mean of replicas' means instead of that of all micro-batches",
    ),
    Break(
        "shares_stay",
        "search/polish.py",
        "                if min(shares) > 0:\n",
        "                if min(shares) > 0 and max(shares) == min(shares):\n",
        ("tests/search/test_unlike.py::test_replicas_share_a_step_as_the_best_of_all_shares",),
        "replicas on unlike devices take as much as each other",
    ),
    Break(
        "sum_too_early",
        "program/lower.py",
        "max(at, *(made[s] + 1 for s in stages if s in made))",
        "max(at, *(made[s] for s in stages if s in made))",
        ("tests/program/test_lower.py",),
        "a sum begins before the last gradient for it is made",
    ),
    Break(
        "sums_at_the_end",
        "program/lower.py",
        "at = end if how in AT_THE_END else max",
        "at = end if end else max",
        ("tests/program/test_lower.py",),
        "sums wait for the last backward of all stages",
    ),
    Break(
        "sums_by_rank",
        "program/lower.py",
        "own, at = sorted({number for stage in made for number in of_stage[stage]}), 0",
        "own, at = sorted({n for s in made for n in of_stage[s]}, key=lambda n: "
        "(made.get(sums[n].stages[0], 0), n)), 0",
        ("tests/program/test_lower.py",),
        "every rank sums in the order in which its own gradients are made",
    ),
    Break(
        "sum_not_awaited",
        "runtime/lane.py",
        "for reduce, begun in wanted:",
        "for reduce, begun in wanted[:1]:",
        ("tests/runtime/test_lane.py",),
        "an update that waits for the first of the sums under way only",
    ),
    Break(
        "sum_overtakes",
        "runtime/lane.py",
        "        if len(reduce.ranks) > 1 or reduce.how not in _BESIDE:\n"
        "            yield from self.waits()\n",
        "",
        ("tests/runtime/test_lane.py",),
        "the last sum of a step runs beside those before it, with the same ranks",
    ),
    Break(
        "far_weights_not_written_back",
        "runtime/shards.py",
        "        return Move(lambda: self._copy_out(far), end)\n",
        "        return Move(lambda: None, end)\n",
        ("tests/parity/test_far_weights.py",),
        "updated weights that are dropped in place of being copied to far memory",
    ),
    Break(
        "waiting_not_counted",
        "simulate/memory.py",
        "        after += made\n        before -= used\n",
        "",
        ("tests/parity/test_far_weights.py",),
        "what waits between two stages of one rank takes no bytes",
    ),
    Break(
        "shards_dropped_early",
        "program/passes/shard.py",
        "runs[known]._replace(last=place)",
        "runs[known]",
        ("tests/program/test_shard.py",),
        "a stage whose weights are dropped behind the first compute of several",
    ),
    Break(
        "shards_not_awaited",
        "simulate/kernel.py",
        "before = int(queues.after[queues.offsets[rank] + issued[rank]])",
        "before = -1",
        ("tests/simulate/test_reference.py",),
        "a simulated sum in shards is begun while the one before it still holds its gradients",
    ),
    Break(
        "gathers_behind_tied",
        "program/passes/shard.py",
        'if instruction.how == "tied" and len(instruction.ranks) > 1:',
        'if instruction.how == "tied" and len(instruction.ranks) > 9:',
        ("tests/program/test_shard.py",),
        "a gather behind the sum of a tied parameter that waits for what is gathered",
    ),
    Break(
        "never_kept_whole",
        "search/sharded.py",
        "row[change[0]] = change[1]",
        'row[change[0]] = "shard"',
        ("tests/search/test_selective.py",),
        "stages that stay divided where there is room for the whole",
    ),
    Break(
        "part_gradients_stay",
        "runtime/shards.py",
        "            _free(kept)",
        "            kept.zero_()",
        ("tests/program/test_shard.py",),
        "gradients of a part that have memory all the time",
    ),
    Break(
        "units_never_changed",
        "search/units.py",
        "while points != before:",
        "while before is not None:",
        ("tests/search/test_units.py",),
        "a search of units that ends with the usual settings",
    ),
    Break(
        "shard_of_another",
        "runtime/shards.py",
        "kept.copy_(flat[mine])",
        "kept.copy_(flat[: len(kept)])",
        ("tests/program/test_shard.py",),
        "a replica that updates its part with the gradients of the first part",
    ),
    Break(
        "parts_of_equal_size",
        "runtime/shards.py",
        "for end in accumulate(parts))",
        "for end in accumulate([sum(parts) // len(parts)] * len(parts)))",
        ("tests/program/test_shard.py",),
        "parts that are equal whatever the plan says",
    ),
    Break(
        "gathers_without_company",
        "program/passes/shard.py",
        "    if all(row == told[0] for row in told):\n",
        "    if told:\n",
        ("tests/parity/test_shares.py",),
        "a replica with fewer micro-batches that does not gather along with the others",
    ),
    Break(
        "parts_by_fewest_bytes",
        "search/sharded.py",
        "more = room_of(rank) - candidate.peak_bytes[rank]",
        "more = candidate.peak_bytes[rank] - room_of(rank)",
        ("tests/search/test_sharded.py",),
        "ranks keep the less, the more room they have",
    ),
    Break(
        "turns_of_equal_length",
        "search/turns.py",
        "Fraction(speed / min(speeds))",
        "Fraction(min(speeds) / speed)",
        ("tests/search/test_turns.py",),
        "the slower rank of a stage takes more of its micro-batches",
    ),
    Break(
        "warm_up_too_short",
        "schedule/dapple.py",
        "-(-part * held // sum(turn))",
        "-(-part // sum(turn))",
        ("tests/schedule/test_dapple.py",),
        "a stage on several ranks that runs too few forwards ahead",
    ),
    Break(
        "norm_before_its_sums",
        "program/deadlock.py",
        "waits.sums.hows[waits.sum_of[code.edge[row]]] >= NORM",
        "waits.sums.hows[waits.sum_of[code.edge[row]]] > NORM + 1",
        ("tests/program/test_verify.py",),
        "a program with a norm that waits for ever is told to be sound",
    ),
    Break(
        "gib_decimal",
        "units.py",
        "KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40",
        "KiB, MiB, GiB, TiB = 2**10, 2**20, 10**9, 2**40",
        ("tests/test_units.py",),
        "a binary unit that is the decimal one",
    ),
    Break(
        "no_rename",
        "files.py",
        "        os.replace(temporary, path)\n",
        "        path.write_bytes(content)\n        temporary.unlink()\n",
        ("tests/test_files.py",),
        "a file that readers may see half-written",
    ),
    Break(
        "infinite_json",
        "files.py",
        "case float() if value - value != 0:",
        "case float() if value != value:",
        ("tests/test_files.py",),
        "JSON with an infinity in it, which no other reader takes",
    ),
    Break(
        "number_of_33_bits",
        "typed.py",
        "int, Meta(gt=-(2**31), lt=2**31,",
        "int, Meta(gt=-(2**31), le=2**31,",
        ("tests/test_typed.py",),
        "the bound of a number off by one: it wraps around in a column of 32 bits",
    ),
    Break(
        "half_kept",
        "heap.py",
        "and mallopt(_MMAP_MAX, _NO_BLOCK) == 1",
        "and mallopt(_TRIM_THRESHOLD, _NEVER) == 1",
        ("tests/test_heap.py",),
        "large blocks still given back to the kernel at every step",
    ),
    Break(
        "far_file_stays",
        "far.py",
        "        os.unlink(path)\n",
        "        os.chmod(path, 0o600)\n",
        ("tests/test_far.py",),
        "files of far memory left on the disk",
    ),
    Break(
        "clip_norm_zero",
        "job.py",
        "not 0 < value < math.inf",
        "not 0 <= value < math.inf",
        ("tests/test_job.py",),
        "a limit of zero, which makes every gradient zero",
    ),
    Break(
        "figures_with_step",
        "writers.py",
        'if value is not None and name != "step"',
        "if value is not None",
        ("tests/test_writers.py",),
        "the number of the step drawn as a figure of its own",
    ),
    Break(
        "same_augmentation",
        "batches/by_number.py",
        'seed_all(self.how.seed, "sample", at)',
        'seed_all(self.how.seed, "sample", index)',
        ("tests/test_batches.py",),
        "each epoch draws the same random numbers for a sample",
    ),
    Break(
        "ring_of_n",
        "cluster/collectives.py",
        "shifted(n, 1, 1 / n), 2 * (n - 1)",
        "shifted(n, 1, 1 / n), 2 * n",
        ("tests/cluster/test_collectives.py",),
        "a ring of n rounds where n - 1 do",
    ),
    Break(
        "attention_backward",
        "graph/flop.py",
        "return 10 * _attention(args[1], args[2])",
        "return 8 * _attention(args[1], args[2])",
        ("tests/graph/test_flop.py",),
        "the product that attention repeats in its backward not counted",
    ),
    Break(
        "sent_dies_early",
        "graph/memory.py",
        "lasting = owner.of_all(stay | handed)",
        "lasting = owner.of_all(stay)",
        ("tests/graph/test_memory.py",),
        "what is sent counted as freed before it is sent",
    ),
    Break(
        "whole_table_read",
        "profile/roofline.py",
        "read = min(read, 2 * written)",
        "read = max(read, 2 * written)",
        ("tests/profile/test_roofline.py",),
        "an embedding that reads its whole table for a few rows",
    ),
    Break(
        "old_versions",
        "profile/store.py",
        "(found.device, found.versions), (wanted.device, wanted.versions)",
        "(found.device,), (wanted.device,)",
        ("tests/profile/test_store.py",),
        "a profile of another torch taken for one of this",
    ),
    Break(
        "in_flight_less_one",
        "estimate/memory.py",
        "least(run.pipe - at, run.num_micro_batches)",
        "least(run.pipe - at - 1, run.num_micro_batches)",
        ("tests/estimate/test_memory.py",),
        "one micro-batch too few in flight",
    ),
    Break(
        "forward_too_early",
        "schedule/one_f_one_b.py",
        "2 * (m - warm_up) + 1",
        "2 * (m - warm_up) - 1",
        ("tests/schedule/test_one_f_one_b.py",),
        "one forward more in the warm-up: the same step, more memory",
    ),
    Break(
        "links_never_busy",
        "schedule/greedy.py",
        "if work.in_turn:",
        "if not work.in_turn:",
        ("tests/schedule/test_list_schedule.py",),
        "messages of a list schedule overlap on one link",
    ),
    Break(
        "back_as_there",
        "cluster/cluster.py",
        "found[key] = each.link()",
        "found[key] = found[key[::-1]] = each.link()",
        ("tests/test_cluster.py",),
        "a pair's way back hides the link that is said for it",
    ),
    Break(
        "round_of_one",
        "schedule/weight_rule.py",
        "done = (micro_batch // size - ahead + 1) * size",
        "done = micro_batch - ahead * size + 1",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "ranks of a stage that take turns read other versions in one round",
    ),
    Break(
        "gradient_not_parked",
        "runtime/versions.py",
        "if step > updates[stage]:",
        "if step > updates[stage] + 9:",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "a gradient is lost in the sum of a step before its own",
    ),
    Break(
        "round_not_in_step",
        "schedule/weight_rule.py",
        "need = k * behind + n + k + n - 2 * gcd(k, n)",
        "need = k * behind + n",
        ("tests/schedule/test_asynchronous.py",),
        "1F1B-RR in full flight counts work, not rounds that are out of step",
    ),
    Break(
        "speculates_twice",
        "runtime/staleness.py",
        'target.add_(state["momentum_buffer"], alpha=-ahead * group["lr"])',
        'target.add_(state["momentum_buffer"], alpha=-2 * ahead * group["lr"])',
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "SpecTrain predicts twice as far as the momentum tells",
    ),
    Break(
        "foresees_twice",
        "runtime/staleness.py",
        'value=-ahead * group["lr"] / (1.0 - beta1**step))',
        'value=-2 * ahead * group["lr"] / (1.0 - beta1**step))',
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "XPipe predicts two of Adam's steps for each",
    ),
    Break(
        "corrects_twice",
        "runtime/staleness.py",
        "return torch.add(now, self.kept[node], alpha=ahead)",
        "return torch.add(now, self.kept[node], alpha=2 * ahead)",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "PipeMare's correction doubled",
    ),
    Break(
        "forgets_slowly",
        "schedule/weight_rule.py",
        "decay=0.135",
        "decay=0.9",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "PipeMare's average with another decay",
    ),
    Break(
        "anneals_late",
        "schedule/weight_rule.py",
        "rescale_steps=100",
        "rescale_steps=1000",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "PipeMare's learning rate comes back ten times later",
    ),
    Break(
        "predicts_from_the_replaced",
        "runtime/versions.py",
        "if last < self._updated_at.get((stage, version), last + 1):",
        "if first < self._updated_at.get((stage, version), last + 1):",
        (
            "tests/runtime/test_versions.py",
            "tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",
        ),
        "a prediction that outlives its version is made from the weights after it",
    ),
    Break(
        "border_not_divided",
        "schedule/layer_pipe.py",
        "points = (2 * order + 1) * works",
        "points = works",
        ("tests/schedule/test_layer_pipe.py",),
        "LayerPipe gives all micro-batches of a stage to one processor",
    ),
    Break(
        "product_of_one",
        "graph/joint.py",
        'once = Segment("W", ops, operands, operands, gradients=parts, times=count)',
        'once = Segment("W", ops, operands, operands, gradients=parts[:-1], times=count)',
        ("tests/graph/test_joint.py", "tests/parity/test_plain_loop.py"),
        "2BP forgets one product of those done at once",
    ),
    Break(
        "newest_too_new",
        "schedule/weight_rule.py",
        "min(1 + slots, num_micro_batches)",
        "min(slots, num_micro_batches)",
        (
            "tests/schedule/test_asynchronous.py",
            "tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",
        ),
        "TiMePReSt begins no forward for the way there",
    ),
    Break(
        "anneals_all",
        "runtime/staleness.py",
        "return max(1.0, self.delay) ** -power",
        "return (1.0 + self.delay) ** -power",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "PipeMare's rate divided by one more than the delay",
    ),
    Break(
        "extrapolates_twice",
        "runtime/staleness.py",
        "return torch.add(now, now - self.kept[node], alpha=ahead)",
        "return torch.add(now, now - self.kept[node], alpha=2 * ahead)",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "LWP two updates ahead for each",
    ),
    Break(
        "spike_forgotten",
        "runtime/staleness.py",
        "b = (1.0 - a) / (1.0 - momentum)",
        "b = 1.0 - a",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "spike compensation whose impulses do not add up",
    ),
    Break(
        "spike_of_one_more",
        "schedule/weight_rule.py",
        "return (in_flight(stage, num_stages) - 1) / num_micro_batches",
        "return in_flight(stage, num_stages) / num_micro_batches",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "the staleness counts the own update",
    ),
    Break(
        "home_at_once",
        "schedule/weight_rule.py",
        "back = (micro_batch + stage // 2) // num_micro_batches",
        "back = micro_batch // num_micro_batches",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "SpecTrain's version differences without floor(k / 2)",
    ),
    Break(
        "home_late",
        "schedule/weight_rule.py",
        "back = (micro_batch + stage // 2) // num_micro_batches",
        "back = (micro_batch + stage) // num_micro_batches",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "a round trip in which a stage does nothing but backwards",
    ),
    Break(
        "no_bellwether",
        "schedule/weight_rule.py",
        "first = micro_batch // num_micro_batches * num_micro_batches",
        "first = micro_batch",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "every micro-batch of XPipe's step predicts for itself",
    ),
    Break(
        "stashes_one_more",
        "schedule/weight_rule.py",
        'STASHING = WeightRule("stashing", _stashing(as_1f1b))',
        'STASHING = WeightRule("stashing", _stashing(lambda s, n: n - s + 1))',
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "PipeDream on weights one update older than there is need for",
    ),
    Break(
        "retimed_late",
        "schedule/weight_rule.py",
        "return 2 * (num_stages - 1 - stage) + 1",
        "return 2 * (num_stages - 1 - stage) + 2",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "LayerPipe's delays one more, in law and order",
    ),
    Break(
        "admits_too_many",
        "schedule/weight_rule.py",
        'if depth == "noam":',
        'if depth == "never":',
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "1F1B-RR with more rounds in flight than NOAM says",
    ),
    Break(
        "two_steps_late",
        "schedule/weight_rule.py",
        "return Reads(step - 1, step - 1, step)",
        "return Reads(step - 2, step - 2, step)",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "2BW on the weights of two steps ago",
    ),
    Break(
        "nothing_predicted",
        "runtime/staleness.py",
        'if still and rule.predictor == "optimizer":',
        'if still and rule.predictor == "average":',
        ("tests/parity/test_asynchronous.py::test_sgd_without_what_is_predicted_by_is_refused",),
        "SpecTrain without momentum, which predicts nothing",
    ),
    Break(
        "average_of_all",
        "runtime/staleness.py",
        "average.mul_(self.share).add_(flat, alpha=self.share - 1.0)",
        "average.add_(flat, alpha=self.share - 1.0)",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "PipeMare's average forgets nothing",
    ),
    Break(
        "nothing_kept_early",
        "schedule/weight_rule.py",
        "full = 4 * num_stages * num_micro_batches",
        "full = 0",
        ("tests/parity/test_papers.py::test_the_pipeline_trains_as_the_paper_says",),
        "what predictions need is judged by the first step, which predicts nothing",
    ),
    Break(
        "same_decay_for_all",
        "schedule/weight_rule.py",
        "        decay=given[0],\n",
        "",
        ("tests/parity/test_papers.py", "tests/schedule/test_recipe.py"),
        "PipeMare's decay is that of the paper, whatever is asked for",
    ),
    Break(
        "law_of_next_version",
        "schedule/weight_rule.py",
        "oldest = (micro_batch - num_stages + 1) // num_micro_batches",
        "oldest = (micro_batch - num_stages) // num_micro_batches",
        ("tests/schedule/test_asynchronous.py",),
        "vertical sync a micro-batch later than it is",
    ),
    Break(
        "units_of_w_forward",
        "schedule/refine.py",
        "BACKWARD = (B, I, W)",
        "BACKWARD = (B, I)",
        ("tests/schedule/test_refine.py",),
        "units of W in the order of F",
    ),
    Break(
        "one_unit_more",
        "plan.py",
        "_spread(points, asked - 1)",
        "_spread(points, asked)",
        ("tests/test_plan.py",),
        "a cut point for each unit, where there is one between two",
    ),
    Break(
        "plan_field_lost",
        "plan.py",
        "for each in fields(self)}",
        'for each in fields(self) if each.name != "early"}',
        ("tests/test_plan.py",),
        "a field that is not written, and has a default when it is read",
    ),
    Break(
        "slot_free_at_i",
        "program/slots.py",
        "(kind in (B, W) or not backward)",
        "(kind <= W or not backward)",
        ("tests/program/test_lower.py",),
        "a slot given to the next message while W still needs what is in it",
    ),
    Break(
        "two_replicas_summed",
        "program/reductions.py",
        "_union(replica[stage] for replica in holders)",
        "_union(replica[stage] for replica in holders[:2])",
        ("tests/program/test_lower.py",),
        "gradients summed over the first two replicas alone",
    ),
    Break(
        "gradients_overwritten",
        "program/rules.py",
        "    if state.taken[slot]:\n",
        "    if state.taken[slot] and code.kind[row] == F:\n",
        ("tests/program/test_verify.py",),
        "the verifier lets a gradient be received over another one",
    ),
    Break(
        "receive_late",
        "program/passes/receive_early.py",
        "ahead_computes <= computes + distance",
        "ahead_computes < computes + distance",
        ("tests/program/test_passes.py",),
        "receives posted one compute later than asked for",
    ),
    Break(
        "next_use_moved",
        "program/passes/offload.py",
        "and after.stage == action.stage",
        "and after.stage != action.stage",
        ("tests/program/test_offload.py",),
        "what the next compute needs moved away, the rest kept",
    ),
    Break(
        "room_is_not_waited_for",
        "schedule/offload_places.py",
        "            held == limit or",
        "            held > limit or",
        ("tests/schedule/test_listed_copies.py",),
        "a rank that begins one more than it has room for before a copy has ended",
    ),
    Break(
        "listed_copies_before_their_place",
        "program/passes/offload_listed.py",
        "behind[_last_send(code, row)] = [*begun, *map(_instruction, listed[at])]",
        "behind[_last_send(code, row)] = [*begun, *map(_instruction, listed[at - 1])]",
        ("tests/schedule/test_listed_copies.py",),
        "copies that a schedule lists stand one compute later than it says",
    ),
    Break(
        "least_of_totals",
        "timeline/spent.py",
        "return sum(map(min, zip(*samples, strict=True)))",
        "return min(map(sum, samples))",
        ("tests/test_breakdown.py",),
        "ranks that are last by turns: their waiting told as the sum's own time",
    ),
    Break(
        "far_memory_as_fast_as_a_processor",
        "profile/measure.py",
        'clock = clock_here() if near.device.type != "cpu" else awake_s',
        "clock = clock_here()",
        ("tests/profile/test_measure.py",),
        "a disk's time taken for none, as the thread that waits for it uses no processor",
    ),
    Break(
        "far_blocks_moved_once",
        "far.py",
        "            place += done\n",
        "            place += done + len(left[0]) - len(left[0])\n            break\n",
        ("tests/test_far.py",),
        "a call that moved a part of what it was given taken for done",
    ),
    Break(
        "neighbours_with_gaps_ignored",
        "far.py",
        "run.append(_GAP[:gap])",
        "run.append(_GAP[:0])",
        ("tests/test_far.py",),
        "blocks written where the one before ended, not where they start",
    ),
    Break(
        "an_update_forgets_the_one_before",
        "simulate/price.py",
        "second) * profile.update_workspace_of_second",
        "0) * profile.update_workspace_of_second",
        ("tests/simulate/test_price.py",),
        "what AdamW still holds of the parameter before",
    ),
    Break(
        "a_cap_filled_to_the_brim",
        "training/ask.py",
        "return size_bytes - min(",
        "return size_bytes - 0 * min(",
        ("tests/cli/test_memory.py",),
        "a plan that fills all of --memory, and losses that it does not count",
    ),
    Break(
        "numbers_go_away_too",
        "simulate/price.py",
        "return int(trained + state + numbers + older) + read",
        "return int(trained + state + older) + read",
        ("tests/simulate/test_price.py",),
        "counts of steps taken for what goes to far memory with the state",
    ),
    Break(
        "blocks_by_place_alone",
        "_compat.py",
        'elif event.name == "[memory]" and fields.ptr in held:',
        'elif event.name == "[memory]" and held.setdefault(fields.ptr, -fields.alloc_size):',
        ("tests/test_compat.py",),
        "the release of a block that lies where an earlier profile saw another one",
    ),
    Break(
        "peak_without_messages",
        "simulate/price.py",
        "[edge.size_bytes for edge in program.edges] if posted else []",
        "[edge.size_bytes for edge in program.edges] if not posted else []",
        ("tests/simulate/test_price.py",),
        "messages that wait not held where they are posted early",
    ),
    Break(
        "sum_from_the_start",
        "simulate/kernel.py",
        "over[rank] - 1\n                            start_s = max(",
        "0\n                            start_s = max(",
        ("tests/simulate/test_simulate.py", "tests/simulate/test_reference.py"),
        "an update begins after the first sum, not after its own",
    ),
    Break(
        "bound_with_sums",
        "search/bounds.py",
        "{*whole.forward.ops, *whole.backward.ops} - sums",
        "{*whole.forward.ops, *whole.backward.ops}",
        ("tests/search/test_bounds.py",),
        "a bound of the search that is above what a plan takes: it prunes the best",
    ),
    Break(
        "window_too_long",
        "search/judge.py",
        "seconds /= count - count // 2",
        "seconds /= count",
        ("tests/search/test_search.py",),
        "an asynchronous step said to take half of its time",
    ),
    Break(
        "copies_that_nobody_awaits",
        "simulate/kernel.py",
        "clock_s[rank] = max(clock_s[rank], start_s + duration_s)",
        "clock_s[rank] = max(clock_s[rank], start_s)",
        ("tests/program/test_offload.py",),
        "copies beside computes take no time",
    ),
    Break(
        "used_while_it_is_copied",
        "program/rules.py",
        "if state.now[at + member] & KEPT_COPYING:",
        "if False:",
        ("tests/program/test_offload.py",),
        "a backward may run beside the copy that takes its values away",
    ),
    Break(
        "every_step_begins_at_once",
        "simulate/simulate.py",
        "start_s, ahead_s = clock_s - clock_s.min()",
        "start_s, ahead_s = 0 * clock_s",
        ("tests/search/test_long_run.py",),
        "a long run of steps that all drain",
    ),
    Break(
        "bound_of_a_step_alone",
        "search/bounds.py",
        "    if waits:\n",
        "    if True:\n",
        ("tests/search/test_bounds.py",),
        "candidates left out that are the best in a long run",
    ),
    Break(
        "rate_compounds",
        "runtime/rates.py",
        'group["lr"] = first["lr"] * factor',
        'group["lr"] = group["lr"] * factor',
        ("tests/runtime/test_weights.py",),
        "a factor on the last rate in place of the first",
    ),
    Break(
        "update_factor_lost",
        "runtime/rates.py",
        'group["lr"] = options.get("lr", group["lr"]) * factor',
        'group["lr"] = options.get("lr", group["lr"])',
        ("tests/runtime/test_weights.py",),
        "the rate of late gradients not lowered where a scheduler sets it",
    ),
    Break(
        "masters_read_once",
        "runtime/weights.py",
        "        self.renew_reads()\n        if self.undo",
        "        if self.undo",
        ("tests/parity/test_precision.py::test_weights_are_those_of_the_plain_loop",),
        "copies of the weights in 16 bits that no update makes anew",
    ),
    Break(
        "overflow_learned_from",
        "runtime/sums.py",
        "if rank.loss_scale is None or not rank.loss_scale.leaves_out(number):",
        "if rank.loss_scale is None or number >= 0:",
        ("tests/parity/test_precision.py::test_steps_that_overflow_are_left_out",),
        "a step whose gradients overflow in float16 that is updated with all the same",
    ),
    Break(
        "summed_in_16_bits",
        "runtime/narrow_sums.py",
        "        total = came[0].float()\n",
        "        total = came[0].clone()\n",
        (
            "tests/runtime/test_transport.py::test_a_sum_in_16_bits_rounds_each_rank_and_the_sum_of_all",
        ),
        "gradients that travel in 16 bits added up in 16 bits, not in 32",
    ),
    Break(
        "tied_norm_twice",
        "runtime/sums.py",
        "if n in reached and owner.get(n, stage) == stage]",
        "if n in reached]",
        (
            "tests/parity/test_double_buffered.py::test_tied_weights_and_clipping_work_without_a_flush",
        ),
        "a tied parameter counted in the norm by each stage that holds it",
    ),
    Break(
        "version_not_kept",
        "runtime/versions.py",
        "version >= self.num_steps - self.history[stage]",
        "version > self.num_steps - self.history[stage]",
        ("tests/runtime/test_versions.py",),
        "the oldest version that the next window reads not stashed",
    ),
    Break(
        "worst_is_best",
        "runtime/checkpoint.py",
        "if known is not None and known[1] <= value:",
        "if known is not None and known[1] >= value:",
        ("tests/runtime/test_figures.py::test_the_best_checkpoint_is_kept_besides_the_newest",),
        "the checkpoint with the greatest validation loss kept as the best",
    ),
    Break(
        "offset_lost",
        "runtime/copies.py",
        "offset = int(tensor.storage_offset())",
        "offset = 0 * int(tensor.storage_offset())",
        ("tests/program/test_offload.py",),
        "a view that comes back from far memory at the beginning of its storage",
    ),
    Break(
        "ring_overrun",
        "runtime/transport/shared_memory.py",
        "full = (sent - num_slots) & WORD_MASK",
        "full = (sent - num_slots - 1) & WORD_MASK",
        ("tests/runtime/test_transport_shared_memory.py", "tests/runtime/test_transport.py"),
        "a sender that fills a slot which is not read yet",
    ),
    Break(
        "digest_without_shape",
        "runtime/digest.py",
        'f"{leaf.dtype} {list(leaf.shape)} "',
        'f"{leaf.dtype} "',
        ("tests/runtime/test_digest.py",),
        "two batches of the same bytes in another shape taken for one",
    ),
    Break(
        "error_of_measured",
        "report/words.py",
        "return predicted / measured - 1",
        "return measured / predicted - 1",
        ("tests/report/test_words.py",),
        "errors relative to what was predicted, with the other sign",
    ),
    Break(
        "proof_of_nothing",
        "training/compare.py",
        "for name in sorted(found.keys() | expected.keys()):",
        "for name in sorted(found.keys() & expected.keys()):",
        ("tests/training/test_prove.py::test_what_is_on_one_side_only_is_noticed",),
        "a proof that compares what both have, which may be nothing",
    ),
    Break(
        "nan_is_equal",
        "training/proof.py",
        "if not row.value <= _tolerance(row, job, bits)]",
        "if row.value > _tolerance(row, job, bits)]",
        ("tests/training/test_prove.py::test_a_difference_that_is_no_number_is_a_problem",),
        "a difference that is no number passes as small",
    ),
    Break(
        "listener_not_told",
        "training/session.py",
        "return [*self.job.writers, *([self.on_step] if self.on_step else []), *goal]",
        "return [*(self.job.writers or ([self.on_step] if self.on_step else [])), *goal]",
        ("tests/training/test_train.py",),
        "on_step silent where the job has writers",
    ),
    Break(
        "phase_reads_from_its_first_step",
        "training/phases.py",
        "return ahead(own, phase.number - phase.step * phase.micro_batches)",
        "return ahead(own, 0)",
        ("tests/training/test_until.py",),
        "another batch begins with another micro-batch than the next one",
    ),
    Break(
        "rate_by_steps_of_the_run",
        "training/pace.py",
        "return at.own + (step - at.step) * at.gain",
        "return at.own + (step - at.step)",
        ("tests/training/test_pace.py",),
        "a step of another batch counted as one of the job's own",
    ),
    Break(
        "scheduler_sees_the_factor",
        "training/pace.py",
        """            group["lr"] = rate
        self._step += 1""",
        """            pass
        self._step += 1""",
        ("tests/training/test_pace.py",),
        "a scheduler that multiplies what stands in the group multiplies the factor, too",
    ),
    Break(
        "noise_pooled_by_scales",
        "profile/noise.py",
        "variance = sum(one.steps * one.variance for one in found)",
        "variance = sum(one.steps * one.scale * one.gradient_sq * one.steps for one in found)",
        ("tests/profile/test_noise.py",),
        "phases weighted twice",
    ),
    Break(
        "goal_by_the_newest_step",
        "training/goal.py",
        "while self._count - self._newest[0][1] >= most:",
        "while len(self._newest) > 1:",
        ("tests/training/test_goal.py",),
        "one lucky step ends a run",
    ),
    Break(
        "search_stops_unmeasured",
        "training/until.py",
        "return None if pair in done or len(self.told.phases) >= _MOST_PHASES else pair",
        "return None",
        ("tests/training/test_until.py",),
        "what looks best is taken without having been measured",
    ),
    Break(
        "batch_moves_without_noise",
        "training/until.py",
        "if done and math.isnan(self.scale):",
        "if False:",
        ("tests/training/test_until.py",),
        "a batch chosen though nothing is known of the noise",
    ),
    Break(
        "resumed_phase_keeps_its_seconds",
        "training/phases.py",
        "opened = [replace(each, step_s=0.0, seconds=0.0, watched=0) for each in under_way]",
        "opened = list(under_way)",
        ("tests/training/test_until.py",),
        "a run that goes on takes the phase under way for done",
    ),
    Break(
        "resume_skips_a_step",
        "training/session.py",
        "        return done, newest\n",
        "        return done + 1, newest\n",
        ("tests/training/test_train.py",),
        "a resumed run that begins one step late",
    ),
    Break(
        "check_exits_0",
        "cli/check.py",
        '    if not found["ok"]:\n',
        '    if not found["traced"]:\n',
        ("tests/cli/test_check.py",),
        "a step that differs from the plain loop exits as if it were equal",
    ),
    Break(
        "skipped_not_in_json",
        "cli/predict.py",
        '"layout": table.layout, "skipped": table.skipped}',
        '"layout": table.layout}',
        ("tests/cli/test_predict.py",),
        "a field of a JSON document gone",
    ),
    Break(
        "moved_by_chance",
        "profile/drift.py",
        "is_near or chance(self.old, self.new) > _CHANCE",
        "is_near",
        ("tests/profile/test_drift.py",),
        "two medians that differ are taken for a move, however noisy the samples are",
    ),
    Break(
        "told_twice",
        "profile/store.py",
        "        profile = replace(kept, fused=profile.fused)\n",
        "",
        ("tests/training/test_compiling.py",),
        "what runs told is kept as if it had been measured, and counts again the next time",
    ),
    Break(
        "plan_goes_stale",
        "training/replan.py",
        "self.count, self._posted, self._read = self.count + 1, 0, ([], None)",
        "self.count, self._posted = self.count + 1, 0",
        ("tests/training/test_replan.py",),
        "samples of the plan before are read as those of the one that was made again",
    ),
    Break(
        "slower_plan_stays",
        "training/replan.py",
        "if self._step_s > was_s:",
        "if self._step_s > 100 * was_s:",
        ("tests/training/test_replan.py",),
        "a plan that was made again is believed, though its steps take longer",
    ),
    Break(
        "inverse_counts_no_rank",
        "fleet/volatile.py",
        "return total / some",
        "return total",
        ("tests/fleet/test_volatile.py",),
        "E[1/y] counts the steps in which there is no rank",
    ),
    Break(
        "steps_do_not_follow_the_batch",
        "fleet/batch.py",
        "count = steps_needed(steps, batch, self.scale, other=samples)",
        "count = steps * batch / samples",
        ("tests/fleet/test_batch.py",),
        "twice the batch is believed to halve the steps, whatever the noise",
    ),
    Break(
        "dearest_first",
        "cli/fleet_batch.py",
        "one.seconds if objective",
        "-one.seconds if objective",
        ("tests/cli/test_fleet_batch.py",),
        "the slowest ranks and batch are named first",
    ),
    Break(
        "noise_of_one_replica",
        "runtime/sums.py",
        "is_telling = rank.rank == min(reduce.ranks)",
        "is_telling = True",
        ("tests/parity/test_noise.py",),
        "each replica tells of the same sum, which counts twice",
    ),
    Break(
        "noise_of_scaled_gradients",
        "runtime/noise.py",
        "small = self.count * _sum(self._small) / own",
        "small = _sum(self._small) / own",
        ("tests/parity/test_noise.py",),
        "a micro-batch's gradient is taken for its share of the mean",
    ),
    Break(
        "noise_of_batches_alike",
        "profile/noise.py",
        "return (self.micro_batches * self.large - self.small) / (self.micro_batches - 1)",
        "return self.large",
        ("tests/profile/test_noise.py",),
        "the noise left in the mean gradient counts as gradient",
    ),
    Break(
        "judged_by_what_it_taught",
        "fleet/learn.py",
        "kept = [row for row, of in zip(rows, fold_of, strict=True) if of != at]",
        "kept = rows",
        ("tests/fleet/test_learn.py",),
        "the group that is judged has a part in what is learned",
    ),
    Break(
        "interval_of_the_median",
        "fleet/learn.py",
        "at = math.floor((1.0 - share) * (count + 1)) - 1",
        "at = math.floor((1.0 - share / 4) * (count + 1)) // 2 - 1",
        ("tests/fleet/test_learn.py",),
        "the interval holds fewer than it promises",
    ),
    Break(
        "bytes_of_another_device",
        "fleet/measurement.py",
        '"bytes": work.moved / peaks.bytes_per_s,',
        '"bytes": work.moved / GB,',
        ("tests/fleet/test_measurement.py",),
        "a device with faster memory is believed to be as slow as the others",
    ),
    Break(
        "cap_is_a_wish",
        "fleet/together.py",
        "return ClusterSpeed(min(middle, cap), min(low, cap)",
        "return ClusterSpeed(middle, min(low, cap)",
        ("tests/fleet/test_together.py",),
        "a cluster is said to be faster than its server",
    ),
    Break(
        "one_checkpoint_too_few",
        "cli/fleet_predict_job.py",
        "saving, starting = _worst(found.checkpoints), _worst(found.starts)",
        "saving, starting = _worst({}), _worst(found.starts)",
        ("tests/cli/test_fleet_predict.py",),
        "checkpoints are counted and cost nothing",
    ),
    Break(
        "errors_of_rows_not_measured",
        "cli/fleet_predict.py",
        "inside = [one.low <= row.seconds <= one.high for row, one in pairs if row.seconds]",
        "inside = [one.low <= (row.seconds or 0) <= one.high for row, one in pairs]",
        ("tests/cli/test_fleet_predict.py",),
        "rows that nobody measured count as outside of their interval",
    ),
)


def fault(one: Break) -> str:
    """Return why a break cannot be made; empty where its text stands once in its file."""
    file = ROOT / PACKAGE / one.file
    if not file.is_file():
        return f"there is no {one.file}"
    count = file.read_text().count(one.old)
    return "" if count == 1 else f"its text stands {count} times in {one.file}, not once"


def broken(one: Break) -> Seen:
    """Return what the tests say of the product with this break."""
    start = time.monotonic()
    if problem := fault(one):
        return Seen(one.name, one.room, "", problem, 0.0)
    with tempfile.TemporaryDirectory(prefix="penstock-break-") as folder:
        copy = Path(shutil.copytree(ROOT / "src", Path(folder) / "src"))
        file = copy / PACKAGE.name / one.file
        file.write_text(file.read_text().replace(one.old, one.new))
        code, said = _tested(one, copy)
    ids = _FAILED.findall(said)
    noticed, problem = (ids[0], "") if code == 1 and ids else ("", _problem(code, said))
    return Seen(one.name, one.room, noticed, problem, time.monotonic() - start)


def _tested(one: Break, source: Path) -> tuple[int, str]:
    """Return exit code and output of the tests of a break, run on `source`; -1: not in time."""
    kept = {"PYTHONPATH": str(source), "XDG_CACHE_HOME": str(source.parent / "cache")}
    command = sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *one.tests
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **kept},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout + done.stderr


def _problem(code: int, said: str) -> str:
    """Return why no test has failed."""
    if code == 0:
        return "PASSED UNSEEN"
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing was said")
    return f"not in {LIMIT_S:.0f} s" if code == -1 else f"pytest ended with {code}: {last}"


def main(arguments: Sequence[str]) -> int:
    """Make the breaks that are named, or all; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.breaks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a break; default: all")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args(arguments)
    known = {one.name: one for one in BREAKS}
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"no break is called {', '.join(unknown)}; --list shows them")
    chosen = [known[name] for name in asked.names] or BREAKS
    if asked.list:
        rows = [(one.name, one.room, one.means) for one in chosen]
        print(json.dumps([one._asdict() for one in chosen]) if asked.json else _table(rows))
        return 0
    found = [_shown(broken(one), quiet=asked.json) for one in chosen]
    if asked.json:
        print(json.dumps([one._asdict() for one in found]))
    unseen = [one.name for one in found if not one.noticed_by]
    spent_s = sum(one.seconds for one in found)
    print(f"{len(found)} breaks, {len(unseen)} not noticed, {spent_s:.0f} s", file=sys.stderr)
    return 1 if unseen else 0


def _shown(one: Seen, *, quiet: bool) -> Seen:
    if not quiet:
        what = one.noticed_by or one.problem
        print(f"{one.name:22}  {one.room:9}  {one.seconds:5.1f} s  {what}", flush=True)
    return one


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
