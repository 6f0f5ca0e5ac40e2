"""Language models of the transformers library, tiny and with the same weights each time."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def tiny_gpt2(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 100}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


def tiny_llama(*, n_layers: int, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=n_layers, **options))
