"""Memory layouts of weights change speed, not results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlike.generate.packed import PackedLinears


class Tied(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.wide = nn.Linear(24, 70, bias=bias)
        self.narrow = nn.Linear(70, 24, bias=bias)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.narrow(self.wide(self.embedding(tokens))))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layouts_give_the_same_numbers_in_any_order(dtype: torch.dtype, bias: bool) -> None:
    model = Tied(bias).to(dtype).requires_grad_(False)
    packed = PackedLinears(model)
    tokens = torch.randint(50, (8, 3))
    wanted = {rows: model(tokens[:rows]) for rows in (1, 8)}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 0.0}[dtype]
    for rows in (8, 1, 1, 8, 2, 1):
        packed.for_rows(rows)
        for count in (1, 8):
            assert torch.allclose(model(tokens[:count]), wanted[count], rtol=tolerance, atol=tolerance)
    packed._layers[0].lay_out("plain")
    for layer in packed._layers:
        layer.lay_out("plain")
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in weights.items())
    assert model.head.weight is model.embedding.weight


def test_no_weight_is_held_twice() -> None:
    model = Tied(bias=False).requires_grad_(False)
    packed = PackedLinears(model)
    for rows in (8, 1):
        packed.for_rows(rows)
        for layer in packed._layers:
            blocks = 0 if layer.blocks is None else layer.blocks.to_dense().numel()
            held = layer.plain.numel() if not layer.shared else layer.module.weight.numel()
            assert blocks + held <= layer.module.in_features * layer.module.out_features * (2 if layer.shared else 1)
