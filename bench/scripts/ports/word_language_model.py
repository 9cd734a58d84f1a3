"""pytorch/examples, word_language_model/main.py: an LSTM whose state goes on from step to step."""

import itertools

import torch
from drawn import words
from torch import nn
from torch.nn import functional as F

import penstock as ps

bptt, ntoken, nhid = 5, 16, 8


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


train_data = batchify(words(800), 4)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(ntoken, nhid)
        self.rnn = nn.LSTM(nhid, nhid, 2, dropout=0.2)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, ntoken)
        return F.log_softmax(decoded, dim=1), hidden


# -- the port --------------------------------------------------------------------------------------


def loss(model, batch, carry):
    data, targets = batch
    output, (carry["h"], carry["c"]) = model(data, (carry["h"], carry["c"]))
    return F.nll_loss(output, targets)


def windows(start):
    for number in itertools.count(start):
        yield get_batch(train_data, number * bptt % (len(train_data) - bptt))


def job() -> ps.Job:
    """Truncated back-propagation: `repackage_hidden` is what is carried."""
    return ps.Job(
        model=RNNModel,
        loss=loss,
        data=windows,
        optimizer=lambda params: torch.optim.SGD(params, lr=2.0),
        micro_batches=1,
        clip_norm=0.25,
        carry={"h": torch.zeros(2, 4, nhid), "c": torch.zeros(2, 4, nhid)},
    )
