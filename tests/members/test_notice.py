"""Notice: of files and of the clouds' own addresses, as these are documented to answer."""

import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from penstock.errors import RunError
from penstock.members import notice
from penstock.members.notice import NotUnderstoodError, is_noticed, looking, place_of_notice

ACTION = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
AZURE = {"DocumentIncarnation": 1, "Events": [{"EventType": "Preempt"}]}


class Cloud(HTTPServer):
    """A server of metadata: `asks` says which headers a question has to have."""

    answer: str | None = None
    name: str | None = None
    asks: ClassVar[dict[str, str]] = {}


class _Handler(BaseHTTPRequestHandler):
    server: Cloud

    def do_GET(self) -> None:
        if any(self.headers.get(name) != value for name, value in self.server.asks.items()):
            self._send(401, "")
        elif self.path == notice._OWN_NAME:
            self._send(404 if self.server.name is None else 200, self.server.name or "")
        elif self.server.answer is None:
            self._send(404, "not found")
        else:
            self._send(200, self.server.answer)

    def do_PUT(self) -> None:
        is_asked = self.path == "/latest/api/token" and self.headers.get(notice._TTL)
        self._send(200 if is_asked else 400, "secret")

    def _send(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *about: object) -> None:
        """Say nothing."""


@pytest.fixture
def cloud() -> Generator[Cloud]:
    with Cloud(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: Cloud) -> str:
    return f"http://127.0.0.1:{server.server_port}/latest/instance"


@pytest.mark.parametrize(
    ("answer", "comes"),
    [
        (None, False),
        (ACTION, True),
        ("FALSE", False),
        ("TRUE", True),
        ("NONE\n", False),
        (json.dumps({"DocumentIncarnation": 0, "Events": []}), False),
        (json.dumps(AZURE), True),
        ("", False),
        ("null", False),
        ("2026-01-05T18:02:00Z", True),
        ('{"evict": true}', True),
        ("MIGRATE_ON_HOST_MAINTENANCE", False),
        ("TERMINATE_ON_HOST_MAINTENANCE", True),
        (json.dumps({"Events": [{"EventType": "Freeze"}]}), False),
        (json.dumps({"Events": ["?"]}), False),
    ],
)
def test_answers_of_clouds_are_read(cloud: Cloud, answer: str | None, comes: bool) -> None:
    cloud.answer = answer
    assert is_noticed(url_of(cloud)) is comes


PAGE = "<!doctype html><title>Log in</title>"


@pytest.mark.parametrize(
    ("answer", "of_cloud"),
    [(PAGE, False), (PAGE, True), ("OK", True), ('{"status": "up"}', True), ("[1]", True)],
)
def test_what_is_not_understood_is_told_once_and_is_no_notice(
    cloud: Cloud, answer: str, of_cloud: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.answer = answer
    monkeypatch.setenv("PENSTOCK_NOTICE", url_of(cloud))
    monkeypatch.setattr(notice, "_CLOUDS", {"127.0.0.1"} if of_cloud else set())
    with pytest.raises(NotUnderstoodError):
        is_noticed(url_of(cloud))
    said: list[str] = []
    asked, real = threading.Semaphore(0), notice.is_noticed

    def ask(place: str) -> bool:
        asked.release()
        return real(place)

    monkeypatch.setattr(notice, "is_noticed", ask)
    with looking(said.append, 0.001) as told:
        for _ in range(3):
            assert asked.acquire(timeout=60)
        assert not told()
    assert len(said) == 1
    assert f"is not understood, and is no notice: it answers {answer[:9]!r}"[:-1] in said[0]


@pytest.mark.parametrize("answer", ["TRUE", ACTION, json.dumps(AZURE)])
def test_what_clouds_answer_is_understood_at_their_own_addresses(
    cloud: Cloud, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.answer = answer
    monkeypatch.setattr(notice, "_CLOUDS", {"127.0.0.1"})
    assert is_noticed(url_of(cloud))


@pytest.mark.parametrize(("name", "comes"), [("vm_3", True), ("vm_4", False), (None, True)])
def test_an_event_is_notice_for_the_machine_that_it_names(
    cloud: Cloud, name: str | None, comes: bool
) -> None:
    cloud.name = name
    cloud.answer = json.dumps({"Events": [{"EventType": "Preempt", "Resources": ["vm_3"]}]})
    assert is_noticed(url_of(cloud)) is comes


@pytest.mark.parametrize("answer", [None, ACTION])
def test_one_that_asks_for_a_token_is_given_one(
    cloud: Cloud, answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.answer = answer
    monkeypatch.setattr(Cloud, "asks", {notice._TOKEN: "secret"})
    assert is_noticed(url_of(cloud)) is (answer is not None)


@pytest.mark.parametrize("name", ["Metadata-Flavor", "Metadata"])
def test_questions_have_the_headers_that_clouds_ask_for(
    cloud: Cloud, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.answer = "TRUE"
    monkeypatch.setattr(Cloud, "asks", {name: notice._HEADERS[name]})
    assert is_noticed(url_of(cloud))


def test_a_file_is_notice_once_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NOTICE", str(tmp_path / "go"))
    said: list[str] = []
    with looking(said.append, 0.001) as told:
        assert not told()
        (tmp_path / "go").touch()
        for _ in range(30_000):
            if told():
                break
            threading.Event().wait(0.002)
        assert told()


def test_one_that_does_not_answer_is_told_once_and_asked_on(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NOTICE", url_of(cloud))
    said: list[str] = []
    has_failed = threading.Event()
    real = notice.is_noticed
    fails = [OSError("no route")] * 3

    def asked(place: str) -> bool:
        if fails:
            raise fails.pop()
        has_failed.set()
        return real(place)

    monkeypatch.setattr(notice, "is_noticed", asked)
    with looking(said.append, 0.001) as told:
        assert has_failed.wait(60)
        cloud.answer = "TRUE"
        for _ in range(30_000):
            if told():
                break
            threading.Event().wait(0.002)
        assert told()
    assert len(said) == 2
    assert "no route" in said[0]
    assert said[1].endswith("says that this machine will be taken")


def test_without_the_variable_nothing_is_asked_and_no_thread_is_there() -> None:
    before = threading.active_count()
    with looking(pytest.fail) as told:
        assert not told()
        assert threading.active_count() == before


def test_a_place_that_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NOTICE", "ftp://somewhere/x")
    with pytest.raises(RunError, match="PENSTOCK_NOTICE is ftp"):
        place_of_notice()
