"""Notice: word that this machine will be taken soon, from a file or a URL.

PENSTOCK_NOTICE names it, for each host by itself.  Of a file it is notice that it is there.  Of a
URL it is that it answers, and not with nothing, "FALSE", "NONE", or JSON without "Events": so the
clouds' own addresses can be given as they are:

AWS     http://169.254.169.254/latest/meta-data/spot/instance-action
Google  http://metadata.google.internal/computeMetadata/v1/instance/preempted
Azure   http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01

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
from urllib.parse import urlsplit

from penstock.errors import RunError

NOTICE = "PENSTOCK_NOTICE"
_ASK_S, _LIMIT_S = 2.0, 2.0  # between two questions, and for an answer
_OK, _ASKS_FOR_TOKEN, _NOTHING = 200, 401, 404
_MOST_BYTES = 65536
_NONE = {"", "false", "none", "null"}
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
    """
    if "://" not in place:
        return Path(place).exists()
    told = _answer(place, {})
    if told.status == _ASKS_FOR_TOKEN:
        told = _answer(place, {_TOKEN: _token(place)})
    return told.status == _OK and _says(told.text)


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


def _says(answer: str) -> bool:
    try:
        told: object = json.loads(answer)
    except ValueError:
        return answer.strip().lower() not in _NONE
    if isinstance(told, dict) and "Events" in told:
        return bool(cast("dict[str, object]", told)["Events"])
    return answer.strip().lower() not in _NONE


# Metadata is asked of the host itself, not of a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def looking(say: Callable[[str], None], ask_s: float = _ASK_S) -> Generator[Callable[[], bool]]:
    """Look for notice while this lasts; give a function that tells whether there has been any.

    say:      told once that nobody answers.
    """
    place, has_come, is_over = place_of_notice(), threading.Event(), threading.Event()

    def look() -> None:
        is_silent = False
        while not is_over.wait(ask_s):
            try:
                if is_noticed(place):
                    has_come.set()
                    return
            except (OSError, HTTPException, ValueError, RecursionError) as problem:
                if not is_silent:
                    say(f"{NOTICE}: {place} does not answer: {problem}")
                is_silent = True

    thread = threading.Thread(target=look, daemon=True)
    if place:
        thread.start()
    try:
        yield has_come.is_set
    finally:
        is_over.set()
        if place:
            thread.join(2 * _LIMIT_S)
