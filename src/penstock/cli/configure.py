"""penstock configure: the best ways to train a transformer on machines that are not here."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli import face
from penstock.cluster.cluster import Cluster
from penstock.files import Json
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.estimate.constants import Constants
    from penstock.estimate.pool import Pooled
    from penstock.estimate.predict import Estimate
    from penstock.estimate.transformer import Transformer
    from penstock.search.transformer.found import Configuration, Configurations


def configure(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A config.json, or a name.")],
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER.toml", help="The machines.")],
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 256,
    sequence: Annotated[
        int, typer.Option(min=0, help="Tokens per sample. Default: the model's positions.")
    ] = 0,
    show: Annotated[int, typer.Option(min=1, max=32, help="How many to list.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find the best ways to train a transformer on machines that are not here.

    Of all tensor, pipe and data degrees, micro-batches, interleavings, ways of recompute and of
    sharding, those that fit are ranked by closed forms fitted on published runs, and the best are
    simulated.

    Example: penstock configure llama3-8b machines.toml --batch 512
    """
    from penstock.estimate.config import read_model
    from penstock.estimate.known import MODELS, find_model
    from penstock.estimate.shipped import load

    is_file = model.lower() not in MODELS and Path(model).exists()
    sizes = (read_model if is_file else find_model)(model, sequence=sequence)
    sizes = op_by_op(sizes)
    with face.busy("searching"):
        found = best(sizes, Cluster.load(cluster), batch, load())
    if as_json:
        face.show_json(document(sizes, found, show))
    else:
        face.show(words(model, sizes, found, show))


def op_by_op(model: "Transformer") -> "Transformer":
    """Return the model as torch runs it: between products each operator is a kernel.

    Models with a gate hand their mask to attention, as transformers writes them.
    """
    is_masked = model.gated and model.scores == "fused"
    return replace(model, is_op_by_op=True, scores="masked" if is_masked else model.scores)


class Ranked(NamedTuple):
    """What was found, with the constants of time and memory that it rests on."""

    found: "Configurations"
    batch: int
    time: "Constants"
    memory: "Constants"

    def bounds(self, made: "Configuration") -> "tuple[Estimate, Estimate]":
        """Return seconds and bytes with their intervals."""
        from penstock.estimate.predict import around

        return (
            around(made.run, made.seconds, self.time),
            around(made.run, made.peak_bytes, self.memory),
        )


def best(
    model: "Transformer", cluster: Cluster, batch: int, constants: "Sequence[Pooled]"
) -> Ranked:
    """Return the best configurations on `cluster`, of one kind of device or several.

    Raises:   ClusterError: the description is not enough for an estimate.
              PlanError: nothing fits the memory or the batch.
    """
    from penstock.search.transformer.configurations import configurations
    from penstock.search.transformer.machines import constants_for, machines_of
    from penstock.search.transformer.mixed import mixed_configurations

    there = machines_of(cluster)
    time = constants_for("time", there.pools, constants)
    memory = constants_for("memory", there.pools, constants)
    both = time, memory
    if len(there.pools) == 1:
        found = configurations(model, there.pools[0], batch=batch, constants=both)
    else:
        found = mixed_configurations(model, there, batch=batch, constants=both)
    return Ranked(found, batch, time, memory)


# -- words ----------------------------------------------------------------------------------------


def words(name: str, model: "Transformer", ranked: Ranked, show: int) -> str:
    """Return the best configurations as a table, and what they rest on."""
    found, tokens = ranked.found, ranked.batch * model.sequence
    rows: list[tuple[object, ...]] = []
    for at, made in enumerate(found.simulated[:show]):
        seconds, peak = ranked.bounds(made)
        star = "*" if made in found.front else ""
        usd = f"{made.usd:.4g}" if made.usd else "-"
        rows.append(
            (
                f"{at + 1}{star}",
                format_seconds(made.seconds),
                f"{format_seconds(seconds.low)} .. {format_seconds(seconds.high)}",
                format_bytes(round(made.peak_bytes)),
                f"{format_bytes(round(peak.low))} .. {format_bytes(round(peak.high))}",
                f"{tokens / made.seconds:,.0f}",
                usd,
                str(made).partition(":")[0],
            )
        )
    head = "", "step", "8 in 10", "memory", "8 in 10", "tokens/s", "usd", "how"
    size = f"{model.parameters / 1e9:.3g} billion parameters, {model.sequence} tokens a sample"
    lines = [f"{name}: {size}, {ranked.batch} samples a step\n", face.table(head, rows)]
    lines.append("\n* no simulated one is better in seconds, bytes and dollars at once")
    lines.append(f"of {found.candidates:,} candidates")
    lines += [f"  {count:,} {reason}" for reason, count in found.rejected]
    return "\n".join([*lines, *_rests_on(ranked)])


def _rests_on(ranked: Ranked) -> list[str]:
    """Return a line for time and one for memory: what they rest on, and how far that is."""
    lines: list[str] = []
    estimates = ranked.bounds(ranked.found.best)
    for item, estimate in zip((ranked.time, ranked.memory), estimates, strict=True):
        far = ", ".join(estimate.outside)
        words = f"; here it extrapolates in {far}" if far else ""
        lines.append(f"{item.quantity}: rests on {estimate.rests_on} ({item.cluster}){words}")
    return lines


def document(model: "Transformer", ranked: Ranked, show: int) -> dict[str, Json]:
    """Return what `words` shows."""
    found = ranked.found
    return {
        "parameters": model.parameters,
        "candidates": found.candidates,
        "rejected": dict(found.rejected),
        "configurations": [
            _row(ranked, made, made in found.front) for made in found.simulated[:show]
        ],
    }


def _row(ranked: Ranked, made: "Configuration", on_front: bool) -> dict[str, Json]:
    run, (seconds, peak) = made.run, ranked.bounds(made)
    return {
        "seconds": {"value": made.seconds, "low": seconds.low, "high": seconds.high},
        "peak_bytes": {"value": made.peak_bytes, "low": peak.low, "high": peak.high},
        "usd": made.usd,
        "on_front": on_front,
        "schedule": made.schedule,
        "tensor": run.tensor,
        "data": run.data,
        "stages": list(run.stage_blocks),
        "devices": [device.name for device in run.devices],
        "micro_batch": run.micro_batch,
        "num_micro_batches": run.num_micro_batches,
        "interleave": run.interleave,
        "recompute": run.recompute,
        "sharding": run.sharding,
        "sequence_parallel": run.sequence_parallel,
        "extrapolates": list(seconds.outside),
    }
