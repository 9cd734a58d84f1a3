"""Noisy: a pytest plugin that plays a machine which is slower, faster, busy or late, by chance.

NOISY in the environment is the seed.  Seconds that are measured are multiplied, by a factor of the
machine and one of each of them; forks, threads and reads begin up to 30 ms late.  What fails is a
fault of the product, or asserts what a machine decides:  NOISY=1 pytest -p tests.noisy tests/pilot
"""

import os
import random
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

_SEED = os.environ.get("NOISY", "0")
_MOST_S = 0.03
_SECONDS = (
    "call_s",
    "accumulate_s_per_byte",
    "update_s_per_byte",
    "update_s",
    "copy_s_per_byte",
    "far_s_per_byte",
    "far_s",
)
_machine = random.Random(f"machine {_SEED}")
_SPEED, _LINK = _machine.choice((0.1, 1.0, 10.0)), 10 ** _machine.uniform(-1.0, 1.0)
_chance = random.Random(_SEED)
_sleep = time.sleep  # tests may replace it


def _factor(sigma: float = 0.4) -> float:
    return _chance.lognormvariate(0.0, sigma)


def _late(share: float) -> None:
    if _chance.random() < share:
        _sleep(_chance.random() * _MOST_S)


def _late_in_child() -> None:
    _chance.seed(f"{_SEED} {os.getpid()}")
    _late(0.7)


def _noisy_profile(profile: Any) -> Any:
    noisy = replace(profile, op_s=tuple(s * _SPEED * _factor() for s in profile.op_s))
    for part in (None, "update", "copying"):
        of = noisy if part is None else getattr(noisy, part)
        names = [name for name in _SECONDS if hasattr(of, name)]
        of = replace(of, **{name: getattr(of, name) * _SPEED * _factor() for name in names})
        noisy = of if part is None else replace(noisy, **{part: of})
    return noisy


def _noisy_link(link: Any) -> Any:
    return replace(
        link,
        latency_s=link.latency_s * _LINK * _factor(),
        overhead_s=link.overhead_s * _LINK * _factor(),
        bytes_per_s=link.bytes_per_s / _LINK * _factor(),
        copy_bytes_per_s=link.copy_bytes_per_s / _LINK * _factor(),
    )


def _measures() -> None:
    from penstock.choose import trial
    from penstock.gauge import links
    from penstock.profile import measure

    measured, linked, tried = measure.measure, links.measure_link, trial.seconds_of
    measure.measure = lambda *given, **more: _noisy_profile(measured(*given, **more))
    links.measure_link = lambda: _noisy_link(linked())
    trial.seconds_of = lambda *given: [s * _SPEED * _factor() for s in tried(*given)]


def _is_late() -> None:
    os.register_at_fork(after_in_child=_late_in_child, after_in_parent=lambda: _late(0.7))
    run, shares = threading.Thread.run, {"recv": 0.1, "accept": 0.5, "connect": 0.5}

    def begun(thread: threading.Thread) -> None:
        _late(0.7)
        run(thread)

    threading.Thread.run = begun  # type: ignore[method-assign]
    for name, share in shares.items():
        setattr(socket.socket, name, _begun_late(getattr(socket.socket, name), share))


def _begun_late(call: Any, share: float) -> Any:
    def late(*given: Any, **more: Any) -> Any:
        _late(share)
        return call(*given, **more)

    return late


def pytest_configure(config: pytest.Config) -> None:
    """Let all that is measured from now on be noisy, and all that begins be late."""
    _measures()
    _is_late()
