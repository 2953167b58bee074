"""Oracles of what images and recordings need; see `oracles`."""

import torch
from oracles import Oracle, Result
from torch import Tensor


def place_features(x: Tensor, features: Tensor, is_feature: Tensor) -> Result:
    rows = [(features if is_feature[t] else x)[t] for t in range(len(x))]
    return (torch.stack(rows),), {}


def embedding_sum(codes: Tensor, table: Tensor) -> Result:
    num_tables = codes.shape[1]
    tables = table.view(num_tables, -1, table.shape[1])
    out = torch.zeros(len(codes), table.shape[1], dtype=torch.float64)
    for n, row in enumerate(codes.tolist()):
        for b, code in enumerate(row):
            out[n] += tables[b, code]
    return (out,), {}


ORACLES_MEDIA: dict[str, Oracle] = {
    "place_features": place_features,
    "embedding_sum": embedding_sum,
}
