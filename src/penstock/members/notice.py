"""Notice: word that this machine will be taken soon, from a file or a URL.

PENSTOCK_NOTICE names it, for each host by itself.  Of a file it is notice that it is there.  Of a
URL it is that it answers, and with anything but nothing, "FALSE", "NONE" or a page of HTML.  The
clouds' own addresses can be given as they are; of these only what they are documented to answer is
understood, and only what takes the machine is notice:

AWS     http://169.254.169.254/latest/meta-data/spot/instance-action
        {"action": "stop" | "terminate" | "hibernate", ...}
Google  http://metadata.google.internal/computeMetadata/v1/instance/preempted
        TRUE | FALSE; of .../maintenance-event TERMINATE_ON_HOST_MAINTENANCE
Azure   http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01
        {"Events": [{"EventType": "Preempt", "Resources": ["this machine"]}]}; not "Freeze", and not
        what comes for another machine of its set

What is not understood is told once, and nobody leaves for it.

Source:   the instance metadata services of the three; AWS asks for a token first (IMDSv2).
Ignores:  how long is left: a rank leaves after the step that it is in.
"""

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urljoin, urlsplit

from penstock.errors import RunError

NOTICE = "PENSTOCK_NOTICE"
_ASK_S, _LIMIT_S = 2.0, 2.0  # between two questions, and for an answer
_OK, _ASKS_FOR_TOKEN, _NOTHING = 200, 401, 404
_MOST_BYTES = 65536
_NONE = {"", "false", "none", "null", "migrate_on_host_maintenance"}
_TAKEN, _ACTIONS = {"true", "terminate_on_host_maintenance"}, ("stop", "terminate", "hibernate")
_CLOUDS = {"169.254.169.254", "fd00:ec2::254", "metadata.google.internal"}
_OWN_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"  # of Azure's
_MOST_TOLD = 60  # letters of an answer
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
_TOKEN, _TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"


def place_of_notice() -> str:
    """Return what is looked at; "": nothing.

    Raises:   RunError: it is neither a file's path nor a URL.
    """
    place = os.environ.get(NOTICE, "")
    if "://" not in place:
        return os.path.expanduser(place)
    try:
        is_known = urlsplit(place).scheme in ("http", "https") and bool(urlsplit(place).hostname)
    except ValueError:
        is_known = False
    if not is_known:
        raise RunError(f"{NOTICE} is {place}", hint="give a file's path, or http://HOST/PATH")
    return place


def is_noticed(place: str) -> bool:
    """Return whether this machine has had notice, by a file or a URL.

    Raises:   OSError, HTTPException: nobody answers there.
              NotUnderstoodError: what does is neither notice nor a word that there is none.
    """
    if "://" not in place:
        return Path(place).exists()
    told = _answer(place, {})
    if told.status == _ASKS_FOR_TOKEN:
        told = _answer(place, {_TOKEN: _token(place)})
    return told.status == _OK and _says(place, told.text)


class _HttpAnswer(NamedTuple):
    status: int
    text: str


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> _HttpAnswer:
    """Return what a URL answers; where there is nothing (404), AWS has no notice.

    Raises:   OSError, HTTPException: nobody answers, or something else than that.
    """
    asked = urllib.request.Request(url, headers={**_HEADERS, **headers}, method=method)
    try:
        with _OPENER.open(asked, timeout=_LIMIT_S) as answer:
            return _HttpAnswer(_OK, answer.read(_MOST_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as problem:
        problem.close()
        if problem.code in (_ASKS_FOR_TOKEN, _NOTHING):
            return _HttpAnswer(problem.code, "")
        raise


def _token(url: str) -> str:
    place = urlsplit(url)
    return _answer(f"{place.scheme}://{place.netloc}/latest/api/token", {_TTL: "60"}, "PUT").text


class NotUnderstoodError(RunError):
    """An answer that is no word of notice."""


def _says(place: str, answer: str) -> bool:
    """Return whether an answer is notice.

    Raises:   NotUnderstoodError: it is a page, or none that the cloud is documented to give.
    """
    word, told = answer.strip().lower(), _record(answer)
    if word in _NONE:
        return False
    if isinstance(events := told.get("Events"), list):
        rows = cast("list[object]", events)
        return any(_takes(place, cast("dict[str, object]", row)) for row in rows)
    is_known = word in _TAKEN or told.get("action") in _ACTIONS
    is_page = word.startswith("<")
    if not is_known and (is_page or urlsplit(place).hostname in _CLOUDS):
        raise NotUnderstoodError(f"it answers {answer.strip()[:_MOST_TOLD]!r}")
    return True


def _record(answer: str) -> dict[str, object]:
    """Return what an answer has by name; nothing, if it is no JSON or has no names."""
    try:
        told: object = json.loads(answer)
    except ValueError:
        return {}
    return cast("dict[str, object]", told) if isinstance(told, dict) else {}


def _takes(place: str, event: dict[str, object]) -> bool:
    """Return whether an event of Azure's takes this machine, or may."""
    if not isinstance(event, dict) or event.get("EventType") == "Freeze":  # pyright: ignore
        return False
    named = event.get("Resources")
    if not isinstance(named, list) or not named:
        return True
    own = _answer(urljoin(place, _OWN_NAME), {})
    return own.status != _OK or own.text.strip() in named


# Metadata is asked of the host itself, not of a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def looking(say: Callable[[str], None], ask_s: float = _ASK_S) -> Generator[Callable[[], bool]]:
    """Look for notice while this lasts; give a function that tells whether there has been any.

    say:      told once that nobody answers, once that an answer is not understood, and of notice.
    """
    place, has_come, is_over = place_of_notice(), threading.Event(), threading.Event()

    def look() -> None:
        said = set[type]()
        while not is_over.wait(ask_s):
            try:
                if is_noticed(place):
                    say(f"{NOTICE}: {place} says that this machine will be taken")
                    has_come.set()
                    return
            except NotUnderstoodError as problem:
                kind, words = NotUnderstoodError, f"is not understood, and is no notice: {problem}"
            except (OSError, HTTPException, ValueError, RecursionError) as problem:
                kind, words = OSError, f"does not answer: {problem}"
            else:
                continue
            if kind not in said:
                say(f"{NOTICE}: {place} {words}")
            said.add(kind)

    thread = threading.Thread(target=look, daemon=True)
    if place:
        thread.start()
    try:
        yield has_come.is_set
    finally:
        is_over.set()
        if place:
            thread.join(2 * _LIMIT_S)
