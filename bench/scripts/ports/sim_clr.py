"""sthalles/SimCLR: two views of each picture, whose others in the batch are negatives."""

import torch
from drawn import Drawn, pictures
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import penstock as ps

n_views, batch_size, temperature = 2, 8, 0.5
base = pictures(64, 3)


def two_views(source):
    picture = base[int(torch.randint(64, (), generator=source))][0]
    return [picture + 0.3 * torch.randn(picture.shape, generator=source) for _ in range(n_views)]


class ResNetSimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
        )
        self.fc = nn.Sequential(nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.fc(self.backbone(x))


def info_nce_loss(features):
    labels = torch.cat([torch.arange(batch_size) for _ in range(n_views)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity_matrix = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
    positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    return logits / temperature, torch.zeros(logits.shape[0], dtype=torch.long)


criterion = nn.CrossEntropyLoss()
loader = DataLoader(Drawn(two_views, 64), batch_size=batch_size, drop_last=True)


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """Every sample meets all others of its batch, in the loss and in a batch norm."""
    return ps.Job(
        model=ResNetSimCLR,
        loss=lambda model, views: criterion(*info_nce_loss(model(torch.cat(views, dim=0)))),
        data=ps.from_loader(loader),
        optimizer=lambda params: torch.optim.Adam(params, 3e-3, weight_decay=1e-4, eps=1e-3),
    )
