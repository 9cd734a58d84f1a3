"""Small random problems, and everything that could be done with them, for tests of assignments."""

import itertools
import math

from hypothesis import strategies as st

from bench.planners.problem import Assignment, Problem
from penstock.search.transformer.partition import Chain, Kind

small = st.integers(0, 9)
LINKS = (1.0, 5.0, 50.0)


@st.composite
def problems(draw, layers=(1, 5), devices=(1, 4), memory=(math.inf, 20, 40, 80), *, kinds=2):
    """Return a problem with one or two kinds of devices and links of all sorts."""
    length, count = draw(st.integers(*layers)), draw(st.integers(*devices))
    row = st.tuples(*[small] * length)
    chain = Chain(draw(row), draw(row), draw(row), draw(row))
    seconds = st.tuples(*[st.integers(1, 9)] * length)
    first = draw(st.integers(1, count)) if kinds > 1 else count
    counts = [n for n in (first, count - first) if n]
    own = tuple(Kind(n, draw(seconds), draw(st.sampled_from(memory))) for n in counts)
    line = st.tuples(*[st.sampled_from(LINKS)] * count)
    links = draw(st.tuples(*[line] * count))
    hosts = draw(st.tuples(*[st.integers(0, 1)] * count))
    return Problem(chain, own, links, draw(st.sampled_from([1, 2, 3, 8])), hosts)


def alike(layer_s, count, *, sent=None, weights=None, m=4, memory=math.inf, bytes_per_s=1.0):  # noqa: PLR0913
    """Return a problem on alike devices with one link between any two."""
    none = (0,) * len(layer_s)
    chain = Chain(weights or none, sent or none)
    links = ((bytes_per_s,) * count,) * count
    return Problem(chain, (Kind(count, tuple(layer_s), memory),), links, m)


def everything(problem, schedule="one_f_one_b"):
    """Yield every assignment: a stage for each device, or none, and every cut."""
    layers, devices = len(problem.chain), problem.num_devices
    for stages in range(1, min(layers, devices) + 1):
        for where in itertools.product(range(-1, stages), repeat=devices):
            if set(where) - {-1} != set(range(stages)):
                continue
            groups = [[d for d in range(devices) if where[d] == s] for s in range(stages)]
            for cuts in itertools.combinations(range(1, layers), stages - 1):
                yield Assignment((*cuts, layers), tuple(map(tuple, groups)), schedule)
