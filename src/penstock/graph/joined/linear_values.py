"""Linear: the values of a step of which nothing but gradients come, by linear ops.

The sum of such a value over micro-batches gives the sum of the gradients: it may be made at once.
"""

import operator
from collections.abc import Set as AbstractSet

from torch import fx

from penstock.graph.dims import aten
from penstock.graph.functional import results_of
from penstock.graph.trace import Capture

_OF_ONE = (  # of one value, and of nothing else
    operator.getitem,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.slice_backward.default,
    aten.select_backward.default,
    aten.clone.default,
    aten.neg.default,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten._to_copy.default,
    aten.sum.dim_IntList,
    aten.sum.default,
    aten.mean.default,
    aten.mean.dim,
)
_SUMS = aten.add.Tensor, aten.sub.Tensor
_PRODUCTS = aten.mul.Tensor, aten.mm.default, aten.bmm.default  # of one, and of what is no sample's
_FIRST = (  # of the first value, and others that are no sample's
    aten.div.Tensor,
    aten.embedding_dense_backward.default,
    aten._weight_norm_interface_backward.default,
)


def lead_to_gradients(capture: Capture, inputs: AbstractSet[fx.Node]) -> set[fx.Node]:
    """Return the nodes of which nothing but gradients of parameters come, by linear ops.

    inputs:   the batch.
    """
    of_batch = set(inputs)
    for node in capture.fx_nodes:
        if not of_batch.isdisjoint(node.all_input_nodes):
            of_batch.add(node)
    graph = capture.fx_nodes[0].graph
    loss, *others = results_of(graph)
    count, output = len(capture.graph.gradients), graph.output_node()
    gradients = {node for node in others[:count] if isinstance(node, fx.Node)}
    seen = {loss, *others[count:]}
    found = set[fx.Node]()
    for node in reversed(capture.fx_nodes):
        users = [user for user in node.users if user is not output]
        is_asked = node in gradients or bool(users)
        carried = all(user in found and carries(user, node, of_batch) for user in users)
        if is_asked and node not in seen and carried:
            found.add(node)
    return found


def carries(user: fx.Node, node: fx.Node, of_batch: AbstractSet[fx.Node]) -> bool:
    """Return whether an op is linear in a value, and all else that it reads is no sample's."""
    if user.target in _OF_ONE:
        return user.all_input_nodes == [node] and not _counts(user)
    if user.target in _SUMS:
        shapes = {tuple(each.meta["val"].shape) for each in user.all_input_nodes}
        is_plain = all(isinstance(each, fx.Node) for each in user.args[:2])
        return is_plain and len(shapes) == 1
    others = [each for each in user.args if each is not node]
    is_free = all(not isinstance(each, fx.Node) or each not in of_batch for each in others)
    once = len(others) == len(user.args) - 1
    if user.target in _FIRST:
        return user.args[0] is node and once and is_free
    return user.target in _PRODUCTS and once and is_free


def _counts(user: fx.Node) -> bool:
    """Return whether an op turns numbers into others that are not: a sum of them is none."""
    if user.target is not aten._to_copy.default:
        return False
    return not all(n.meta["val"].is_floating_point() for n in (user, *user.all_input_nodes))
