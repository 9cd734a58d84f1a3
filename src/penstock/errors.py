"""Errors: one per noun, each with the values at fault and one hint."""

_HINT = "hint: "


class PenstockError(Exception):
    """An error that a user can act on: what is wrong, with the values, and one thing to do.

    Where Python prints it, as in a script or a notebook, the hint stands below it.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    @property
    def hint(self) -> str:
        """One thing to do, or nothing."""
        return self._hint

    @hint.setter
    def hint(self, hint: str) -> None:
        self._hint = hint
        others = [note for note in getattr(self, "__notes__", ()) if not note.startswith(_HINT)]
        self.__notes__ = [*others, *([f"{_HINT}{hint}"] if hint else [])]


class ClusterError(PenstockError):
    """An impossible cluster, or a question about a link that it lacks."""


class JobError(PenstockError):
    """A job that cannot be found, built or used."""


class ExtraError(PenstockError):
    """A package that what is asked for needs, and that is not installed."""


class StoreError(PenstockError):
    """A store that has no such objects, does not answer, or answers with something else."""


class GraphError(PenstockError):
    """A step that cannot be traced, a batch that does not fit, or a cut that does not exist."""


class BatchMisfitError(GraphError):
    """A micro-batch that is not like the one that its step was traced for."""


class ProfileError(PenstockError):
    """A profile of another graph, or one that cannot be measured."""


class EstimateError(PenstockError):
    """An impossible configuration, or a table of runs that cannot be read or fitted."""


class ScheduleError(PenstockError):
    """An order of actions that is incomplete or can never finish."""


class PlanError(PenstockError):
    """Decisions that contradict each other, the graph or the cluster."""


class MemoryShortError(PlanError):
    """No plan that was tried fits into the memory."""


class UnlikeShapesError(PlanError):
    """Steps of several shapes cannot have one division of the model."""


class UnlikeCutsError(UnlikeShapesError):
    """Steps of several shapes, or turns, cannot be cut into the same stages; as one they can."""


class ProgramError(PenstockError):
    """Instructions that would hang, mix up messages or overwrite what is still in use."""


class TimelineError(PenstockError):
    """A timeline file that cannot be read."""


class CheckpointError(PenstockError):
    """A checkpoint that is missing, damaged or from another model."""


class RunError(PenstockError):
    """A rank that failed while training."""


class RankMisfitError(RunError):
    """A rank of a plan that has read such a micro-batch."""


class AloneError(RunError):
    """A step that replicas cannot share: only one process trains as the plain loop does."""


class ReportError(PenstockError):
    """A folder that holds no run, or figures of one that cannot be read."""


class FleetError(PenstockError):
    """Figures of machines, prices or runs that cannot be, cannot be read, or are too few."""
