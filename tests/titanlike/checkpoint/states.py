"""A small training state with the shapes that go wrong, and the parts of it that each rank of a mesh would hold."""

from __future__ import annotations

import torch

from titanlike.checkpoint import Shard

# name -> (shape, dim that tp cuts or None for a replica, pipeline stage 0 = first, 1 = last)
TENSORS: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    "tok_embeddings.weight": ((13, 8), 0, 0),  # odd rows: tp and dp leave uneven and empty parts
    "layers.0.attention.wq.weight": ((16, 8), 0, 0),
    "layers.0.attention.wo.weight": ((8, 16), 1, 0),  # cut in columns by tp, in rows by dp
    "layers.0.attention_norm.weight": ((8,), None, 0),
    "layers.1.feed_forward.w1.weight": ((10, 8), 0, 1),
    "layers.1.ffn.conv": ((3, 4, 6), 1, 1),
    "norm.weight": ((1,), None, 1),
    "output.weight": ((13, 8), 0, 1),
}
KINDS = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


def full_state(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every tensor of the state, whole; another seed, other values."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        kind + name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for kind in KINDS
        for name, (shape, _, _) in TENSORS.items()
    }
    state["optimizer.count"] = torch.tensor(seed, dtype=torch.int64)  # 0-d, on all ranks
    return state


def cut(size: int, parts: int, part: int) -> tuple[int, int]:
    """(start, size) of one of `parts` chunks, as torch.chunk cuts: later ones may be smaller or empty."""
    chunk = -(-size // parts)
    start = min(part * chunk, size)
    return start, min(chunk, size - start)


def shards(state: dict[str, torch.Tensor], mesh: tuple[int, int, int], rank: int) -> dict[str, Shard]:
    """What `rank` of a (pp, dp, tp) mesh holds, as ZeRO-1 over tensor parallelism cuts it; copies of its own memory."""
    pp, dp, tp = mesh
    stage, data, column = rank // (dp * tp), rank // tp % dp, rank % tp
    held = {}
    for name, tensor in state.items():
        plain = name
        for kind in KINDS:
            plain = plain.removeprefix(kind)
        _, tp_dim, last = TENSORS.get(plain, ((), None, -1))
        if last >= 0 and pp > 1 and stage != last * (pp - 1):
            continue
        offset = [0] * tensor.dim()
        part = tensor
        if tp_dim is not None:
            start, size = cut(tensor.shape[tp_dim], tp, column)
            part, offset[tp_dim] = part.narrow(tp_dim, start, size), start
        if tensor.dim():
            start, size = cut(part.shape[0], dp, data)
            part, offset[0] = part.narrow(0, start, size), offset[0] + start
        held[name] = Shard(part.clone(memory_format=torch.contiguous_format), tuple(tensor.shape), tuple(offset))
    return held


def blank(held: dict[str, Shard]) -> dict[str, Shard]:
    """The same boxes, filled with something that no checkpoint holds."""
    return {name: shard.on(torch.full_like(shard.tensor, -77)) for name, shard in held.items()}


def equal(left: dict[str, Shard], right: dict[str, Shard]) -> bool:
    """The same boxes with the same bits."""
    return list(left) == list(right) and all(
        left[name].offset == right[name].offset and torch.equal(left[name].tensor, right[name].tensor) for name in left
    )


def whole(state: dict[str, torch.Tensor]) -> dict[str, Shard]:
    """The state on one device."""
    return {name: Shard.whole(tensor.clone()) for name, tensor in state.items()}
