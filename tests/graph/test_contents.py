"""What a batch may be, and that what is kept of it is nobody else's."""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from penstock.graph.batch import key_of
from penstock.graph.contents import as_tensor, flatten, mapped, own, owned, rebuilt

CPU = torch.device("cpu")


@dataclasses.dataclass
class Record:
    x: Any
    y: Any = None

    def __post_init__(self) -> None:
        assert self.y is not None, "was made by its own code"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any


class Named(NamedTuple):
    x: Any
    y: Any


class Methods(namedtuple("Methods", ["x", "y"])):
    def total(self) -> Any:
        return self.x + self.y


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Ordered(OrderedDict):
    """As the outputs and batches of libraries are; what it gives by name is not what it holds."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) * 0


class Items(UserDict):
    pass


def make(kind: Any, x: Any, y: Any) -> Any:
    if kind in (tuple, list):
        return kind([x, y])
    if kind in (dict, OrderedDict, Ordered, Attributes, Items, BatchEncoding):
        return kind({"x": x, "y": y})
    return kind(x, y)


KINDS = [
    *(tuple, list, dict, OrderedDict, Ordered, Attributes, Items, BatchEncoding),
    *(Record, Frozen, Named, Methods),
]


@pytest.mark.parametrize("kind", KINDS)
def test_batch_is_opened_and_closed_again(kind):
    x, y = torch.arange(3), torch.ones(2)
    for batch in (make(kind, x, y), {"deep": [make(kind, x, y)]}):
        leaves, spec = flatten(batch)
        assert [id(leaf) for leaf in leaves] == [id(x), id(y)]
        again = rebuilt([x + 1, y], spec)
        found = again if type(again) is kind else again["deep"][0]
        assert type(found) is kind
        assert [leaf.tolist() for leaf in flatten(found)[0]] == [[1, 2, 3], [1, 1]]
        assert spec == flatten(batch)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_own_batch_is_of_its_class_and_shares_no_memory(kind):
    x, y = torch.arange(3), np.ones(2)
    batch = own(make(kind, x, y), CPU)
    assert type(batch) is kind
    x += 10
    y += 10
    leaves, _ = flatten(batch)
    assert [leaf.tolist() for leaf in leaves] == [[0, 1, 2], [1, 1]]
    assert all(type(leaf) is Tensor for leaf in leaves)


@pytest.mark.parametrize("kind", [dict, OrderedDict, Ordered, Attributes, Items])
def test_keys_stay_in_their_order(kind):
    batch = kind({"b": torch.ones(2), "a": torch.arange(3)})
    assert list(rebuilt(*flatten(batch))) == list(own(batch, CPU)) == ["b", "a"]


def test_keys_and_fields_are_part_of_the_structure():
    x = torch.ones(2)
    specs = [flatten(batch)[1] for batch in (Items(a=x), Items(b=x), Attributes(a=x), {"a": x})]
    assert all(left != right for i, left in enumerate(specs) for right in specs[:i])


def test_what_else_a_user_dict_holds_is_seen_eagerly_and_not_in_a_trace():
    batch = BatchEncoding({"x": torch.ones(2)}, n_sequences=2)
    assert own(batch, CPU).n_sequences == 2
    with pytest.raises(AttributeError):
        _ = rebuilt(*flatten(batch)).n_sequences


def test_other_attributes_of_a_record_are_part_of_it():
    batch = Record(torch.ones(2), torch.ones(2))
    batch.more = torch.arange(2)
    assert len(flatten(batch)[0]) == 3
    assert rebuilt(*flatten(batch)).more is batch.more


def test_object_that_is_no_container_is_left_alone():
    thing = object()
    assert own({"x": thing}, CPU)["x"] is thing
    assert own(None, CPU) is None


# -- numpy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u1", "i2", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
)
def test_array_becomes_a_tensor_of_its_dtype(dtype):
    array = np.ones((2, 3), dtype)
    found = as_tensor(array)
    assert found.numpy().dtype == array.dtype
    assert found.data_ptr() == array.ctypes.data
    number = as_tensor(array[0, 0])
    assert (number.shape, number.numpy().dtype) == ((), array.dtype)


@pytest.mark.parametrize("how", ["read-only", "other bytes", "backwards", "inside", "0-d"])
def test_array_of_any_layout_becomes_a_tensor(how):
    array = np.arange(6.0).reshape(2, 3)
    array = {
        "read-only": lambda: np.broadcast_to(array, (2, 2, 3)),
        "other bytes": lambda: array.astype(">f8"),
        "backwards": lambda: array[:, ::-1],
        "inside": lambda: np.array([(1, 2.0)] * 3, dtype=[("a", "i1"), ("b", "f8")])["b"],
        "0-d": lambda: np.array(3.0),
    }[how]()
    assert as_tensor(array).tolist() == array.tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([object()]),
        np.array(["2020-01-01"], "M8[D]"),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.ones(2, np.longdouble),
    ],
    ids=["text", "objects", "dates", "masked", "long"],
)
def test_array_that_torch_has_nothing_for_stays_as_it_is(array):
    assert as_tensor(array) is array


def test_batches_of_arrays_fit_a_key_of_tensors():
    key = key_of({"x": torch.ones(2, 3), "n": torch.tensor(1)})
    leaves = key.leaves_of({"x": np.full((2, 3), 2, np.float32), "n": np.int64(5)})
    assert [leaf.tolist() for leaf in leaves] == [[[2, 2, 2]] * 2, 5]


# -- copies --------------------------------------------------------------------------------------

VIEWS = {
    "whole": lambda t: t,
    "rows": lambda t: t[1:3],
    "columns": lambda t: t[:, :5],
    "turned": lambda t: t.t(),
    "thin": lambda t: t[:, 1],
    "expanded": lambda t: t[:1].expand(3, 7),
    "empty": lambda t: t[:0],
    "number": lambda t: t[1, 1],
    "part": lambda t: t[1:, 2:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_copy_has_the_values_and_memory_of_its_own(view, dtype):
    whole = torch.arange(28).reshape(4, 7).to(dtype)
    leaf = VIEWS[view](whole)
    found, before = owned(leaf, CPU), leaf.clone()
    whole.zero_()
    assert torch.equal(found, before)
    assert (found.dtype, found.shape) == (leaf.dtype, leaf.shape)


@pytest.mark.parametrize("view", ["whole", "rows", "columns", "turned", "part"])
def test_copy_is_laid_out_and_aligned_as_the_original(view):
    """Else products differ in their last bit."""
    for start in range(1, 16):
        leaf = VIEWS[view](torch.randn(200)[start : start + 28].view(4, 7))
        found = owned(leaf, CPU)
        assert found.stride() == leaf.stride()
        assert (found.data_ptr() - leaf.data_ptr()) % 64 == 0
        weight = torch.randn(3, leaf.shape[1])
        assert torch.equal(found @ weight.t(), leaf @ weight.t())


def test_thin_slice_of_much_is_not_copied_with_what_lies_between():
    found = owned(torch.zeros(1000, 1000)[:, :2], CPU)
    assert found.untyped_storage().nbytes() < 20_000


def test_copy_wants_a_gradient_where_the_original_does():
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert owned(leaf, CPU).requires_grad
        assert owned(leaf[1:], CPU).is_leaf
    assert not owned(leaf.detach(), CPU).requires_grad


def test_one_tensor_twice_is_one_tensor_in_the_copy():
    x = torch.ones(2)
    first, second = own((x, x), CPU)
    assert first is second
    assert first is not x


def test_sparse_tensor_is_copied():
    found = owned(torch.eye(2).to_sparse(), CPU)
    assert found.to_dense().tolist() == [[1, 0], [0, 1]]


def test_mapped_changes_leaves_and_nothing_else():
    batch = {"a": [Record(1, 2)], "b": Named(3, 4)}
    assert mapped(batch, lambda leaf: 10 * leaf) == {"a": [Record(10, 20)], "b": Named(30, 40)}


def test_an_object_that_a_loss_may_write_into_stays_itself() -> None:
    kept = SimpleNamespace(calls=0, mean=torch.zeros(1))
    leaves, spec = flatten((torch.ones(2), kept))
    assert leaves[1] is kept
    assert rebuilt(leaves, spec)[1] is kept
