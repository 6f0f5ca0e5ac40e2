"""Llama 3 8B from the transformers library, bf16, batch 1 x 4096 tokens, AdamW.

    pip install 'checkpoint-solver[transformers]'
    solve --budget 80GB --device h100 examples/llama.py
    solve --budget 30GB --device h100 --tensor 8 examples/llama.py

Built from a configuration: nothing is downloaded, and planning allocates no weights. Forward
returns only the loss, so that the logits (1 GB) are not held to the end of the step.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from checkpoint_solver import LossOnly

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise ImportError(
        "examples/llama.py needs transformers: pip install 'checkpoint-solver[transformers]'"
    ) from error


COLWISE = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
ROWWISE = ["self_attn.o_proj", "mlp.down_proj"]


def get_model(
    n_layers: int = 32,
    width: int = 4096,
    mlp_width: int = 14336,
    n_heads: int = 32,
    n_kv_heads: int = 8,
    n_tokens: int = 128256,
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Module:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        vocab_size=n_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    return LossOnly(LlamaForCausalLM(config).to(dtype)).train()


def four_layers() -> nn.Module:
    """Four layers of this shape; give `examples/llama.py:four_layers` to the command."""
    return get_model(n_layers=4)


def get_batch(
    batch_size: int = 1, seq_length: int = 4096, n_tokens: int = 128256
) -> dict[str, torch.Tensor]:
    tokens = torch.randint(n_tokens, (batch_size, seq_length))
    return {"input_ids": tokens, "labels": tokens}


def get_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW: the default implementation on a GPU takes another 16 GB of temporaries."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the heads and the MLP's inner width of each block, and the vocabulary, over the
    tensor-parallel ranks of the mesh."""
    from torch.distributed.tensor import Replicate  # imported here, since it takes a second
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    inner = model.get_submodule("model.model")
    styles = {name: ColwiseParallel() for name in COLWISE}
    styles |= {name: RowwiseParallel() for name in ROWWISE}
    for block in inner.get_submodule("layers").children():
        parallelize_module(block, mesh, styles)
    split_tokens = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(inner, mesh, {"embed_tokens": split_tokens})
    whole_logits = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"model.lm_head": whole_logits})
