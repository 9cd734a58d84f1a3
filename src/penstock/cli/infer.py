"""penstock infer: a forward pipeline over unlike devices, and a stream of batches through it."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.choose import device_kinds, prepare
from penstock.cli import face
from penstock.cli.of_flags import of_flags
from penstock.cluster.cluster import Cluster
from penstock.cluster.order import placed
from penstock.errors import ClusterError, RunError
from penstock.files import Json
from penstock.job import Job, load_job
from penstock.search.inference import Streamed, best_stream, even_stream
from penstock.training import view
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.graph.trace import Capture
    from penstock.profile.profile import Profile
    from penstock.runtime.infer import Inferred

_COMPARED = 2  # batches of which what the pipeline returns is compared with the plain model
_WINDOW = 8  # batches at most
_NEAR, _NEAR_IN_LOW_PRECISION = 1e-5, 2e-2  # relative; rounding in another order


class InferFlags(NamedTuple):
    """Of what, on which machines, and what is kept."""

    job: Annotated[str, typer.Argument(metavar="JOB", help="A file.py[:name] or module[:name].")]
    cluster: Annotated[
        Path | None, typer.Option(help="Machines (TOML); default: this machine.")
    ] = None
    ranks: Annotated[int | None, typer.Option(min=1, help="At most so many ranks.")] = None
    batches: Annotated[int, typer.Option(min=1, help="Micro-batches of the job's data.")] = 32
    weights: Annotated[
        Path | None, typer.Option(help="Folder of a run; default: the initial weights.")
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Folder for what the model returns (safetensors).")
    ] = None
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Sleep for the seconds of each device instead.")
    ] = False
    compare: Annotated[
        bool, typer.Option("--compare", help="Run an even split too, and show both.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@of_flags
def infer(flags: InferFlags) -> None:
    """Find the fastest forward pipeline, run batches through it, and keep what the model returns.

    Example: penstock infer examples/gpt.py --ranks 2 --batches 64 --out outputs
    """
    if flags.out is not None:
        face.check_place(flags.out / "00000000.safetensors")
    with face.only_results():
        asked = _asked(load_job(flags.job), flags.cluster, flags.ranks, flags.weights)
        _check_machines(asked.cluster, flags.cluster, rehearse=flags.rehearse)
        found = best_stream(asked.captured.graph, asked.profiles, asked.cluster, most=flags.ranks)
        even = even_stream(
            asked.captured.graph, asked.profiles, asked.cluster, found.plan.num_ranks
        )
        folder = None if flags.rehearse else flags.out
        ran = _run(asked, found, flags.batches, folder, rehearse=flags.rehearse)
        second = None
        if flags.compare:
            second = _run(asked, even, flags.batches, None, rehearse=flags.rehearse)[0]
    document = _document(asked, found, even, (*ran, second))
    if flags.as_json:
        face.show_json(document)
    else:
        _show(found, document)
    if flags.out is not None and not flags.rehearse:
        face.say(f"wrote {flags.batches} files to {flags.out}")
    if document["ok"] is False:
        raise RunError(
            str(document["outputs"]), hint="report this: no plan may change what it runs"
        )


class _InferenceCase(NamedTuple):
    """A job for inference, its trace, the machines, and profiles for their devices."""

    job: Job
    captured: "Capture"
    cluster: Cluster
    profiles: "tuple[Profile, ...]"


def _asked(
    job: Job, cluster: Path | None, ranks: int | None, weights: Path | None
) -> _InferenceCase:
    with face.loading():
        from penstock.device import here
        from penstock.runtime.infer import inference_job
        from penstock.training.export import load_weights

    made = inference_job(job)
    if weights is not None:
        made = inference_job(job, lambda model: load_weights(model, weights))
    captured = prepare.traced(made, view.TERMINAL)
    alone = cluster is None and ranks is None and not here().can_fork  # it starts no other process
    there = prepare.machines(cluster, 1 if alone else ranks, view.TERMINAL)
    return _InferenceCase(
        made, captured, there, device_kinds.profiled(captured, made, there, view.TERMINAL)
    )


def _check_machines(there: Cluster, path: Path | None, *, rehearse: bool) -> None:
    """Raise where a pipeline is to run on other machines than this one.

    Raises:   ClusterError: several hosts, and no rehearsal.
    """
    if not rehearse and len(there.hosts) > 1:
        hint = "add --rehearse: ranks sleep for the seconds of those devices"
        raise ClusterError(f"{path} has {len(there.hosts)} hosts; here is one", hint=hint)


def _run(
    asked: _InferenceCase, found: Streamed, batches: int, out: Path | None, *, rehearse: bool
) -> "tuple[Inferred, float, bool]":
    """Run the stream; return what it gave, how far from the plain model, whether to the bit."""

    from penstock.plan.lower_plan import lower_plan, stages_of
    from penstock.profile.kinds import places_of
    from penstock.runtime.infer import BatchStream, apart, stream
    from penstock.runtime.launch import local_launcher

    size = max(k for k in range(1, _WINDOW + 1) if batches % k == 0)
    graph, plan = asked.captured.graph, found.plan.changed(num_micro_batches=size)
    places = places_of(asked.profiles, placed(asked.cluster, plan.place.hosts), plan.num_ranks)
    sleeps = tuple(asked.profiles[place] for place in places) if rehearse else ()
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name) if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        compared = 0 if rehearse else min(_COMPARED, batches)
        what = BatchStream(
            asked.captured,
            stages_of(plan, graph),
            asked.job,
            lower_plan(plan, graph),
            batches,
            folder,
            compared if out is None else batches,
            sleeps,
        )
        with face.busy(f"running {batches} batches"):
            gave = stream(what, local_launcher(plan.num_ranks))
        with face.busy("comparing with the plain model"):
            return gave, *apart(asked.job, folder, compared)


def _document(
    asked: _InferenceCase,
    found: Streamed,
    even: Streamed,
    ran: "tuple[Inferred, float, bool, Inferred | None]",
) -> dict[str, Json]:
    from penstock.runtime.infer import returns

    gave, far, same, second = ran
    samples, rehearsed = asked.captured.graph.samples, gave.loss is None
    near = _NEAR if asked.job.precision is asked.job.autocast is None else _NEAR_IN_LOW_PRECISION
    words = "equal to the plain model's" if same else f"{far:.1e} from the plain model's"
    return {
        "ok": None if rehearsed else same or far <= near,
        "plan": found.plan.to_json(),
        "returns": list(returns(asked.captured)),
        "outputs": "not computed: rehearsed" if rehearsed else words,
        "loss": gave.loss,
        "batches_per_second_predicted": 1 / found.period_s,
        "batches_per_second_measured": 1 / gave.period_s,
        "samples_per_second_measured": samples / gave.period_s,
        "even_batches_per_second_predicted": 1 / even.period_s,
        "even_batches_per_second_measured": None if second is None else 1 / second.period_s,
        "peak_bytes_predicted": list(found.peak_bytes),
    }


def _show(found: Streamed, document: dict[str, Json]) -> None:
    face.show(str(found.plan))
    names = [("this", ""), ("an even split", "even_")]
    rows: list[tuple[object, ...]] = []
    for name, prefix in names:
        told = [document[f"{prefix}batches_per_second_{how}"] for how in ("predicted", "measured")]
        shown = [f"{each:.4g}" if isinstance(each, float) else "not run" for each in told]
        rows.append((name, *shown))
    face.show(face.table(("batches a second", "predicted", "measured"), rows))
    between = format_seconds(found.period_s)
    face.show(f"predicted: {between} between two batches; outputs: {document['outputs']}")
    if isinstance(loss := document["loss"], float):
        face.show(f"mean loss: {loss:.6g}")
