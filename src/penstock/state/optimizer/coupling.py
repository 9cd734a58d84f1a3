"""Coupling: whether a step of an optimizer makes one number of several parameters.

A norm over all gradients by which a step is clipped or left out, a count of signs, an estimate of
a distance: what the weights are then need not show it in the few steps of a trial, for a step that
is left out where the norm has doubled comes late.  So the ops are watched: what each value is made
of, what is written into a parameter, and what Python is shown of it.

Ignores:  numbers that Python is shown of one parameter at a time and sums up itself: of these only
          the trial tells (optimizer_trial.py).
"""

from collections.abc import Mapping

from torch import Tensor, nn

from penstock.graph.functional import line_here
from penstock.state.laws.flow import Dependencies, Names


class Mixing(Dependencies):
    """Under this mode it is noted what an optimizer makes of several of the parameters `kept`.

    shown:  of how many of them a number was made that Python has seen, and at which line.
    """

    def __init__(self, kept: Mapping[str, nn.Parameter]) -> None:
        super().__init__(kept)
        self.kept = kept
        self.shown = ""

    def given(self, gradients: Mapping[str, Tensor]) -> None:
        """Note whose these gradients are."""
        for name, gradient in gradients.items():
            self.note(gradient, frozenset((name,)))

    def saw(self, names: Names) -> None:
        """Note a number that Python has seen; what it does then with that is its own affair."""
        if len(names) > 1 and not self.shown:
            self.shown = f"a number of {_listed(names)} together is read at {line_here()}"

    def words(self) -> str | None:
        """Return what is made of several parameters; None: nothing is."""
        if self.shown:
            return self.shown
        for name, parameter in self.kept.items():
            if others := self.of(parameter) - {name}:
                return f"{name} depends on {_listed(others)}"
        return None


def _listed(names: Names) -> str:
    first, *more = sorted(names)
    return f"{first} and {len(more)} more" if more else first
