"""Models of transformers and diffusers, small, from their configurations: nothing is downloaded.

Every configuration keeps the library's default dropout. The sizes are such that activations take
more than parameters and a step takes less than a second on one core.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

N_TOKENS = 400
N_CLASSES = 10


def _tokens(n_rows: int, n_columns: int) -> torch.Tensor:
    return torch.randint(3, N_TOKENS, (n_rows, n_columns))


def _language(n_rows: int, n_columns: int) -> dict[str, torch.Tensor]:
    tokens = _tokens(n_rows, n_columns)
    return {"input_ids": tokens, "labels": tokens.clone()}


def gpt2() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4,
        n_embd=128,
        n_head=4,
        n_positions=128,
        vocab_size=N_TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config), _language(4, 128)


_DECODER = {
    "vocab_size": N_TOKENS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_cache": False,
}


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER)), _language(4, 128)


def qwen3() -> tuple[nn.Module, Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_DECODER, head_dim=32)), _language(4, 128)


def mixtral() -> tuple[nn.Module, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config), _language(4, 64)


def mamba() -> tuple[nn.Module, Any]:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=N_TOKENS, hidden_size=64, state_size=8, num_hidden_layers=2, use_cache=False
    )
    return MambaForCausalLM(config), _language(4, 48)


def bert() -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=N_TOKENS,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=128,
        num_labels=N_CLASSES,
    )
    tokens = _tokens(8, 64)
    mask = torch.ones_like(tokens)
    mask[1, 40:] = 0  # one sequence is shorter
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": torch.arange(8) % N_CLASSES}
    return BertForSequenceClassification(config), batch


def t5() -> tuple[nn.Module, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=N_TOKENS,
        d_model=96,
        d_kv=24,
        d_ff=192,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config), _language(4, 64)


def _images(n_images: int, size: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(n_images, 3, size, size),
        "labels": torch.arange(n_images) % N_CLASSES,
    }


def vit() -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        image_size=64,
        patch_size=8,
        num_labels=N_CLASSES,
    )
    return ViTForImageClassification(config), _images(8, 64)


def convnext() -> tuple[nn.Module, Any]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 2, 1],
        image_size=64,
        drop_path_rate=0.1,
        num_labels=N_CLASSES,
    )
    return ConvNextForImageClassification(config), _images(8, 64)


def resnet() -> tuple[nn.Module, Any]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64], depths=[2, 2, 2], num_labels=N_CLASSES
    )
    return ResNetForImageClassification(config), _images(8, 64)


def clip() -> tuple[nn.Module, Any]:
    """With its contrastive loss over the batch."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    text = CLIPTextConfig(
        **shape,
        num_attention_heads=4,
        vocab_size=N_TOKENS,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    vision = CLIPVisionConfig(**shape, num_attention_heads=4, image_size=64, patch_size=8)
    config = CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=32
    )
    tokens = _tokens(8, 24)
    tokens[:, -1] = 2
    batch = {
        "input_ids": tokens,
        "pixel_values": torch.randn(8, 3, 64, 64),
        "return_loss": True,
    }
    return CLIPModel(config), batch


def unet2d_condition() -> tuple[nn.Module, Any]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    batch = {
        "sample": torch.randn(2, 4, 32, 32),
        "timestep": torch.tensor([10, 500]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "noise": torch.randn(2, 4, 32, 32),
    }
    return model, batch


def denoising_inputs(batch: Any) -> Any:
    return {name: value for name, value in batch.items() if name != "noise"}


def denoising_loss(output: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(output.sample, batch["noise"])
