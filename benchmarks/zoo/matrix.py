"""The models of `benchmarks.matrix`: each with a batch, and where its loss is computed.

Models of transformers and diffusers are built from configurations, so nothing is downloaded, and
keep the library's default dropout. Sizes are chosen so that activations take more memory than
parameters, and a step takes at most a second on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo import written
from examples import unet

N_TOKENS = 400
N_CLASSES = written.N_CLASSES


@dataclass(frozen=True)
class Entry:
    """A model of the matrix.

    build: returns the model and its batch, which depend on nothing but the random state.
    loss: as in `solve`: (output, batch) -> loss (None: the model returns its loss).
    inputs: as in `solve`: batch -> arguments of the model (None: the whole batch).
    large: the search takes minutes, so tests skip the model.
    """

    build: Callable[[], tuple[nn.Module, Any]]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    inputs: Callable[[Any], Any] | None = None
    large: bool = False

    def model_and_batch(self, seed: int = 0) -> tuple[nn.Module, Any]:
        """The model, in training mode, and its batch."""
        torch.manual_seed(seed)
        model, batch = self.build()
        return model.train(), batch

    @property
    def options(self) -> dict[str, Any]:
        """Options of `solve` for this model."""
        return {"loss": self.loss, "inputs": self.inputs}


LOSS_INSIDE = Entry(lambda: (nn.Identity(), None))
"""For any model that is called with the whole batch and returns its loss; its `build` is unused."""


def _transformers_entry(name: str, batch: Callable[[], dict[str, Any]], **config: Any) -> Entry:
    def build() -> tuple[nn.Module, Any]:
        import transformers

        kind = getattr(transformers, name)
        return kind(kind.config_class(**config)), batch()

    return Entry(build)


def _tokens(n_rows: int, n_columns: int) -> torch.Tensor:
    return torch.randint(3, N_TOKENS, (n_rows, n_columns))


def _language_batch(n_rows: int, n_columns: int) -> Callable[[], dict[str, torch.Tensor]]:
    def batch() -> dict[str, torch.Tensor]:
        tokens = _tokens(n_rows, n_columns)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return batch


def _sentences() -> dict[str, torch.Tensor]:
    tokens = _tokens(8, 64)
    mask = torch.ones_like(tokens)
    mask[1, 40:] = 0  # one sequence is shorter
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.arange(8) % N_CLASSES}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.arange(8) % N_CLASSES}


def _labelled_images(n_images: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n_images, 3, size, size), torch.arange(n_images) % N_CLASSES


_LANGUAGE = {"vocab_size": N_TOKENS, "use_cache": False}
_GPT2 = _LANGUAGE | {
    "n_layer": 4,
    "n_embd": 128,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_DECODER = _LANGUAGE | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_ENCODER = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "num_labels": N_CLASSES,
}


def _clip() -> tuple[nn.Module, Any]:
    """CLIP with its contrastive loss over the batch."""
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
    pixels = torch.randn(8, 3, 64, 64)
    return CLIPModel(config), {"input_ids": tokens, "pixel_values": pixels, "return_loss": True}


def _unet2d_condition() -> tuple[nn.Module, Any]:
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
    return model, {
        "sample": torch.randn(2, 4, 32, 32),
        "timestep": torch.tensor([10, 500]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "noise": torch.randn(2, 4, 32, 32),
    }


def _graph_network() -> tuple[nn.Module, Any]:
    return written.GraphNet(n_layers=4, width=32), {
        "nodes": torch.randn(300, 8),
        "edges": torch.randint(0, 300, (2, 1500)),
        "target": torch.randn(300, 1),
    }


def _recurrent_model(cell: type[nn.Module]) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (
        written.Recurrent(cell(16, 16), 16, 20),  # type: ignore[call-arg]
        torch.randint(0, 20, (8, 1000)),
    )


ZOO: Mapping[str, Entry] = {
    "GPT-2": _transformers_entry("GPT2LMHeadModel", _language_batch(4, 128), **_GPT2),
    "GPT-2, many tokens": _transformers_entry(
        "GPT2LMHeadModel",
        _language_batch(4, 128),
        # a vocabulary so large that the loss can run in row chunks
        **_GPT2 | {"vocab_size": 8192, "n_layer": 2, "n_embd": 64},
    ),
    "Llama": _transformers_entry("LlamaForCausalLM", _language_batch(4, 128), **_DECODER),
    "Qwen3": _transformers_entry(
        "Qwen3ForCausalLM", _language_batch(4, 128), **_DECODER, head_dim=32
    ),
    "Mixtral": _transformers_entry(
        "MixtralForCausalLM",
        _language_batch(4, 64),
        **_DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "Mamba": _transformers_entry(
        "MambaForCausalLM",
        _language_batch(4, 48),
        **_LANGUAGE,
        hidden_size=64,
        state_size=8,
        num_hidden_layers=2,
    ),
    "BERT": _transformers_entry(
        "BertForSequenceClassification",
        _sentences,
        **_ENCODER,
        vocab_size=N_TOKENS,
        max_position_embeddings=128,
    ),
    "T5": _transformers_entry(
        "T5ForConditionalGeneration",
        _language_batch(4, 64),
        **_LANGUAGE,
        d_model=96,
        d_kv=24,
        d_ff=192,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "ViT": _transformers_entry(
        "ViTForImageClassification", _images, **_ENCODER, image_size=64, patch_size=8
    ),
    "ConvNeXt": _transformers_entry(
        "ConvNextForImageClassification",
        _images,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 2, 1],
        image_size=64,
        drop_path_rate=0.1,
        num_labels=N_CLASSES,
    ),
    "ResNet": _transformers_entry(
        "ResNetForImageClassification",
        _images,
        embedding_size=16,
        hidden_sizes=[16, 32, 64],
        depths=[2, 2, 2],
        num_labels=N_CLASSES,
    ),
    "CLIP": Entry(_clip),
    "UNet2DConditionModel": Entry(
        _unet2d_condition,
        loss=lambda output, batch: F.mse_loss(output.sample, batch["noise"]),
        inputs=lambda batch: {name: value for name, value in batch.items() if name != "noise"},
    ),
    "ResNet-1001": Entry(
        lambda: (written.DeepResNet(n_blocks=111, width=2), _labelled_images(2, 16)), large=True
    ),
    "VGG": Entry(
        lambda: (
            written.Vgg([(16, 16), (32, 32), (48, 48)], image_size=32),
            _labelled_images(8, 32),
        ),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        inputs=lambda batch: batch[0],
    ),
    "U-Net": Entry(lambda: (unet.get_model(width=8, n_levels=2), unet.get_batch(2, 64))),
    "DenseNet": Entry(lambda: (written.densenet_small(), _labelled_images(4, 32))),
    "LSTM cells, 1000 steps": Entry(_recurrent_model(nn.LSTMCell), large=True),
    "GRU cells, 1000 steps": Entry(_recurrent_model(nn.GRUCell), large=True),
    "graph network": Entry(_graph_network),
    "several losses": Entry(
        lambda: (written.SeveralLosses(128), (torch.randn(512, 64), torch.arange(512) % N_CLASSES)),
        loss=lambda output, _batch: (
            output["reconstruction"] + 0.5 * output["classes"] + 0.1 * output["divergence"]
        ),
    ),
}
