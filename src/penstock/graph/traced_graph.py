"""Traced: a Graph that still knows the job it was traced from, for whoever measures it next."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import GraphError
from penstock.graph.graph import Graph
from penstock.job import Job

if TYPE_CHECKING:
    from penstock.graph.trace import Capture


@dataclass(frozen=True, repr=False)  # prints itself as any graph
class Traced(Graph):
    """A graph with its job, and with what torch needs to run it.  A saved one is a plain Graph."""

    job: Job = field(compare=False, repr=False)
    capture: "Capture" = field(compare=False, repr=False)


def trace(job: Job, *, elsewhere: bool = False) -> Traced:
    """Return the graph of one training step of `job` on its first micro-batch.

    elsewhere:  whether it is for machines that are not here.  The model is then built without
                values (hollow.py) and takes no memory; the graph is the same.
    Raises:   GraphError: the model cannot be traced; the message names the line.
    """
    from penstock.graph.hollow import hollow
    from penstock.graph.trace import capture

    return captured_as(capture(hollow(job) if elsewhere else job), job)


def captured_as(captured: "Capture", job: Job) -> Traced:
    """Return the graph of a captured step, with its job."""
    columns = {name: getattr(captured.graph, name) for name in Graph.__dataclass_fields__}
    return Traced(**columns, job=job, capture=captured)


def capture_of(graph: Graph, job: Job | None, *, values: bool = True) -> "tuple[Capture, Job]":
    """Return the capture behind `graph` and its job: those that it knows, or `job` traced again.

    values:   whether the model must have them; without, the job of one that has none has none.
    Raises:   GraphError: neither is there, or `job` traces to another graph.
    """
    from penstock.graph.hollow import hollow
    from penstock.graph.split import split
    from penstock.graph.tensor.by_tokens import by_tokens
    from penstock.graph.tensor.choose_slices import by_tensor
    from penstock.graph.trace import capture
    from penstock.graph.waiting import is_hollow

    if isinstance(graph, Traced) and job in (None, graph.job):
        job, bare = graph.job, is_hollow(graph.capture.model)
        if not (bare and values):
            return graph.capture, hollow(job) if bare else job
    if job is None:
        hint = "give the job too, or the graph that `trace` returned"
        raise GraphError(f"graph {graph.digest} does not know its job", hint=hint)
    captured = split(capture(job), dict(graph.slices))
    captured = (by_tokens if graph.context else by_tensor)(captured, graph.tensor)
    if captured.graph.digest != graph.digest:
        message = f"the job traces to graph {captured.graph.digest}, not to {graph.digest}"
        raise GraphError(message, hint="trace this job, and plan again")
    return captured, job
