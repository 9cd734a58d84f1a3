"""A LightningModule, by Lightning's own Trainer and by Penstock: are the weights the same?

    python -m bench.lightning_module [--packages FOLDER] [--ranks 2]

FOLDER holds an installed `lightning`, where this Python has none (`pip install --target FOLDER`).
Prints one row as JSON: the release, steps, the plan, the largest difference of a weight.
"""

import argparse
import copy
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps

OPTIONS = {"max_epochs": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def module_of(lightning: Any) -> Any:
    """Return a small classifier with figures, a validation and a rate that moves by the step."""

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            inputs, labels = batch
            said = self.net(inputs)
            self.log("train_acc", (said.argmax(-1) == labels).float().mean())
            return F.cross_entropy(said, labels)

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            inputs, labels = batch
            self.log("val_loss", F.cross_entropy(self.net(inputs), labels))

        def configure_optimizers(self) -> dict[str, Any]:
            made = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            steps = self.trainer.estimated_stepping_batches
            rate = torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=steps)
            return {"optimizer": made, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

    torch.manual_seed(0)
    return Classifier()


def loader(size: int) -> DataLoader[tuple[Tensor, ...]]:
    inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(-1)), size)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lightning_module", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--packages", type=Path, help="a folder with an installed lightning")
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args(arguments)
    if asked.packages:
        sys.path.insert(0, str(asked.packages))
    torch.set_num_threads(1)
    lightning = importlib.import_module("lightning.pytorch")
    module = module_of(lightning)
    theirs = copy.deepcopy(module)
    trainer = lightning.Trainer(**OPTIONS, **QUIET, accelerator="cpu", devices=1)
    trainer.fit(theirs, loader(8), loader(12))
    job = ps.from_lightning(module, loader(8), OPTIONS, validation=loader(12))
    with tempfile.TemporaryDirectory() as folder:
        trained = ps.train(job, out=Path(folder) / "run", ranks=asked.ranks)
    own = trained.model.state_dict()
    row = {
        "lightning": lightning.__version__,
        "steps": trainer.global_step,
        "plan": str(trained.plan).splitlines()[0],
        "difference": max(
            float((own[name] - value).abs().max()) for name, value in theirs.state_dict().items()
        ),
    }
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
