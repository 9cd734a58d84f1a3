"""PyTorch's tutorial of knowledge distillation: a student beside a teacher in eval mode."""

import torch
from drawn import pictures
from torch import nn, optim
from torch.utils.data import DataLoader

import penstock as ps

T, soft_target_loss_weight, ce_loss_weight = 2, 0.25, 0.75


def net(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * width, 4),
    )


torch.manual_seed(42)
teacher = net(16)
teacher.eval()
train_loader = DataLoader(
    pictures(64, 3), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0)
)
ce_loss = nn.CrossEntropyLoss()


# -- the port --------------------------------------------------------------------------------------


def loss(student, batch):
    inputs, labels = batch
    with torch.no_grad():
        teacher_logits = teacher(inputs)
    student_logits = student(inputs)
    soft_targets = nn.functional.softmax(teacher_logits / T, dim=-1)
    soft_prob = nn.functional.log_softmax(student_logits / T, dim=-1)
    distance = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size(0) * T**2
    label_loss = ce_loss(student_logits, labels)
    return soft_target_loss_weight * distance + ce_loss_weight * label_loss


def job() -> ps.Job:
    """The teacher stands beside the job and is never trained."""
    return ps.Job(
        model=lambda: net(4),
        loss=loss,
        data=ps.from_loader(train_loader),
        optimizer=lambda params: optim.Adam(params, lr=3e-3, eps=1e-3),
    )
