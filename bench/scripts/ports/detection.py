"""torchvision's references/detection: pictures and lists of boxes, as many as there are."""

import torch
from drawn import Drawn
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import penstock as ps


def scene(source):
    count = int(torch.randint(1, 4, (), generator=source))
    corners = torch.randint(0, 5, (count, 2), generator=source).float()
    boxes = torch.cat([corners, corners + 3], 1)
    picture = torch.randn(3, 8, 8, generator=source)
    for x, y, _, _ in boxes.int().tolist():
        picture[:, y : y + 3, x : x + 3] += 2
    labels = torch.randint(1, 3, (count,), generator=source)
    return picture, {"boxes": boxes, "labels": labels}


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


class OneStage(nn.Module):
    """A head on each cell; a box belongs to the cell of its centre, as in FCOS."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.cls_logits, self.bbox_pred = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images, targets):
        features = self.backbone(torch.stack(images))
        logits, boxes = self.cls_logits(features), self.bbox_pred(features)
        classes, distances = torch.zeros(len(images), 4, 4, dtype=torch.long), []
        for k, target in enumerate(targets):
            for box, label in zip(target["boxes"], target["labels"], strict=True):
                x, y = ((box[:2] + box[2:]) / 4).int().clamp(max=3).tolist()
                classes[k, y, x] = label
                distances.append(F.smooth_l1_loss(boxes[k, :, y, x], box / 8))
        return {
            "classification": F.cross_entropy(logits, classes),
            "bbox_regression": torch.stack(distances).mean(),
        }


data_loader = DataLoader(
    Drawn(scene, 64),
    batch_size=4,
    shuffle=True,
    generator=torch.Generator().manual_seed(0),
    collate_fn=collate_fn,
)


# -- the port --------------------------------------------------------------------------------------


def loss(model, batch):
    loss_dict = model(*batch)
    return sum(loss_dict.values()), loss_dict


def job() -> ps.Job:
    """Another number of boxes in each batch; two batches make a step."""
    return ps.Job(
        model=OneStage,
        loss=loss,
        data=ps.from_loader(data_loader),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=1e-4),
        micro_batches=2,
    )
