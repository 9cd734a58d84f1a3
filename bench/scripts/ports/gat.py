"""pytorch/examples, gat/main.py: attention over the edges of one graph."""

import torch
from gcn import adj, features, idx_train, labels
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam

import penstock as ps


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, n_heads, concat=False, dropout=0.4):
        super().__init__()
        self.n_heads, self.concat, self.dropout = n_heads, concat, dropout
        self.n_hidden = out_features // n_heads if concat else out_features
        self.W = nn.Parameter(torch.empty(in_features, self.n_hidden * n_heads))
        self.a = nn.Parameter(torch.empty(n_heads, 2 * self.n_hidden, 1))
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h, adj_mat):
        n_nodes = h.shape[0]
        h = F.dropout(torch.mm(h, self.W), self.dropout, training=self.training)
        h = h.view(n_nodes, self.n_heads, self.n_hidden).permute(1, 0, 2)
        source = torch.matmul(h, self.a[:, : self.n_hidden])
        target = torch.matmul(h, self.a[:, self.n_hidden :])
        e = F.leaky_relu(source + target.mT, 0.2)
        attention = F.softmax(torch.where(adj_mat > 0, e, -9e16 * torch.ones_like(e)), dim=-1)
        attention = F.dropout(attention, self.dropout, training=self.training)
        h_prime = torch.matmul(attention, h)
        if self.concat:
            return h_prime.permute(1, 0, 2).contiguous().view(n_nodes, -1)
        return h_prime.mean(dim=0)


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.gat1 = GraphAttentionLayer(12, 16, 4, concat=True)
        self.gat2 = GraphAttentionLayer(16, 4, 1)

    def forward(self, input_tensor, adj_mat):
        x = F.elu(self.gat1(input_tensor, adj_mat))
        return F.log_softmax(self.gat2(x, adj_mat), dim=1)


criterion = nn.NLLLoss()


# -- the port --------------------------------------------------------------------------------------


def job() -> ps.Job:
    """Dropout of edges; the whole graph is one batch."""
    return ps.Job(
        model=GAT,
        loss=lambda model, graph: criterion(model(*graph)[idx_train], labels[idx_train]),
        data=lambda start: iter(lambda: (features, adj), None),
        optimizer=lambda params: Adam(params, lr=0.005, weight_decay=5e-4, eps=1e-4),
        micro_batches=1,
    )
