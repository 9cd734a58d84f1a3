"""Equal micro-batches have equal digests, others have not."""

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from penstock.runtime.digest import digest_of


class Thing:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8]
)
def test_layout_does_not_count_and_everything_else_does(dtype):
    t = torch.arange(6).reshape(2, 3).to(dtype)
    one = digest_of([t])
    assert one == digest_of([t.clone()]) == digest_of([t.t().contiguous().t()])
    changed = t.clone()
    changed[1, 2] = 0
    others = [changed, t.reshape(3, 2), t.to(torch.complex128), t[:1], t[:0]]
    assert one not in {digest_of([other]) for other in others}
    assert one not in {digest_of([t, t]), digest_of([]), digest_of([str(t)])}


def test_boundaries_between_leaves_count():
    a, b = torch.zeros(2), torch.zeros(3)
    assert digest_of([a, b]) != digest_of([b, a])
    assert digest_of([1, 2]) != digest_of([2, 1])
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
    assert digest_of([1]) != digest_of([1.0]) != digest_of([True])


def test_zero_and_minus_zero_are_told_apart():
    assert digest_of([torch.tensor(0.0)]) != digest_of([torch.tensor(-0.0)])


def test_arrays_count_as_tensors_and_other_things_by_their_value():
    assert digest_of([np.arange(3)]) == digest_of([torch.arange(3)])
    assert digest_of([Thing(1)]) == digest_of([Thing(1)]) != digest_of([Thing(2)])
    assert digest_of([Fraction(1, 2)]) == digest_of([Fraction(2, 4)]) != digest_of([Fraction(1)])
    assert digest_of([lambda: 1]) == digest_of([lambda: 2])


def test_other_tensors_count():
    eye = torch.eye(3)
    assert digest_of([eye.to_sparse()]) == digest_of([eye])
    assert digest_of([torch.view_as_complex(torch.ones(2, 2)).conj()]) == digest_of(
        [torch.tensor([1 - 1j, 1 - 1j])]
    )


def test_digest_is_the_same_in_another_process():
    text = "import torch; from penstock.runtime.digest import digest_of as d; "
    text += "print(d([torch.arange(3), 'text', None]))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout.strip() == digest_of([torch.arange(3), "text", None])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*nested tensors")
def test_digest_tells_tensors_of_every_layout_apart() -> None:
    rows = [torch.ones(2, 3), torch.ones(3, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    again = torch.nested.nested_tensor([row.clone() for row in rows], layout=torch.jagged)
    turned = torch.nested.nested_tensor(rows[::-1], layout=torch.jagged)
    assert digest_of([jagged]) == digest_of([again]) != digest_of([turned])
    half = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8)
    third = torch.quantize_per_tensor(torch.ones(3), 0.3, 0, torch.quint8)
    assert digest_of([half]) == digest_of([half.clone()]) != digest_of([third])


def test_digest_counts_the_attributes_of_tensors() -> None:
    one, other, third = (torch.ones(2) for _ in range(3))
    one.length, other.length = 1, 2  # pyright: ignore
    assert len({digest_of([t]) for t in (one, other, third)}) == 3
