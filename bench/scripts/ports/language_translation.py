"""pytorch/examples, language_translation/main.py: nn.Transformer over pairs of sentences."""

import torch
from drawn import Drawn
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import penstock as ps

UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX = 0, 1, 2, 3


def sentences(source):
    count = int(torch.randint(2, 7, (), generator=source))
    words = torch.randint(4, 12, (count,), generator=source).tolist()
    return tuple(
        torch.tensor([BOS_IDX, *row, EOS_IDX]) for row in (words, [w + 8 for w in reversed(words)])
    )


def collate_fn(batch):
    return tuple(
        pad_sequence(list(side), padding_value=PAD_IDX) for side in zip(*batch, strict=True)
    )


class Seq2SeqTransformer(nn.Module):
    def __init__(self, emb_size=16):
        super().__init__()
        self.transformer = nn.Transformer(emb_size, 2, 1, 1, 32, 0.1)
        self.generator = nn.Linear(emb_size, 20)
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(12, emb_size), nn.Embedding(20, emb_size)
        self.positional_encoding = nn.Embedding(10, emb_size)

    def embed(self, table, ids):
        return table(ids) + self.positional_encoding(torch.arange(len(ids)))[:, None]

    def forward(self, src, trg):
        tgt_mask = torch.triu(torch.ones(len(trg), len(trg), dtype=torch.bool), 1)
        src_padding_mask, tgt_padding_mask = (src == PAD_IDX).T, (trg == PAD_IDX).T
        outs = self.transformer(
            self.embed(self.src_tok_emb, src),
            self.embed(self.tgt_tok_emb, trg),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding_mask,
            tgt_key_padding_mask=tgt_padding_mask,
            memory_key_padding_mask=src_padding_mask,
        )
        return self.generator(outs)


dataset = Drawn(sentences, 64)
loss_fn = nn.CrossEntropyLoss(ignore_index=PAD_IDX)


# -- the port --------------------------------------------------------------------------------------


def loss(model, batch):
    src, tgt = (side.T for side in batch)
    logits = model(src, tgt[:-1])
    return loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[1:].reshape(-1))


def pad(pair, length):
    return tuple(nn.functional.pad(side, (0, length - len(side)), value=PAD_IDX) for side in pair)


def job() -> ps.Job:
    """Sentences in buckets in place of batches padded to the longest; steps count by words."""
    return ps.Job(
        model=Seq2SeqTransformer,
        loss=loss,
        data=ps.bucketed(dataset, lengths=(6, 8), batch_size=8, pad=pad, micro_batches=2),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, betas=(0.9, 0.98), eps=1e-4),
        micro_batches=2,
        weight=lambda batch: (batch[1][:, 1:] != PAD_IDX).sum(),
    )
