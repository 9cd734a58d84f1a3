"""Mirror: a run's folder kept at a URL too, by a process beside the run.  No torch.

Whenever a checkpoint is complete it is copied to any place that fsspec knows, state.json last, so
that what is there with it is whole; then the other files of the run; what `keep` does not keep is
removed there.  `resume` brings back what is newer there than in the folder.  So a run goes on
from another machine, whose disk has nothing of it.

The process is told of nothing: it looks at the folder, whatever process of the run writes it.  It
ends once nobody that it serves is left, after it has copied what is there.  Each rank that joins
has one too, which waits for its turn: whoever began the run may be gone.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import fsspec  # pyright: ignore[reportMissingTypeStubs]

import penstock
from penstock.checkpoints import folders
from penstock.checkpoints.folders import Keep
from penstock.errors import CheckpointError, PlanError
from penstock.files import write_bytes, write_text
from penstock.listener import Listener
from penstock.typed import typed

MIRROR = "mirror.json"
_PRIVATE = {MIRROR, "elastic.json"}  # of the top folder: a token is for nobody else
_NICE = 10
_LOOK_S = 0.5  # between looks whether there is a new checkpoint
_AGAIN_S = 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0  # after which what failed is tried again
_LAST_TRIES = 3


class MirrorPlace(NamedTuple):
    """Where a mirror is: a file system of fsspec, and a path there."""

    files: Any
    root: str
    url: str

    def path(self, *names: str) -> str:
        """Return the path of a file or folder there."""
        return "/".join([self.root.rstrip("/"), *names])

    def names(self, *names: str) -> list[str]:
        """Return what a folder there holds, by name."""
        path = self.path(*names)
        self.files.invalidate_cache()
        with suppress(FileNotFoundError, NotADirectoryError):
            found = self.files.ls(path, detail=False)
            return sorted({str(each).rstrip("/").rpartition("/")[2] for each in found})
        return []

    def text(self, *names: str) -> str | None:
        """Return the content of a file there; None: there is none."""
        with suppress(FileNotFoundError):
            return bytes(self.files.cat_file(self.path(*names))).decode()
        return None

    def put(self, file: Path, *names: str) -> None:
        """Copy a file there, under another name first."""
        path = self.path(*names)
        self.files.put_file(str(file), f"{path}.part")
        self.files.mv(f"{path}.part", path)

    def remove(self, *names: str) -> None:
        """Remove a folder there."""
        with suppress(FileNotFoundError):
            self.files.rm(self.path(*names), recursive=True)

    def steps(self) -> dict[int, str]:
        """Return the text of state.json of each complete checkpoint there, by its step."""
        found: dict[int, str] = {}
        for name in self.names("checkpoints"):
            number = name.removeprefix("step-")
            if name != number and number.isdecimal():
                text = self.text("checkpoints", name, "state.json")
                if text is not None:
                    found[int(number)] = text
        return dict(sorted(found.items()))


def place_of(url: str) -> MirrorPlace:
    """Return where a mirror is.

    Raises:   PlanError: no file system of fsspec is named so, or its package is missing.
    """
    try:
        files, root = cast("Any", fsspec).url_to_fs(url)
    except (ImportError, ValueError, OSError) as problem:
        hint = "write s3://BUCKET/PATH, gs://BUCKET/PATH, sftp://HOST/PATH, file:///PATH or another"
        raise PlanError(f"out is {url}: {problem}", hint=f"{hint} of fsspec") from problem
    return MirrorPlace(files, root, url)


# -- what the process does ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mirrored:
    """What mirror.json tells: the step of the newest checkpoint at the URL.

    problem:  why the next one is not there yet; empty where it is.
    """

    url: str
    step: int = -1
    seconds: float = 0.0
    problem: str = ""


def copied(folder: Path, place: MirrorPlace, keep: Keep) -> int:
    """Copy what is new in a run's folder to a place; return the step of its newest checkpoint.

    -1: there is none.
    """
    checkpoints = folder / "checkpoints"
    place.files.makedirs(place.root, exist_ok=True)
    there, step = place.steps(), -1
    for name in place.names("checkpoints"):
        if name.startswith("step-") and name not in map(_name_of, there):  # left half-way
            place.remove("checkpoints", name)
    own = folders.steps_in(checkpoints)
    for each in (one for one in own if one not in keep.goes(own)):
        with _held(folders.folder_of(checkpoints, each)) as held:
            if held is not None:
                step = each
                if there.get(step) != (held / "state.json").read_text():
                    _put_folder(held, place, _name_of(step))
    if step >= 0:
        newer = {other for other in there if other > step}  # of what this run did not go on with
        for other in (*newer, *keep.goes(sorted({step, *own, *there} - newer))):
            place.remove("checkpoints", _name_of(other))
    _copy_best(checkpoints, place)
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name not in _PRIVATE and not file.name.startswith("."):
            place.put(file, file.name)
    return step


def _name_of(step: int) -> str:
    return f"step-{step:06d}"


@contextmanager
def _held(checkpoint: Path) -> Generator[Path | None]:
    """Give a checkpoint's files in a folder that the run does not remove; None: it just has."""
    own = checkpoint.with_name(".mirror")
    is_there = True
    try:
        _link_folder(checkpoint, own)
    except FileNotFoundError:
        is_there = False
    try:
        yield own if is_there else None
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _link_folder(folder: Path, own: Path) -> None:
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    for file in folder.iterdir():
        folders.link(str(file), str(own / file.name))


def _put_folder(own: Path, place: MirrorPlace, name: str) -> None:
    """Copy a checkpoint: state.json last, so that it is complete."""
    place.remove("checkpoints", name)
    place.files.makedirs(place.path("checkpoints", name), exist_ok=True)
    for file in sorted(own.iterdir(), key=lambda file: file.name == "state.json"):
        place.put(file, "checkpoints", name, file.name)


def _copy_best(checkpoints: Path, place: MirrorPlace) -> None:
    own, best = checkpoints / ".mirror", checkpoints / "best"
    with suppress(FileNotFoundError):  # it has just been replaced: the next time
        if place.text("checkpoints", "best", "best.json") != (best / "best.json").read_text():
            try:
                _link_folder(best, own)
                _put_folder(own, place, "best")
            finally:
                shutil.rmtree(own, ignore_errors=True)


def serve(folder: Path, place: MirrorPlace, keep: Keep) -> Mirrored:
    """Copy each new checkpoint until stdin ends, and what is there then; say what does not go.

    While another process does that for the run, nothing.
    """
    with closing(MirrorTurn(folder)) as turn:
        return _served(folder, place, keep, turn)


def _served(folder: Path, place: MirrorPlace, keep: Keep, turn: "MirrorTurn") -> Mirrored:
    told, known = Mirrored(place.url), ""
    waits_s, due_s, tries = iter(_AGAIN_S), 0.0, 0
    while True:
        is_last = bool(select.select([sys.stdin], [], [], _LOOK_S)[0])
        if not turn.has_come():
            if is_last:
                return told
            continue
        newest = folders.latest(folder / "checkpoints")
        now = "" if newest is None else _text(newest / "state.json")
        if is_last or (now != known and time.monotonic() >= due_s):
            told = _tried(folder, place, keep, told)
            if told.problem:
                tries += 1
                wait_s = next(waits_s, _AGAIN_S[-1])
                due_s = time.monotonic() + wait_s
            else:
                known, waits_s, tries = now, iter(_AGAIN_S), 0
            write_text(folder / MIRROR, json.dumps(asdict(told)) + "\n")
            if is_last and (not told.problem or tries >= _LAST_TRIES):
                return told
            if is_last:
                time.sleep(max(0.0, due_s - time.monotonic()))


class MirrorTurn:
    """Whether this process is the one that copies a run's folder, for as long as it lives."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / ".mirror-lock").open("w")
        self._is_mine = False

    def has_come(self) -> bool:
        """Return whether no other one copies."""
        if not self._is_mine:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_mine = True
        return self._is_mine

    def close(self) -> None:
        """Let another one copy."""
        self._file.close()


def _text(path: Path) -> str:
    with suppress(FileNotFoundError):  # it has just been removed
        return path.read_text()
    return ""


def _tried(folder: Path, place: MirrorPlace, keep: Keep, before: Mirrored) -> Mirrored:
    start = time.monotonic()
    try:
        step = copied(folder, place, keep)
    except Exception as problem:  # noqa: BLE001 - of any file system there is
        words = f"{type(problem).__name__}: {problem}"
        if not before.problem:
            sys.stderr.write(f"warning: no copy to {place.url} for now: {words}\n")
        return Mirrored(place.url, before.step, 0.0, words)
    return Mirrored(place.url, step, time.monotonic() - start)


# -- what a run does ------------------------------------------------------------------------------


@contextmanager
def mirroring(
    url: str, folder: Path, keep: Keep, listener: Listener, *, resume: bool
) -> Generator[None]:
    """Keep a run's folder at a URL while it is trained; first bring back what is newer there.

    Raises:   PlanError: the URL is none, or holds another run.
              CheckpointError: it cannot be read; at the end, it lacks what the folder has.
    """
    if not url:
        yield
        return
    place = place_of(url)
    _check_place(place, folder)
    with _reading(url):
        place.files.makedirs(place.root, exist_ok=True)
        if resume:
            fetched(place, folder, listener.say)
        elif place.steps():
            hint = "resume=True goes on with it; or give another URL"
            raise PlanError(f"{url} holds a run already", hint=hint)
    process = _started(url, folder, keep)
    try:
        yield
    finally:
        with listener.busy(f"copying what is new to {url}"):
            told = _ended(process)
            if told is None:  # it was killed
                told = _tried(folder, place, keep, Mirrored(url))
    _check_copied(told, folder)


@contextmanager
def mirroring_next(url: str, folder: Path, keep: Keep, listener: Listener) -> Generator[None]:
    """Keep a run's folder at a URL while a rank that has joined lives, when nobody else does.

    Raises:   PlanError: the URL is none.
              CheckpointError: it was this rank's turn, and the URL lacks what the folder has.
    """
    if not url:
        yield
        return
    place, process = place_of(url), _started(url, folder, keep)
    try:
        yield
    finally:
        with listener.busy(f"copying what is new to {url}, unless others do"):
            told = _ended(process)
            with closing(MirrorTurn(folder)) as turn:
                if told is None and turn.has_come():  # it was killed
                    told = _tried(folder, place, keep, Mirrored(url))
    if told is not None:
        _check_copied(told, folder)


def _check_copied(told: Mirrored, folder: Path) -> None:
    """Raise where a URL lacks what the folder of a run has.

    Raises:   CheckpointError.
    """
    if told.problem:
        hint = f"the run is whole in {folder}: copy it, or free some space and give resume=True"
        raise CheckpointError(f"{told.url} lacks what is new: {told.problem}", hint=hint)


def _check_place(place: MirrorPlace, folder: Path) -> None:
    """Raise where nothing would be kept, or the folder over itself.

    Raises:   PlanError.
    """
    known = place.files.protocol
    kinds = {known} if isinstance(known, str) else {*known}
    if "memory" in kinds:
        hint = "give a URL that is there when this process has ended"
        raise PlanError(f"{place.url} keeps nothing", hint=hint)
    if "file" in kinds and Path(place.root).resolve() == folder.resolve():
        raise PlanError(f"{place.url} is the run's own folder", hint="give out the path alone")


@contextmanager
def _reading(url: str) -> Generator[None]:
    try:
        yield
    except (CheckpointError, PlanError):
        raise
    except Exception as problem:  # of any file system there is
        words = f"cannot read {url}: {type(problem).__name__}: {problem}"
        raise CheckpointError(
            words, hint="are its name and your rights to it as usual?"
        ) from problem


def fetched(place: MirrorPlace, folder: Path, say: Callable[[str], None]) -> int | None:
    """Bring back the newest checkpoint that is whole, if it is newer than what the folder has.

    With it come the best one and the other files of the run.  A damaged one gets another name.
    Return its step; None: nothing newer is there.
    say:      told what comes, and of each damaged one that it does not.
    Raises:   CheckpointError: all are damaged, and the folder has none; it is that of the newest.
    """
    checkpoints = folder / "checkpoints"
    folders.discard(checkpoints)
    own, problems = folders.latest(checkpoints), list[CheckpointError]()
    least = -1 if own is None else folders.step_of(own)
    for step in reversed([step for step in place.steps() if step > least]):
        say(f"fetching the checkpoint after step {step} from {place.url}")
        try:
            hidden = _fetched(place, checkpoints, _name_of(step))
        except CheckpointError as problem:
            say(f"{problem.message}: going back")
            problems.append(problem)
            continue
        for path in place.files.find(place.root, maxdepth=1):
            name = str(path).rpartition("/")[2]
            if name not in _PRIVATE and not name.endswith(".part"):
                write_bytes(folder / name, bytes(place.files.cat_file(path)))
        if place.text("checkpoints", "best", "best.json") and not (checkpoints / "best").exists():
            _fetched(place, checkpoints, "best").rename(checkpoints / "best")
        hidden.rename(folders.folder_of(checkpoints, step))
        return step
    if problems and own is None:
        raise problems[0]
    return None


def _fetched(place: MirrorPlace, checkpoints: Path, name: str) -> Path:
    """Bring a checkpoint into a hidden folder, which is returned.

    Raises:   CheckpointError: it is damaged; it is called so there from now on.
    """
    from penstock.checkpoints import checkpoint

    hidden = checkpoints / f".step-{name}-mirror"
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    for file in place.names("checkpoints", name):
        place.files.get_file(place.path("checkpoints", name, file), str(hidden / file))
    try:
        checkpoint.load(hidden)
    except CheckpointError as problem:
        shutil.rmtree(hidden)
        place.remove("checkpoints", f"damaged-{name}")
        bad = place.path("checkpoints", name), place.path("checkpoints", f"damaged-{name}")
        place.files.mv(*bad, recursive=True)
        told = problem.message.replace(str(hidden), place.path("checkpoints", name))
        raise CheckpointError(told, hint=f"it is kept as {bad[1]}") from problem
    return hidden


def _started(url: str, folder: Path, keep: Keep) -> "subprocess.Popen[bytes]":
    found = str(Path(penstock.__file__).parent.parent), os.environ.get("PYTHONPATH", "")
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder), url, json.dumps(asdict(keep))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
    )


def _ended(process: "subprocess.Popen[bytes]") -> Mirrored | None:
    """Return what the process tells when it has copied what is there; None: it was killed."""
    out, _ = process.communicate(b"end\n")
    if process.returncode:
        return None
    return typed(Mirrored, json.loads(out.splitlines()[-1]))


def main(arguments: Sequence[str]) -> None:
    """Be the process beside a run."""
    folder, url, keep = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends when the run does
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    told = serve(Path(folder), place_of(url), Keep(**json.loads(keep)))
    with suppress(BrokenPipeError):  # who began the run is gone
        print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # stdout may be gone
