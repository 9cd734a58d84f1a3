"""Lowering: programs of schedules, with what their stages and ends are told by name."""

from dataclasses import fields

from penstock.program.edges import StageGraph
from penstock.program.lower import chain
from penstock.program.lower import lower_schedule as lowered
from penstock.program.step_end import StepEnd
from penstock.schedule.orders import F

_GRAPH, _END = ({field.name for field in fields(kind)} for kind in (StageGraph, StepEnd))


def lower_schedule(schedule, **options):
    """Return its program; options are those of `lower_schedule`, of a StageGraph and a StepEnd."""
    many = schedule if isinstance(schedule, list | tuple) else [schedule]
    graph, end = parted(options)
    if graph and many and "edges" not in graph:
        largest = max(many, key=lambda each: each.num_micro_batches)
        backward = bool((largest.orders.kinds != F).any())
        graph["edges"] = chain(largest.num_stages, backward=backward)
    whole = StageGraph(**graph) if graph else None
    return lowered(schedule, whole, StepEnd(**end), **options)


def parted(options):
    """Return the fields of a StageGraph and those of a StepEnd, taken out of `options`."""
    graph = {name: options.pop(name) for name in _GRAPH & options.keys()}
    graph = {name: tuple(value) for name, value in graph.items() if value is not None}
    return graph, {name: options.pop(name) for name in _END & options.keys()}
