"""pytorch/examples, time_sequence_prediction/train.py: LSTM cells, float64, LBFGS."""

import math

import torch
from torch import nn, optim

import penstock as ps

phases = torch.randint(-16, 16, (8, 1), generator=torch.Generator().manual_seed(2))
data = torch.sin((torch.arange(20) + phases).double() / (2 * math.pi))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, input):
        h1, c1, h2, c2 = (input.new_zeros(input.size(0), 8) for _ in range(4))
        outputs = []
        for input_t in input.split(1, dim=1):
            h1, c1 = self.lstm1(input_t, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


criterion = nn.MSELoss()


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """Each step of LBFGS computes the loss many times."""
    return ps.Job(
        model=lambda: Sequence().double(),
        loss=lambda model, batch: criterion(model(batch[:, :-1]), batch[:, 1:]),
        data=lambda start: iter(lambda: data, None),
        optimizer=lambda params: optim.LBFGS(params, lr=0.8),
        micro_batches=1,
    )
