"""AssemblyAI's tutorial of Deep Speech 2: CTC, batches padded to the longest."""

import torch
from drawn import Drawn
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import penstock as ps


def utterance(source):
    letters = torch.randint(
        1, 6, (int(torch.randint(2, 9, (), generator=source)),), generator=source
    )
    frames = letters.repeat_interleave(4)
    sounds = F.one_hot(frames, 8).float() + 0.3 * torch.randn(len(frames), 8, generator=source)
    return sounds, letters


def data_processing(samples):
    spectrograms = nn.utils.rnn.pad_sequence([s for s, _ in samples], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([t for _, t in samples], batch_first=True)
    input_lengths = torch.tensor([len(s) // 2 for s, _ in samples])
    return spectrograms, labels, input_lengths, torch.tensor([len(t) for _, t in samples])


class SpeechRecognitionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Conv1d(8, 16, 3, stride=2, padding=1)
        self.gru = nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(16, 6)

    def forward(self, x):
        x = F.gelu(self.cnn(x.transpose(1, 2))).transpose(1, 2)
        return self.classifier(self.gru(x)[0])


criterion = nn.CTCLoss(blank=0)
train_loader = DataLoader(
    Drawn(utterance, 64),
    batch_size=4,
    shuffle=True,
    generator=torch.Generator().manual_seed(7),
    collate_fn=data_processing,
)


# -- the port --------------------------------------------------------------------------------------


def loss(model, batch):
    spectrograms, labels, input_lengths, label_lengths = batch
    output = F.log_softmax(model(spectrograms), dim=2).transpose(0, 1)
    return criterion(output, labels, input_lengths, label_lengths)


def job() -> ps.Job:
    """Each batch has another length; two of them make a step."""
    return ps.Job(
        model=SpeechRecognitionModel,
        loss=loss,
        data=ps.from_loader(train_loader),
        optimizer=lambda params: optim.AdamW(params, 5e-3, eps=1e-4),
        micro_batches=2,
    )
