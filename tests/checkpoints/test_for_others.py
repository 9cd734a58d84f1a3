"""For others: the last checkpoint has whole weights, whatever parts ranks hold."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.checkpoints import checkpoint
from penstock.checkpoints.for_others import WHOLE, put_whole_beside
from penstock.state.tensor_parts import part_key

WEIGHT = torch.arange(12.0).view(3, 4)


def written(folder: Path, *ranks: dict[str, Tensor]) -> Path:
    for rank, tensors in enumerate(ranks):
        checkpoint.write_part(folder, 5, rank, (tensors, {}))
    return checkpoint.finish(folder, 5)


def parts(name: str) -> list[dict[str, Tensor]]:
    rows = WEIGHT.reshape(-1).split(6)
    return [{part_key(name, 6 * at, (3, 4)): row.clone()} for at, row in enumerate(rows)]


def test_parts_of_weights_are_there_as_a_whole_too_and_are_read_as_before(tmp_path: Path) -> None:
    first, second = parts("weights/a")
    state, more = parts("optimizer/a/momentum")
    folder = written(tmp_path, {**first, **state, "weights/b": torch.ones(2)}, {**second, **more})
    before = checkpoint.load(folder)
    put_whole_beside(tmp_path)
    beside = load_file(folder / WHOLE)
    assert beside.keys() == {"weights/a"}  # b is whole already, and nobody else reads state
    assert torch.equal(beside["weights/a"], WEIGHT)
    after = checkpoint.load(folder)
    assert after.tensors.keys() == before.tensors.keys()
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-0.safetensors",
        "rank-1.safetensors",
        "state.json",
        WHOLE,
    ]


def test_a_checkpoint_without_parts_has_nothing_beside_it(tmp_path: Path) -> None:
    folder = written(tmp_path, {"weights/a": WEIGHT})
    put_whole_beside(tmp_path)
    assert not (folder / WHOLE).exists()
    put_whole_beside(tmp_path / "none")
