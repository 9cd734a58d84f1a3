"""bench.scripts --sequences: what is killed and when, what counts as silent, what is compared."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench.scripts import __main__ as command
from bench.scripts import runs, sequences
from bench.scripts.cases import STEPS, scripts
from bench.scripts.compare import newest_checkpoint, read, steps_of
from bench.scripts.oracle import Found, plain_loop
from bench.scripts.sequences import SEQUENCES, TURNS, Command, Row, audited, sequences_of
from penstock.job import Job

ALL = {f"{script.about}:{script.name}": script for script in scripts()}
ROW = Row("a:b", "kill", "2 x 1 gpipe > eager", False, 0.1, False, "", None, False, 1.0)


def test_a_sequence_ends_with_all_steps_and_resumes_whatever_was_begun() -> None:
    for commands in SEQUENCES.values():
        assert commands[-1].share == 1.0
        assert all("--resume" in each.options for each in commands[1:])
        assert "--resume" not in commands[0].options
        assert [each.share for each in commands] == sorted(each.share for each in commands) or any(
            each.killed for each in commands
        )


def test_scripts_take_the_sequences_by_turns() -> None:
    taken = [sequences_of("", turn) for turn in range(len(TURNS))]
    assert {first for first, _ in taken} == {"run"}
    assert {second for _, second in taken} | {"run"} == SEQUENCES.keys()
    assert [sequences_of("turns", turn) for turn in range(len(TURNS))] == [(s,) for _, s in taken]
    assert sequences_of("all", 3) == tuple(SEQUENCES)
    assert sequences_of("resume, kill rank", 3) == ("resume", "kill rank")


def test_a_sequence_that_does_not_exist_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["scripts", "--sequences", "resume,kil"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no sequence is called kil; there are run, resume" in capsys.readouterr().err


def test_parts_run_each_script_once_by_the_sequences_that_it_has_in_the_whole(monkeypatch) -> None:
    rows = list[tuple[str, tuple[str, ...]]]()

    def rows_of(_, script, names):
        rows.append((script.name, names))
        return ()

    def run(*more: str) -> list[tuple[str, tuple[str, ...]]]:
        rows.clear()
        monkeypatch.setattr(
            "sys.argv", ["scripts", "--sequences", "turns", "--only", "data", *more]
        )
        command.main()
        return list(rows)

    monkeypatch.setattr(sequences, "rows_of", rows_of)
    whole = run()
    parts = [run("--part", f"{number}/4") for number in range(1, 5)]
    assert parts == [whole[0::4], whole[1::4], whole[2::4], whole[3::4]]
    with pytest.raises(SystemExit):
        run("--part", "5/4")


@pytest.mark.parametrize(
    ("row", "silent", "how"),
    [
        (ROW, True, "SILENT"),
        (replace(ROW, equal=True), False, "equal"),
        (replace(ROW, refused=True), False, "refused"),
        (replace(ROW, audited_to=4, is_audited=True), False, "audited"),
        (replace(ROW, audited_to=10), True, "SILENT"),
    ],
)
def test_a_row_is_silent_unless_it_is_equal_refused_or_right_up_to_its_last_audit(
    row: Row, silent: bool, how: str
) -> None:
    assert (row.silent, row.json()["silent"]) == (silent, silent)
    assert how in row.line()
    assert ("1 unequal and silent: a:b" in command.summary([row])) == silent


@pytest.mark.parametrize(
    ("step", "losses", "right"),
    [
        (None, [3.0, 2.0, 9.0], False),
        (0, [3.0, 2.0, 9.0], False),
        (2, [3.0, 2.0, 9.0], True),
        (2, [3.0, 2.1, 9.0], False),  # proved, and wrong
        (3, [3.0, 2.0, 9.0], False),  # proved to the end, and wrong
    ],
)
def test_audited_is_what_was_right_up_to_an_earlier_step(step, losses, right) -> None:
    loop = Found({}, {}, [3.0, 2.0, 1.0])
    assert sequences._is_right_up_to(step, Found({}, {}, losses), loop, 1e-5) == right


@pytest.mark.parametrize(
    ("found", "as_rounding"),
    [
        ([1.0, 2.0, 3.0, 4.0], True),
        ([1.0, 2.0, 3.001, 4.3], True),  # it has grown as that of the moved loop
        ([1.0, 2.2, 3.0, 4.0], False),  # it was there at once
        ([1.0, 2.0, 3.2, 4.3], False),
    ],
)
def test_what_grows_as_rounding_does_is_no_difference(found, as_rounding) -> None:
    loop, moved = [1.0, 2.0, 3.0, 4.0], [1.0, 2.000001, 3.0001, 4.1]
    assert sequences.parts_as(found, loop, moved) == as_rounding


def test_audited_to_is_read_from_the_summary_where_it_is(tmp_path) -> None:
    assert audited(tmp_path) is None
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 10}))
    assert audited(tmp_path) is None
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 10, "audited_to": 7}))
    assert audited(tmp_path) == 7


def folder_of(out: Path, steps: int, weight: torch.Tensor, losses: dict[int, float]) -> Path:
    """Write what `penstock train` leaves after some steps."""
    place = out / "checkpoints" / f"step-{steps:06}"
    place.mkdir(parents=True)
    save_file({"weights/a": weight}, place / "rank-0.safetensors")
    (place / "state.json").write_text(json.dumps({"plain": {}}))
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    (out / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 1, "loss": 7.0}', ""]))
    return out


def test_steps_after_the_checkpoint_are_not_compared_and_one_done_again_counts_once(
    tmp_path,
) -> None:
    out = folder_of(tmp_path, 2, torch.ones(1), {1: 9.0, 2: 2.0, 3: 3.0})
    assert read(out).losses == [7.0, 2.0]
    assert steps_of(newest_checkpoint(out)) == 2


class Told(runs.Bench):
    """A bench whose commands write what they would have trained."""

    def __init__(self, folder: Path, monkeypatch, *ends: int) -> None:
        super().__init__(folder)
        self.ends, self.commands = list(ends), list[list[str]]()
        monkeypatch.setattr(sequences, "main", self.train)

    def loop(self, script, steps: int, delay: int = 0, *, moved: float = 0.0) -> Found:
        return Found({"weights/a": torch.full((2,), float(steps))}, {}, [])

    def train(self, words: list[str]) -> int:
        self.commands.append(words)
        if (code := self.ends.pop(0)) == 0:
            out, steps = (words[words.index(name) + 1] for name in ("--out", "--steps"))
            folder_of(Path(out), int(steps), torch.full((2,), float(steps)), {})
            (Path(out) / "metrics.jsonl").write_text("")
        return code

    def run(self, work) -> runs.Ran:
        code = work()
        return runs.Ran(code, "error: no plan\n" if code == 1 else "error: x\nTraceback")


def rows(bench: runs.Bench, *names: str) -> list[Row]:
    return list(sequences.rows_of(bench, ALL["ordinary:mlp"], names))


def test_commands_have_their_share_of_the_steps_and_one_folder(tmp_path, monkeypatch) -> None:
    bench = Told(tmp_path, monkeypatch, 0, 0, 0)
    (row,) = rows(bench, "ranks")
    assert (row.equal, row.silent, row.plan) == (True, False, "eager > eager > eager")
    assert [words[-1] for words in bench.commands] == ["5", "8", str(STEPS)]
    assert len({words[words.index("--out") + 1] for words in bench.commands}) == 1


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_run_that_was_stopped_has_the_bits_of_one_by_the_same_plan(
    is_planned, tmp_path, monkeypatch
) -> None:
    class Plans(Told):
        def train(self, words: list[str]) -> int:
            code = super().train(words)
            if is_planned and "--plan" not in words:
                plan = {"schedule": "gpipe", "place": {"replicas": 1}, "stages": [{}]}
                (Path(words[words.index("--out") + 1]) / "plan.json").write_text(json.dumps(plan))
            return code

    bench = Plans(tmp_path, monkeypatch, 0, 0, 0, 0)
    (row,) = rows(bench, "unbroken")
    assert row.equal
    assert ["--plan" in words for words in bench.commands] == [False, False, False, is_planned]
    assert ["--ranks" in words for words in bench.commands] == [True, True, True, not is_planned]


def test_a_command_that_is_refused_ends_its_sequence(tmp_path, monkeypatch) -> None:
    bench = Told(tmp_path, monkeypatch, 0, 1)
    (row,) = rows(bench, "resume")
    assert (row.refused, row.silent, row.why, row.plan) == (True, False, "error: no plan", "eager")


def test_an_equal_row_says_why_something_else_was_run(tmp_path, monkeypatch) -> None:
    said = "a plan would train something else: a counter\n  a.py:3: n\n  b.py:4: m\ntraining it"

    class Says(Told):
        def run(self, work) -> runs.Ran:
            return super().run(work)._replace(errors=said)

    (row,) = rows(Says(tmp_path, monkeypatch, 0, 0), "resume")
    assert (row.equal, row.refused) == (True, False)
    assert row.why == "a plan would train something else: a counter; a.py:3: n; b.py:4: m"
    assert runs.last_error(runs.Ran(2, "error: x\n  line\nhint: y\n")) == "error: x; line"
    assert runs.last_error(runs.Ran(1, "")) == "no word"
    assert runs.what_changed(runs.Ran(0, "equal to the plain loop")) == ""


def test_who_has_done_all_steps_already_does_a_few_more(tmp_path, monkeypatch) -> None:
    bench, script = Told(tmp_path, monkeypatch, 0), ALL["ordinary:mlp"]
    folder_of(tmp_path / "out", STEPS + 5, torch.ones(2), {})
    sequences._done(bench, script, Command(("--resume",)), tmp_path / "out")
    assert bench.commands[0][-1] == str(STEPS + 5 + sequences.MORE)


def test_a_command_that_breaks_is_no_refusal(tmp_path, monkeypatch) -> None:
    (row,) = rows(Told(tmp_path, monkeypatch, 2), "resume")
    assert (row.equal, row.refused, row.silent) == (False, False, True)


# -- processes ------------------------------------------------------------------------------------


def sleeps(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def test_a_process_that_was_started_is_waited_for_or_killed_with_its_children(tmp_path) -> None:
    bench = runs.Bench(tmp_path)

    def begins_another() -> int:
        if os.fork() == 0:
            os._exit(sleeps(600))
        return sleeps(600)

    begun = bench.start(begins_another)
    while not (own := sequences.children(begun.process)):
        time.sleep(0.001)
    begun.kill()
    assert begun.is_over
    assert begun.wait().code == -signal.SIGKILL
    until = time.monotonic() + 60
    while Path(f"/proc/{own[0]}/cmdline").exists() and _runs(own[0]):
        assert time.monotonic() < until
    assert bench.run(lambda: sleeps(0)).code == 0


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("killed", ["run", "rank"])
def test_who_is_killed_is_killed_once_there_is_a_checkpoint(tmp_path, killed) -> None:
    bench, out = runs.Bench(tmp_path), tmp_path / "out"

    def run_with_a_rank() -> int:
        rank = os.fork()
        if rank == 0:
            os._exit(sleeps(600))
        (out / "checkpoints" / "step-000003").mkdir(parents=True)
        _, status = os.waitpid(rank, 0)
        return 7 if os.WTERMSIG(status) == signal.SIGKILL else 0

    begun = bench.start(run_with_a_rank)
    assert sequences._disturb(bench, begun, Command((), killed=killed), out)
    assert begun.wait().code == (7 if killed == "rank" else -signal.SIGKILL)


def test_a_run_that_ends_before_it_could_be_killed_was_not_disturbed(tmp_path) -> None:
    bench = runs.Bench(tmp_path)
    begun = bench.start(lambda: 0)
    assert not sequences._disturb(bench, begun, Command((), killed="run"), tmp_path / "out")


# -- scripts --------------------------------------------------------------------------------------


def test_scripts_whose_oddity_comes_late_are_run_for_longer() -> None:
    assert ALL["followers:weights_swapped_for_their_average_at_step_twenty"].steps > 20
    assert ALL["ordinary:mlp"].steps == STEPS


def test_the_loop_gives_the_loss_tensors_for_arrays_and_the_rest_as_it_is() -> None:
    shared = torch.ones(2, 3)
    batch = {"x": np.ones((2, 3), np.float32), "n": np.float64(2), "views": (shared, shared)}
    seen = []

    def loss(model, batch):
        seen.append(batch)
        return model(batch["x"]).sum() * batch["n"] + batch["views"][0].sum()

    job = Job(
        model=lambda: torch.nn.Linear(3, 1),
        loss=loss,
        data=lambda start: iter([batch]),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        micro_batches=1,
    )
    plain_loop(job, 1)
    assert isinstance(seen[0]["x"], torch.Tensor)
    assert seen[0]["n"].dtype == torch.float64
    assert seen[0]["views"][0] is seen[0]["views"][1] is shared


@pytest.mark.long
def test_an_ordinary_script_goes_on_after_a_kill_of_a_rank_and_is_joined(tmp_path) -> None:
    found = rows(runs.Bench(tmp_path), "kill", "elastic", "join", "export", "unbroken")
    assert [row.why for row in found if not row.equal] == []
    whats = [json.loads(x)["what"] for x in (tmp_path / "ordinary-mlp-join/events.jsonl").open()]
    assert whats == ["begins", "lost", "joined"]
