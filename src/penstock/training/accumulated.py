"""Accumulated: of a loop that updates at some of its batches, how many gradients an update sums.

for k, (x, y) in enumerate(steps):
    loss = cross_entropy(model(x), y) / 4
    loss.backward()
    if (k + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""

import ast
from collections.abc import Callable

WRITE = "write `for k, batch in enumerate(steps):` and `if (k + 1) % 4 == 0:`"
RATES = "write `for k, batch in enumerate(steps):`, and `if (k + 1) % len(loader) == 0:` around it"


def updated_in(body: list[ast.stmt], is_update: Callable[[ast.stmt], bool]) -> ast.If | None:
    """Return the `if` of a body in which its update stands; None: there is none."""
    for stmt in body:
        if isinstance(stmt, ast.If) and any(is_update(each) for each in stmt.body):
            return stmt
    return None


def num_summed(
    test: ast.expr, index: tuple[str, int] | None, value_of: Callable[[ast.expr], object]
) -> int | str:
    """Return how many batches an update follows, by what it stands under; else what is wrong.

    index:     the name that counts the batches, and its first value.
    value_of:  what an expression is, where that is known before the loop.
    """
    match test:
        case ast.Compare(
            left=ast.BinOp(left=counted, op=ast.Mod(), right=count),
            ops=[ast.Eq()],
            comparators=[ast.Constant(value=int() as rest)],
        ):
            pass
        case ast.UnaryOp(op=ast.Not(), operand=ast.BinOp(left=counted, op=ast.Mod(), right=count)):
            rest = 0
        case _:
            return "when the weights are updated is not said by a count of batches"
    number = count.value if isinstance(count, ast.Constant) else value_of(count)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        return f"`{ast.unparse(count)}` is no whole number that is known before the loop"
    if index is None or (more := _beyond(counted, index[0])) is None:
        return f"`{ast.unparse(counted)}` is not the number of the batch"
    if (index[1] + number - 1 + more) % number != rest:
        return f"the first update does not follow {number} batches, as the others do"
    return number


def _beyond(node: ast.expr, name: str) -> int | None:
    """Return a of `name + a`, `a + name`, `name - a` and `name`; None: it is something else."""
    match node:
        case ast.Name(id=found) if found == name:
            return 0
        case ast.BinOp(
            left=ast.Name(id=found), op=ast.Add(), right=ast.Constant(value=int() as a)
        ) if found == name:
            return a
        case ast.BinOp(
            left=ast.Constant(value=int() as a), op=ast.Add(), right=ast.Name(id=found)
        ) if found == name:
            return a
        case ast.BinOp(
            left=ast.Name(id=found), op=ast.Sub(), right=ast.Constant(value=int() as a)
        ) if found == name:
            return -a
        case _:
            return None


def is_sum_of(stmt: ast.stmt, loss: str) -> bool:
    """Return whether a statement adds a loss to a name: `total += loss.item()`, perhaps scaled.

    Adding the losses of several batches one by one is then adding their sum.
    """
    match stmt:
        case ast.AugAssign(target=ast.Name(), op=ast.Add(), value=value):
            return _is_item(value, loss)
        case _:
            return False


def _is_item(node: ast.expr, loss: str) -> bool:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=found), attr="item"), args=[], keywords=[]
        ):
            return found == loss
        case ast.Call(func=ast.Name(id="float"), args=[ast.Name(id=found)], keywords=[]):
            return found == loss
        case ast.BinOp(
            left=inner, op=ast.Mult() | ast.Div(), right=ast.Constant(value=int() | float())
        ):
            return _is_item(inner, loss)
        case _:
            return False
