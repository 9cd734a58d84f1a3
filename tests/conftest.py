"""What all tests share: one thread, no downloads, the same random examples every time."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch are imported: they read it once
os.environ["HF_HUB_OFFLINE"] = "1"

import gc
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import settings

from tests import huge_pages

# `pytest --hypothesis-profile default` looks for new counterexamples instead, `make soak` for many.
settings.register_profile("penstock", derandomize=True, deadline=None, max_examples=10)
settings.register_profile("soak", max_examples=2000, deadline=None)
settings.load_profile("penstock")

# A shell starts what stands before its `&` so that Ctrl-C is ignored, by the children too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_read_yet() -> None:
    """Let no test begin with what the jobs of others have read: a process has one job as a rule."""
    outside = sys.modules.get("penstock.examine.surroundings")
    if outside is not None:
        outside.NOTES.values, outside.NOTES.lines, outside.NOTES._own = {}, {}, set()


@pytest.fixture(scope="module", autouse=True)
def _set_apart() -> None:
    """Let the collector of garbage, here and in forks, leave out what stays: all that is loaded."""
    alive = sys.modules.get("penstock.examine.alive")
    gc.collect()
    if alive is not None:
        alive.set_apart()
    else:
        gc.freeze()
    huge_pages.collapse()


class _Backwards:
    """Reads the files of each folder from the last to the first, for every second process.

    What the first time takes longest - rewriting asserts, compiling loops - each of two processes
    then does for half of them, and finds the other half done.
    """

    def __init__(self) -> None:
        self.tops: list[pytest.Item | pytest.Collector] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if isinstance(collector, pytest.Session):
            self.tops = report.result or []
        elif isinstance(collector, pytest.Directory) and report.result:
            report.result.reverse()
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the items into the order that they have in other processes."""
        tops = {top: at for at, top in enumerate(self.tops)}
        files = [list(of) for _, of in groupby(items, lambda item: item.getparent(pytest.Module))]
        files.reverse()
        files.sort(key=lambda of: next(tops[one] for one in of[0].listchain() if one in tops))
        items[:] = [item for of in files for item in of]


def pytest_configure(config: pytest.Config) -> None:
    """Let two processes that read all files meet in the middle."""
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        config.pluginmanager.register(_Backwards())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector of garbage rest while all files are read: what they hold stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but one in n cases of a sampled test as long; of a grid not always one column."""
    counts = Counter[str]()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None:
            continue
        name, n = item.nodeid.partition("[")[0], sampled.args[0]
        place = counts[name]
        counts[name] += 1
        if (place + place // n) % n:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let a process that shares the tests with others look like one that runs them all."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        sys.modules["__main__"].__file__ = str(Path(pytest.__file__))
        tempfile.tempdir = os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tmp"))


@pytest.fixture(scope="session", autouse=True)
def _gives_back() -> Iterator[None]:
    """Let the process that forks the ranks of all tests stay small: what it holds, forks copy."""
    from penstock.members import member
    from penstock.profile import measure
    from penstock.runtime import eager, worker

    with pytest.MonkeyPatch.context() as patched:
        for module in (measure, eager, worker, member):
            patched.setattr(module, "keep_freed_memory", lambda: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _hurries() -> Iterator[None]:
    """Let what works beside the steps have its share of a machine that other tests keep busy."""
    from penstock.prove import audit
    from penstock.training import mirror

    with pytest.MonkeyPatch.context() as patched:
        for module in (audit, mirror):
            patched.setattr(module, "_NICE", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _measures_briefly() -> Iterator[None]:
    """Let few runs do: what is tested is what becomes of seconds, not how sure they are.

    The link of this machine, which is one for all tests, is measured once.
    """
    from penstock.gauge import links
    from penstock.profile import measure

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(links, "measure_link", cache(links.measure_link))
        for module in (measure, links):
            patched.setattr(module, "_BUDGET_S", 0.02)
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiles_early() -> Iterator[None]:
    """Let loops be compiled for a quarter of the price: the tests together run them for long."""
    from penstock.schedule import as_python

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(as_python, "BYTE_S", as_python.BYTE_S / 4)
        yield


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of a Chromium for tests that look at a page; without one they skip."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    return path
