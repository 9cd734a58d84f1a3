"""pytorch/examples, gcn/main.py: one graph is the whole batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam

import penstock as ps

source = torch.Generator().manual_seed(13)
features = torch.randn(24, 12, generator=source)
labels = torch.randint(4, (24,), generator=source)
ends = torch.randint(24, (2, 60), generator=source)
adj = torch.eye(24).index_put((ends[0], ends[1]), torch.ones(60))
adj = torch.maximum(adj, adj.T)
norm = adj.sum(1).rsqrt()
adj_mat = norm[:, None] * adj * norm
idx_train = torch.randperm(24, generator=source)[:14]


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)
        self.bias = nn.Parameter(torch.zeros(output_dim))

    def forward(self, input_tensor, adj_mat):
        return torch.mm(adj_mat, torch.mm(input_tensor, self.kernel)) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2, self.dropout = GraphConv(12, 16), GraphConv(16, 4), nn.Dropout(0.1)

    def forward(self, input_tensor, adj_mat):
        x = F.relu(self.gc1(input_tensor, adj_mat))
        return F.log_softmax(self.gc2(self.dropout(x), adj_mat), dim=1)


# -- the port --------------------------------------------------------------------------------------


def loss(model, graph):
    output = model(graph["features"], graph["adj_mat"])
    return F.nll_loss(output[idx_train], labels[idx_train])


def job() -> ps.Job:
    """Every node meets every other: no micro-batch can be divided."""
    graph = {"features": features, "adj_mat": adj_mat}
    return ps.Job(
        model=GCN,
        loss=loss,
        data=lambda start: iter(lambda: graph, None),
        optimizer=lambda params: Adam(params, lr=0.01, weight_decay=5e-4, eps=1e-4),
        micro_batches=1,
    )
