"""What other trainers and torch call our keys and their values, for hints: no likeness of letters finds these."""

from __future__ import annotations

import re

_KEYS = {
    "run.dir": "output_dir out_dir save_dir dump_folder",
    "model.architecture": "model.name model.type model.model_type",
    "model.preset": "model.size model.flavor",
    "model.dim": "hidden_size d_model n_embd embed_dim",
    "model.n_layers": "num_hidden_layers",
    "model.n_heads": "num_attention_heads",
    "model.n_kv_heads": "num_key_value_heads num_query_groups",
    "model.ffn_dim": "intermediate_size ffn_hidden_size",
    "model.norm_eps": "rms_norm_eps layer_norm_eps",
    "model.init_std": "initializer_range",
    "model.tie_embeddings": "tie_word_embeddings",
    "mesh.pp": "pipeline_parallel pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size",
    "mesh.dp": "data_parallel data_parallel_degree data_parallel_size",
    "mesh.tp": "tensor_parallel tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size",
    "mesh.ep": "expert_parallel expert_parallel_degree expert_parallel_size expert_model_parallel_size",
    "train.steps": "steps max_steps num_steps total_steps num_train_steps max_iters train_iters num_iterations",
    "train.microbatch_size": "per_device_batch_size per_device_train_batch_size local_batch_size device_batch_size "
    "gradient_accumulation_steps grad_accum_steps accumulation_steps",
    "train.seq_len": "max_seq_length sequence_length block_size context_length",
    "train.dtype": "precision mixed_precision torch_dtype compute_dtype bf16",
    "train.max_grad_norm": "clip_grad grad_clip gradient_clipping clip_grad_norm gradient_clip_val max_norm",
    "optimizer.name": "optimizer.type",
    "optimizer.lr": "learning_rate max_lr",
    "schedule.warmup": "warmup_steps warmup_iters warmup_ratio num_warmup_steps lr_warmup_iters",
    "schedule.decay": "lr_scheduler lr_scheduler_type lr_decay_style decay_type",
    "schedule.min_lr_ratio": "min_lr min_lr_factor",
    "data.paths": "data_path dataset_path train_data",
    "data.tokenizer": "tokenizer_path tokenizer_name",
    "data.workers": "num_workers dataloader_num_workers",
    "validation.interval": "eval_interval eval_every eval_steps",
    "checkpoint.interval": "save_interval save_every save_steps checkpoint_interval",
    "checkpoint.init_from": "model.path pretrained pretrained_model_name_or_path initial_load_path",
    "activation_checkpoint.mode": "gradient_checkpointing activation_checkpointing recompute_granularity",
    "compile.enable": "torch_compile",
}
"""our key -> its names elsewhere: the last name of a key in any section, or a whole path"""

_VALUES = {
    "pipeline.schedule": {"gpipe": "afab", "zbvzerobubble": "zbv", "zbvschedule": "zbv"},
    "train.dtype": {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp64": "float64", "double": "float64"},
    "model.architecture": {"mixtral": "moe", "qwen3moe": "moe"},
}
"""key -> a value elsewhere, in small letters and digits alone -> ours"""

_KEY_OF = {name: key for key, names in _KEYS.items() for name in names.split()}


def key_elsewhere(path: str) -> str | None:
    """Our key for a path that another trainer has."""
    path = path.lower().replace("-", "_")
    return _KEY_OF.get(path) or _KEY_OF.get(path.rpartition(".")[2])


def value_elsewhere(path: str, value: str) -> str | None:
    """Our value of the key `path` for one that torch or another trainer has, in whatever spelling."""
    return _VALUES.get(path, {}).get(re.sub("[^a-z0-9]", "", value.lower()))
