"""How a Llama is cut: the tensor-parallel table, the cost of each part for pipeline stages, what recomputation keeps.

One block under tp with sequence parallelism, `s` = split over tp along the sequence, `h` = along heads or hidden units:

    x (s) -> attention_norm (s) -> all-gather -> wq wk wv (h) -> attention (h) -> wo -> reduce-scatter (s) -> + x (s)
          -> ffn_norm (s)       -> all-gather -> w1 w3 (h)    -> silu * (h)    -> w2 -> reduce-scatter (s) -> + (s)
"""

from __future__ import annotations

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from models.llama import LlamaConfig
from parallelize.tensor import Replicated, ReplicatedKV, TensorPlan, VocabParallelEmbedding

FIRST_PARTS = ("tok_embeddings",)
"""what the first pipeline stage holds besides layers"""

LAST_PARTS = ("norm", "output")
"""what the last pipeline stage holds besides layers"""


def tensor_plan(config: LlamaConfig, tp: int, sequence_parallel: bool) -> TensorPlan:
    """The table. `stream` is the placement of activations [batch, seq, dim] between blocks."""
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    whole = Replicate()
    kv = ColwiseParallel() if config.n_kv_heads % tp == 0 else ReplicatedKV(config.n_kv_heads)
    enter = PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(whole, None))
    enter_ffn = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,))
    leave = RowwiseParallel(output_layouts=stream, use_local_output=False)
    return {
        "tok_embeddings": VocabParallelEmbedding(output=stream),
        "layers.*.attention_norm": Replicated(),
        "layers.*.attention": enter,
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": kv,
        "layers.*.attention.wv": kv,
        "layers.*.attention.wo": leave,
        "layers.*.ffn_norm": Replicated(),
        "layers.*.feed_forward": enter_ffn,
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "layers.*.feed_forward.w2": leave,
        "norm": Replicated(),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }


def stage_costs(config: LlamaConfig, seq_len: int) -> tuple[float, list[float], float]:
    """Forward FLOPs per token of the embedding, of each block, and of the head with the loss: what pipeline stages are
    balanced by. The embedding is a lookup, which costs memory traffic and no FLOPs."""
    attention = 2 * config.dim * config.head_dim * (2 * config.n_heads + 2 * config.n_kv_heads)
    scores = 2 * 2 * config.n_heads * config.head_dim * seq_len / 2  # causal: half of the square
    feed_forward = 3 * 2 * config.dim * config.ffn_dim
    return 0.0, [float(attention + scores + feed_forward)] * config.n_layers, 2.0 * config.dim * config.vocab_size
