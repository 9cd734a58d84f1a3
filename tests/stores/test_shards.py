"""Tars, Parquet and Hugging Face datasets, each by its own library, are data of a job."""

import io
import tarfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps

ROWS = torch.arange(96.0).reshape(24, 4)


def first_column(batches) -> list[float]:
    return [float(x) for batch in batches for x in batch[:, 0]]


@pytest.fixture
def tars(tmp_path: Path) -> str:
    for shard in range(3):
        with tarfile.open(tmp_path / f"train-{shard}.tar", "w") as tar:
            for number in range(shard * 8, shard * 8 + 8):
                content = io.BytesIO()
                np.save(content, ROWS[number].numpy())
                info = tarfile.TarInfo(f"{number:03}.npy")
                info.size = content.tell()
                content.seek(0)
                tar.addfile(info, content)
    return f"{tmp_path}/train-{{0..2}}.tar"


@pytest.fixture
def table(tmp_path: Path) -> str:
    pa = pytest.importorskip("pyarrow", reason="an extra: penstock[shards]")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"x": ROWS.tolist()}), tmp_path / "a.parquet", row_group_size=8)
    return f"{tmp_path}/a.parquet"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the library leaves its files to Python
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_samples_of_tars_are_those_of_their_order_and_go_on_anywhere(tars: str) -> None:
    wds = pytest.importorskip("webdataset", reason="an extra: penstock[shards]")
    dataset = wds.WebDataset(tars, shardshuffle=False).decode().to_tuple("npy")
    data = ps.batches(dataset.map(lambda row: torch.as_tensor(row[0])), 4, shuffle=False)
    expected = ROWS[:, 0].tolist()
    assert first_column(islice(data(0), 12)) == expected * 2
    assert first_column(islice(data(8), 4)) == expected[8:24]


def test_rows_of_a_parquet_table_are_samples_by_number(table: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(table, memory_map=True)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return rows.num_rows

        def __getitem__(self, number: int) -> torch.Tensor:
            return torch.tensor(rows["x"][number].as_py())

    data = ps.batches(Rows(), 4, seed=1)
    epoch = first_column(islice(data(0), 6))
    assert sorted(epoch) == ROWS[:, 0].tolist()
    assert first_column(islice(data(2), 4)) == epoch[8:]


def test_rows_of_hugging_face_datasets_are_samples_by_name(table: str) -> None:
    datasets = pytest.importorskip("datasets", reason="an extra: penstock[shards]")
    data = ps.batches(datasets.Dataset.from_parquet(table).with_format("torch"), 4, seed=1)
    epoch = [float(x) for batch in islice(data(0), 6) for x in batch["x"][:, 0]]
    assert sorted(epoch) == ROWS[:, 0].tolist()
    assert epoch != ROWS[:, 0].tolist()
