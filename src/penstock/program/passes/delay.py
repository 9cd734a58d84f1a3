"""Delay: sum the gradients of a step before, from the beginning of a step on.

    before   Compute(F0.0)  Compute(B0.0)  replicas:stage0.0              Update(0)
    after    delayed:stage0.0  Compute(F0.0)  Compute(B0.0)               Update(0)

Keeps:   the order of the sums among themselves, on all ranks the same, and of all else.
Gains:   a sum has the whole step to hide in: the longer of both, in place of their sum.
Costs:   K copies of the gradients: those of K - 1 steps, and a sum; an update is by the gradients
         of K - 1 steps before it, w(t) = w(t - 1) - rate * g(w(t - K)), the first ones by none.
         A step hides one sum, by whatever K: more than 2 makes it no faster.
Source:  Pipe-SGD, arXiv:1811.03619.
"""

from dataclasses import replace

import numpy as np

from penstock.program.codes import COLUMNS, REDUCE, Codes
from penstock.program.program import Program
from penstock.program.reductions import Sum
from penstock.program.verify import columns


def delay(program: Program) -> Program:
    """Return `program` with its sums over replicas delayed; without any, as it is."""
    code = program.code
    late = np.array([one.word == "replicas" for one in code.reductions], bool)
    if not late.any():
        return program
    moved = (code.op == REDUCE) & late[np.where(code.op == REDUCE, code.edge, 0)]
    ranks = np.repeat(np.arange(program.num_ranks), np.diff(code.offsets))
    rows = np.lexsort((~moved, ranks))  # stable: the moved ones of each rank first
    reductions = tuple(
        replace(one, how="delayed") if isinstance(one, Sum) and one.how == "replicas" else one
        for one in code.reductions
    )
    changed = columns(code)._replace(**{name: getattr(code, name)[rows] for name in COLUMNS})
    return replace(program, code=Codes(*changed, reductions, code.meetings))
