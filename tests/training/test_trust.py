"""Own: nothing that a folder of others names is run without a yes."""

import json
from pathlib import Path

import pytest

from penstock.cli.flags import in_flags
from penstock.errors import JobError
from penstock.fleet.policy_file import PolicyFile
from penstock.pilot.wishes import ELSEWHERE, POLICY
from penstock.training import trust
from penstock.training.saved import check_policy, is_own, job_to_run, keep_job, kept_job


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this user have a key of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(questions: list[str], answer: bool):
    def asks(question: str) -> bool:
        questions.append(question)
        return answer

    return asks


def test_what_this_user_has_written_is_run_unasked(tmp_path: Path) -> None:
    keep_job(tmp_path, "script.py:job", 4)
    questions = list[str]()
    assert job_to_run(tmp_path, asked(questions, answer=False)) == kept_job(tmp_path)
    assert questions == []
    key = tmp_path / "cache" / "penstock" / "keys" / "run"
    assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change",
    [{"job": "evil.py"}, {"from": "/elsewhere"}, {"seal": ""}, {"seal": None}, {"seal": "0" * 64}],
)
def test_what_others_have_written_is_asked_for(change: dict[str, str], tmp_path: Path) -> None:
    keep_job(tmp_path, "script.py:job", 4)
    content = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps({**content, **change}))
    questions = list[str]()
    with pytest.raises(JobError, match="not run unasked") as caught:
        job_to_run(tmp_path, asked(questions, answer=False))
    name = change.get("job", "script.py:job")
    assert name in questions[0]
    assert "--yes" in in_flags(caught.value.hint, "join")
    assert job_to_run(tmp_path, asked([], answer=True)) == kept_job(tmp_path)


def test_what_was_written_with_another_users_key_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_job(tmp_path, "script.py:job", 4)
    assert is_own(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert not is_own(tmp_path)


def test_a_key_that_others_may_read_is_none(tmp_path: Path) -> None:
    keep_job(tmp_path, "script.py:job", 4)
    (tmp_path / "cache" / "penstock" / "keys" / "run").chmod(0o644)
    assert not is_own(tmp_path)


def test_where_no_key_can_be_kept_all_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "cache_folder", lambda name: None)
    assert trust.seal_of("script.py", "/here") == ""
    assert not trust.is_sealed("script.py", "/here", "")


def test_a_job_that_is_named_is_run_but_no_rule_of_others(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"job": "script.py", "from": "/there"}')
    assert job_to_run(tmp_path, asked([], answer=False), "mine.py") == "mine.py"
    with pytest.raises(JobError, match=r"evil\.py:layer"):
        job_to_run(tmp_path, asked([], answer=False), "mine.py", ["evil.py:layer"])


def policy(folder: Path, command: str) -> None:
    found = PolicyFile("spot", ("a",), 2, "plan", 1.0, 0.0, 1.0, 1.0, 1.0, provision=command)
    found.save(folder / POLICY)


def test_a_policy_of_others_runs_no_command(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"job": "script.py", "from": "/there"}')
    policy(tmp_path, "touch stolen")
    questions = list[str]()
    with pytest.raises(JobError):
        job_to_run(tmp_path, asked(questions, answer=False))
    assert "sh -c 'touch stolen'" in questions[0]
    with pytest.raises(JobError, match="touch stolen"):
        check_policy(tmp_path)
    policy(tmp_path, ELSEWHERE)
    check_policy(tmp_path)
    policy(tmp_path, "touch stolen")
    keep_job(tmp_path, "script.py", 4)
    check_policy(tmp_path)
