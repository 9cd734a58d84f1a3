"""Answers: questions of a step about a batch's values, which each batch has to answer alike.

A model that branches on `lengths.max().item() > self.longest`, or asserts that a mask is not empty,
can be traced for the answers that the first micro-batch gives.  Other answers mean another step:
so the ops that lead to them run on every batch beforehand, and a batch that answers otherwise does
not fit, as one of another shape does not.

Costs:   these ops for every micro-batch, outside the plan; nothing where nothing is asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.errors import BatchMisfitError
from penstock.graph.functional import line_here


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """The questions about the values of a batch, and the answers of the first one.

    places:   the leaves that are looked at.
    ask:      returns the answers, of these leaves.
    lines:    where each is asked.
    times:    micro-batches that a batch is made of, along the first dim of its tensors.
    """

    places: tuple[int, ...]
    ask: fx.GraphModule
    given: tuple[Any, ...]
    lines: tuple[str, ...]
    times: int = 1

    def check(self, leaves: Sequence[Any]) -> None:
        """Raise for a batch that answers otherwise.

        Raises:   BatchMisfitError: the message names the line that asks.
        """
        given = [leaves[place] for place in self.places]
        apart = [leaf.chunk(self.times) if leaf.dim() else (leaf,) * self.times for leaf in given]
        for part in zip(*apart, strict=True):
            with torch.no_grad():
                found = self.ask(*part)
            for line, new, old in zip(self.lines, found, self.given, strict=True):
                if new != old:
                    message = f"{line}: this batch gives {new}, the step was traced for {old}"
                    hint = "give eager=True, or let it not depend on the values of a batch"
                    raise BatchMisfitError(message, hint=hint)

    def __str__(self) -> str:
        return ", ".join(map(str, self.given))


class Questions:
    """Notes the questions that are asked while a step is recorded.

    leaves:  of the inputs of the step those of the batch, and which leaf each is.
    """

    def __init__(self, leaves: Mapping[int, int]) -> None:
        self.leaves = leaves
        self.graph, self.root = fx.Graph(), dict[str, Any]()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.places: list[int] = []
        self.asked: list[tuple[fx.Node, Any, str]] = []

    def note(
        self, func: Any, args: Sequence[Any], nodes: Mapping[fx.Node, int], answer: Any
    ) -> None:
        """Note the present result of `func` of `args`.

        nodes:  what leads to it in its order, and the number of each as an input of the step.
        """
        for node, number in nodes.items():
            if node not in self.copies:
                self.copies[node] = self._copied(node, number)
        given = _compat.pytree.tree_map_only(Tensor, self._of, tuple(args))
        self.asked.append((self.graph.call_function(func, given), answer, line_here()))

    def _of(self, tensor: Tensor) -> fx.Node:
        node = _compat.node_of(tensor)
        assert node is not None, "its value was computed by its node"
        return self.copies[node]

    def _copied(self, node: fx.Node, number: int) -> fx.Node:
        if node.op == "placeholder":
            self.places.append(self.leaves[number])
            before = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            with self.graph.inserting_before(before):
                return self.graph.placeholder(f"leaf_{len(self.places)}")
        if node.op == "get_attr":
            name = f"constant_{len(self.root)}"
            self.root[name] = _compat.traced_constant(node)
            return self.graph.get_attr(name)
        return self.graph.node_copy(node, self.copies.__getitem__)

    def answers(self) -> Answers | None:
        """Return all questions with their answers; None: nothing was asked."""
        if not self.asked:
            return None
        self.graph.output(tuple(node for node, _, _ in self.asked))
        return Answers(
            places=tuple(self.places),
            ask=fx.GraphModule(self.root, self.graph),
            given=tuple(answer for _, answer, _ in self.asked),
            lines=tuple(line for _, _, line in self.asked),
        )
