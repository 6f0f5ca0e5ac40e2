"""Families of models in the transformers library: tiny configurations, and batches as its tests'.

Each is built from its configuration class, so nothing is downloaded, and keeps the library's
defaults for dropout and layer drop. Sizes are those of transformers' own `ModelTester` classes or a
little above: two layers, a width of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

N_TOKENS = 99
N_CLASSES = 3
ROWS, LENGTH = 8, 32
SIDE = 32
"""Of images, in pixels."""

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A model class with a tiny configuration.

    kind: its class in transformers.
    config: arguments of its configuration class; a callable returns the configuration itself.
    batches: by name, functions that return the arguments of `forward`.
    """

    kind: str
    batches: Mapping[str, Callable[[], Inputs]]
    config: Mapping[str, Any] | Callable[[], Any] = field(default_factory=dict)

    def made(self, batch: str) -> tuple[nn.Module, Inputs]:
        """The model, in training mode, and this batch; the same each time."""
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, self.kind)
        config = self.config() if callable(self.config) else kind.config_class(**self.config)
        model = kind(config).train()
        for module in model.modules():  # as the library's Trainer sets it
            if getattr(getattr(module, "config", None), "use_cache", False):
                module.config.use_cache = False
        return model, self.batches[batch]()


def _tokens(n_rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(5, N_TOKENS, (n_rows, length))  # the first five are special


def _padded(tokens: torch.Tensor) -> torch.Tensor:
    """A mask: the rows have different lengths."""
    lengths = torch.linspace(tokens.shape[1], tokens.shape[1] // 4, len(tokens)).long()
    return (torch.arange(tokens.shape[1]) < lengths[:, None]).long()


def _classes() -> torch.Tensor:
    return torch.arange(ROWS) % N_CLASSES


def _text(
    labels: Callable[[torch.Tensor], torch.Tensor], *, length: int = LENGTH, name: str = "labels"
) -> dict[str, Callable[[], Inputs]]:
    """Batches with a mask of ones, and with rows of different lengths."""

    def batch(mask: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        tokens = _tokens(length=length)
        return {"input_ids": tokens, "attention_mask": mask(tokens), name: labels(tokens)}

    return {"ones": lambda: batch(torch.ones_like), "padded": lambda: batch(_padded)}


_LANGUAGE = _text(torch.clone)
_SENTENCES = _text(lambda _: _classes())


def _unmasked() -> Inputs:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens.clone()}


def _one(batch: Callable[[], Inputs]) -> dict[str, Callable[[], Inputs]]:
    return {"": batch}


def _pixels(n_rows: int = ROWS, side: int = SIDE) -> torch.Tensor:
    return torch.randn(n_rows, 3, side, side)


def _classified(side: int = SIDE) -> dict[str, Callable[[], Inputs]]:
    return _one(lambda: {"pixel_values": _pixels(side=side), "labels": _classes()})


def _segmented(side: int) -> dict[str, Callable[[], Inputs]]:
    def batch() -> Inputs:
        return {
            "pixel_values": _pixels(2, side),
            "labels": torch.randint(0, N_CLASSES, (2, side, side)),
        }

    return _one(batch)


def _detected() -> Inputs:
    """Two images with one and two boxes."""
    boxes = [torch.rand(n, 4) * 0.4 + 0.1 for n in (1, 2)]
    labels = [{"class_labels": torch.arange(len(b)), "boxes": b} for b in boxes]
    return {"pixel_values": _pixels(2, 64), "labels": labels}


def _captioned(*, generated: bool = False) -> dict[str, Callable[[], Inputs]]:
    """Images with texts: for a contrastive loss, or one of the text generated."""

    def batch(mask: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        tokens = _tokens(length=16)
        tokens[:, -1] = 2  # the end
        inputs = {"input_ids": tokens, "attention_mask": mask(tokens)}
        loss = {"labels": tokens.clone()} if generated else {"return_loss": True}
        return inputs | {"pixel_values": _pixels()} | loss

    return {"ones": lambda: batch(torch.ones_like), "padded": lambda: batch(_padded)}


def _speech() -> dict[str, Callable[[], Inputs]]:
    """Waveforms with transcriptions, for the CTC loss."""

    def batch(*, padded: bool) -> Inputs:
        waves = torch.randn(4, 2048)
        inputs = {"input_values": waves, "labels": torch.randint(1, 31, (4, 6))}
        if padded:
            lengths = torch.tensor([2048, 2000, 1600, 1400])
            mask = (torch.arange(2048) < lengths[:, None]).long()
            inputs |= {"attention_mask": mask, "input_values": waves * mask}
        return inputs

    return {"ones": lambda: batch(padded=False), "padded": lambda: batch(padded=True)}


def _spectra(n_rows: int = 4) -> Inputs:
    return {"input_features": torch.randn(n_rows, 80, 60), "labels": _tokens(n_rows, 12)}


def _series() -> Inputs:
    """For the models of the time series library: lags up to 7 steps, two time features."""
    past = 14 + 7
    return {
        "past_values": torch.randn(ROWS, past),
        "past_time_features": torch.randn(ROWS, past, 2),
        "past_observed_mask": torch.ones(ROWS, past),
        "future_values": torch.randn(ROWS, 7),
        "future_time_features": torch.randn(ROWS, 7, 2),
    }


def _patches() -> Inputs:
    return {"past_values": torch.randn(ROWS, 32, 4), "future_values": torch.randn(ROWS, 8, 4)}


def _answers(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(tokens)) % 4


def _questions() -> dict[str, Callable[[], Inputs]]:
    """For question answering: where the answer begins and ends."""

    def with_ends(batch: Callable[[], Inputs]) -> Callable[[], Inputs]:
        return lambda: {**(b := batch()), "end_positions": b["start_positions"] + 3}

    batches = _text(_answers, name="start_positions")
    return {name: with_ends(batch) for name, batch in batches.items()}


_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_DECODER = {"vocab_size": N_TOKENS, "max_position_embeddings": 64, **_LAYERS, **_ENDS}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_EXPERTS = _GROUPED | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_ENCODER = _DECODER | {"type_vocab_size": 2, "num_labels": N_CLASSES}
_GPT = {"vocab_size": N_TOKENS, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, **_ENDS}
_SEQUENCES = {
    "vocab_size": N_TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    **_ENDS,
}
_T5 = {
    "vocab_size": N_TOKENS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_VISION = _LAYERS | {"image_size": SIDE, "patch_size": 8, "num_labels": N_CLASSES}
_WAVES = _LAYERS | {
    "vocab_size": 32,
    "conv_dim": (32, 32, 32),
    "conv_stride": (4, 4, 4),
    "conv_kernel": (8, 8, 8),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_time_length": 2,
}
_STAGES = {"num_labels": N_CLASSES, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
_SERIES = {
    "prediction_length": 7,
    "context_length": 14,
    "lags_sequence": [1, 2, 3, 4, 5, 6, 7],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}


def _two_towers(name: str, vision: Mapping[str, Any], **more: Any) -> Callable[[], Any]:
    """The configuration of a model with a tower for texts and one for images."""

    def config() -> Any:
        import transformers

        return getattr(transformers, f"{name}Config")(
            text_config=dict(_ENCODER), vision_config=dict(vision), **more
        )

    return config


def _detr() -> Any:
    from transformers import DetrConfig, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        out_features=["stage4"],
        out_indices=[4],
    )
    about = {name: value for name, value in _SEQUENCES.items() if name in _DETR_FIELDS}
    return DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_queries=6,
        num_labels=N_CLASSES,
        **about,
    )


_DETR_FIELDS = {
    "d_model",
    *(f"{side}_{what}" for side in ("encoder", "decoder") for what in ("layers", "ffn_dim")),
    *(f"{side}_attention_heads" for side in ("encoder", "decoder")),
}

FAMILIES: Mapping[str, Family] = {
    # decoders
    "gpt2": Family("GPT2LMHeadModel", _LANGUAGE, _GPT),
    "openai-gpt": Family("OpenAIGPTLMHeadModel", _LANGUAGE, _GPT),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        _LANGUAGE,
        _DECODER | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "gptj": Family("GPTJForCausalLM", _LANGUAGE, _GPT | {"rotary_dim": 4}),
    "gpt_neox": Family("GPTNeoXForCausalLM", _LANGUAGE, _DECODER),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", _LANGUAGE, _GPT),
    "codegen": Family("CodeGenForCausalLM", _LANGUAGE, _GPT | {"rotary_dim": 4}),
    "opt": Family(
        "OPTForCausalLM", _LANGUAGE, _DECODER | {"ffn_dim": 64, "word_embed_proj_dim": 32}
    ),
    "bloom": Family(
        "BloomForCausalLM",
        _LANGUAGE,
        {"vocab_size": N_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_ENDS},
    ),
    "llama": Family("LlamaForCausalLM", _LANGUAGE, _GROUPED),
    "mistral": Family("MistralForCausalLM", _LANGUAGE, _GROUPED | {"sliding_window": 16}),
    "mixtral": Family("MixtralForCausalLM", _LANGUAGE, _GROUPED | {"num_local_experts": 4}),
    "qwen2": Family("Qwen2ForCausalLM", _LANGUAGE, _GROUPED),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", _LANGUAGE, _EXPERTS | {"shared_expert_intermediate_size": 32}
    ),
    "qwen3": Family("Qwen3ForCausalLM", _LANGUAGE, _GROUPED | {"head_dim": 8}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _LANGUAGE, _EXPERTS | {"head_dim": 8}),
    "gemma": Family("GemmaForCausalLM", _LANGUAGE, _GROUPED | {"head_dim": 8}),
    "gemma2": Family(
        "Gemma2ForCausalLM", _LANGUAGE, _GROUPED | {"head_dim": 8, "sliding_window": 16}
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM", _LANGUAGE, _GROUPED | {"head_dim": 8, "sliding_window": 16}
    ),
    "phi": Family("PhiForCausalLM", _LANGUAGE, _DECODER),
    "phi3": Family("Phi3ForCausalLM", _LANGUAGE, _GROUPED),
    "falcon": Family("FalconForCausalLM", _LANGUAGE, _DECODER),
    "stablelm": Family("StableLmForCausalLM", _LANGUAGE, _GROUPED),
    "olmo": Family("OlmoForCausalLM", _LANGUAGE, _GROUPED),
    "olmo2": Family("Olmo2ForCausalLM", _LANGUAGE, _GROUPED),
    "olmoe": Family("OlmoeForCausalLM", _LANGUAGE, _EXPERTS),
    "starcoder2": Family("Starcoder2ForCausalLM", _LANGUAGE, _GROUPED),
    "cohere": Family("CohereForCausalLM", _LANGUAGE, _GROUPED),
    "granite": Family("GraniteForCausalLM", _LANGUAGE, _GROUPED),
    "glm": Family("GlmForCausalLM", _LANGUAGE, _GROUPED | {"head_dim": 8}),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _LANGUAGE,
        _GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _LANGUAGE,
        _DECODER
        | {
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "mamba": Family(
        "MambaForCausalLM", _LANGUAGE, _DECODER | {"state_size": 4, "use_cache": False}
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        _LANGUAGE,
        _DECODER | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8, "state_size": 8},
    ),
    "jamba": Family(
        "JambaForCausalLM",
        _LANGUAGE,
        _GROUPED
        | {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
        },
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaForCausalLM", _LANGUAGE, _GROUPED | {"num_hidden_layers": 3}
    ),
    "rwkv": Family(
        "RwkvForCausalLM",
        _one(_unmasked),
        _DECODER | {"attention_hidden_size": 32, "context_length": 64},
    ),
    "xlnet": Family(
        "XLNetLMHeadModel",
        _LANGUAGE,
        {"vocab_size": N_TOKENS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
    "ctrl": Family("CTRLLMHeadModel", _LANGUAGE, _GPT | {"dff": 64}),
    "xglm": Family(
        "XGLMForCausalLM",
        _LANGUAGE,
        _DECODER | {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    ),
    # encoders
    "bert": Family("BertForMaskedLM", _LANGUAGE, _ENCODER),
    "roberta": Family("RobertaForSequenceClassification", _SENTENCES, _ENCODER),
    "albert": Family("AlbertForMaskedLM", _LANGUAGE, _ENCODER | {"embedding_size": 16}),
    "distilbert": Family(
        "DistilBertForSequenceClassification",
        _SENTENCES,
        {
            "vocab_size": N_TOKENS,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 64,
            "num_labels": N_CLASSES,
        },
    ),
    "electra": Family(
        "ElectraForTokenClassification",
        _text(lambda tokens: tokens % N_CLASSES),
        _ENCODER | {"embedding_size": 16},
    ),
    "deberta": Family("DebertaForMaskedLM", _LANGUAGE, _ENCODER | {"relative_attention": True}),
    "deberta_v2": Family(
        "DebertaV2ForSequenceClassification",
        _SENTENCES,
        _ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "mpnet": Family("MPNetForQuestionAnswering", _questions(), _ENCODER | {"num_labels": 2}),
    "modernbert": Family("ModernBertForMaskedLM", _LANGUAGE, _ENCODER),
    "convbert": Family("ConvBertForMaskedLM", _LANGUAGE, _ENCODER | {"embedding_size": 32}),
    "funnel": Family(
        "FunnelForMaskedLM",
        _LANGUAGE,
        {
            "vocab_size": N_TOKENS,
            "block_sizes": [1, 2],
            "num_decoder_layers": 1,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
        },
    ),
    "fnet": Family("FNetForMaskedLM", _one(_unmasked), _ENCODER),
    "nystromformer": Family(
        "NystromformerForMaskedLM",
        _LANGUAGE,
        _ENCODER | {"segment_means_seq_len": 32, "num_landmarks": 32},
    ),
    "longformer": Family(
        "LongformerForMaskedLM",
        _LANGUAGE,
        _ENCODER | {"attention_window": 8, "max_position_embeddings": 80},
    ),
    "big_bird": Family(
        "BigBirdForMaskedLM",
        _text(torch.clone, length=64),
        _ENCODER
        | {
            "max_position_embeddings": 128,
            "attention_type": "block_sparse",
            "block_size": 8,
            "num_random_blocks": 1,
        },
    ),
    "reformer": Family(
        "ReformerModelWithLMHead",
        _LANGUAGE,
        {
            "vocab_size": N_TOKENS,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "attention_head_size": 16,
            "feed_forward_size": 32,
            "attn_layers": ["local", "local"],
            "local_attn_chunk_length": 8,
            "axial_pos_shape": [4, 8],
            "axial_pos_embds_dim": [16, 16],
            "is_decoder": True,
            "use_cache": False,
            **_ENDS,
        },
    ),
    # sequence to sequence
    "t5": Family("T5ForConditionalGeneration", _LANGUAGE, _T5),
    "mt5": Family("MT5ForConditionalGeneration", _LANGUAGE, _T5),
    "switch_transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        _LANGUAGE,
        _T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "longt5": Family("LongT5ForConditionalGeneration", _LANGUAGE, _T5 | {"local_radius": 4}),
    "bart": Family("BartForConditionalGeneration", _LANGUAGE, _SEQUENCES),
    "mbart": Family("MBartForConditionalGeneration", _LANGUAGE, _SEQUENCES),
    "pegasus": Family("PegasusForConditionalGeneration", _LANGUAGE, _SEQUENCES),
    "marian": Family("MarianMTModel", _LANGUAGE, _SEQUENCES),
    "m2m_100": Family(
        "M2M100ForConditionalGeneration", _LANGUAGE, _SEQUENCES | {"encoder_layerdrop": 0.1}
    ),
    "blenderbot": Family("BlenderbotForConditionalGeneration", _LANGUAGE, _SEQUENCES),
    "prophetnet": Family(
        "ProphetNetForConditionalGeneration",
        _LANGUAGE,
        {
            "vocab_size": N_TOKENS,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 64,
            "ngram": 2,
            "decoder_start_token_id": 0,
            **_ENDS,
        },
    ),
    "led": Family(
        "LEDForConditionalGeneration",
        _LANGUAGE,
        {k: v for k, v in _SEQUENCES.items() if k != "max_position_embeddings"}
        | {
            "attention_window": 8,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    # speech
    "whisper": Family(
        "WhisperForConditionalGeneration",
        _one(_spectra),
        _SEQUENCES | {"max_source_positions": 30, "max_target_positions": 40},
    ),
    "speech_to_text": Family(
        "Speech2TextForConditionalGeneration",
        _one(lambda: {"input_features": torch.randn(4, 40, 16), "labels": _tokens(4, 12)}),
        _SEQUENCES
        | {
            "input_feat_per_channel": 16,
            "input_channels": 1,
            "conv_channels": 32,
            "conv_kernel_sizes": (3, 3),
            "num_conv_layers": 2,
            "max_source_positions": 40,
            "max_target_positions": 40,
        },
    ),
    "wav2vec2": Family("Wav2Vec2ForCTC", _speech(), _WAVES),
    "hubert": Family("HubertForCTC", _speech(), _WAVES),
    "wavlm": Family("WavLMForCTC", _speech(), _WAVES),
    "sew": Family("SEWForCTC", _speech(), _WAVES | {"squeeze_factor": 2}),
    "audio-spectrogram-transformer": Family(
        "ASTForAudioClassification",
        _one(lambda: {"input_values": torch.randn(ROWS, 24, 16), "labels": _classes()}),
        _LAYERS
        | {
            "num_labels": N_CLASSES,
            "patch_size": 2,
            "max_length": 24,
            "num_mel_bins": 16,
            "frequency_stride": 2,
            "time_stride": 2,
        },
    ),
    # images
    "vit": Family("ViTForImageClassification", _classified(), _VISION),
    "deit": Family("DeiTForImageClassification", _classified(), _VISION),
    "beit": Family("BeitForImageClassification", _classified(), _VISION),
    "dinov2": Family("Dinov2ForImageClassification", _classified(), _VISION),
    "vit_mae": Family(
        "ViTMAEForPreTraining",
        _one(lambda: {"pixel_values": _pixels()}),
        _VISION
        | {
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
        },
    ),
    "swin": Family(
        "SwinForImageClassification",
        _classified(),
        {
            "image_size": SIDE,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 2, 1],
            "num_heads": [2, 2, 4],
            "window_size": 2,
            "num_labels": N_CLASSES,
        },
    ),
    "convnext": Family(
        "ConvNextForImageClassification", _classified(64), _STAGES | {"drop_path_rate": 0.1}
    ),
    "convnextv2": Family("ConvNextV2ForImageClassification", _classified(64), _STAGES),
    "resnet": Family(
        "ResNetForImageClassification", _classified(64), _STAGES | {"embedding_size": 16}
    ),
    "regnet": Family(
        "RegNetForImageClassification",
        _classified(64),
        _STAGES | {"embedding_size": 16, "groups_width": 8},
    ),
    "mobilenet_v2": Family(
        "MobileNetV2ForImageClassification",
        _classified(),
        {
            "num_labels": N_CLASSES,
            "depth_multiplier": 0.25,
            "depth_divisible_by": 8,
            "min_depth": 8,
        },
    ),
    "efficientnet": Family(
        "EfficientNetForImageClassification",
        _classified(),
        {
            "image_size": SIDE,
            "kernel_sizes": [3, 3, 5],
            "in_channels": [32, 16, 24],
            "out_channels": [16, 24, 20],
            "strides": [1, 1, 2],
            "num_block_repeats": [1, 1, 2],
            "expand_ratios": [1, 6, 1],
            "hidden_dim": 1280,
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
            "num_labels": N_CLASSES,
        },
    ),
    "mobilevit": Family(
        "MobileViTForImageClassification",
        _classified(),
        {
            "image_size": SIDE,
            "patch_size": 2,
            "hidden_sizes": [32, 48, 64],
            "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 64],
            "num_labels": N_CLASSES,
        },
    ),
    "poolformer": Family(
        "PoolFormerForImageClassification",
        _classified(64),
        {"num_labels": N_CLASSES, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1]},
    ),
    "segformer": Family(
        "SegformerForSemanticSegmentation",
        _segmented(64),
        {
            "num_labels": N_CLASSES,
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    "dpt": Family(
        "DPTForSemanticSegmentation",
        _segmented(SIDE),
        _VISION
        | {
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 16,
            "is_hybrid": False,
        },
    ),
    "detr": Family("DetrForObjectDetection", _one(_detected), _detr),
    "yolos": Family(
        "YolosForObjectDetection",
        _one(_detected),
        _VISION | {"image_size": [64, 64], "num_detection_tokens": 6},
    ),
    "perceiver": Family(
        "PerceiverForMaskedLM",
        _text(torch.clone),
        {
            "vocab_size": N_TOKENS,
            "max_position_embeddings": 32,
            "num_latents": 8,
            "d_latents": 16,
            "d_model": 32,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "qk_channels": 16,
            "v_channels": 16,
        },
    ),
    # images and texts
    "clip": Family("CLIPModel", _captioned(), _two_towers("CLIP", _VISION, projection_dim=16)),
    "siglip": Family("SiglipModel", _captioned(), _two_towers("Siglip", _VISION)),
    "blip": Family(
        "BlipForConditionalGeneration",
        _captioned(generated=True),
        _two_towers("Blip", _VISION, projection_dim=16),
    ),
    "git": Family(
        "GitForCausalLM",
        _one(lambda: {**_unmasked(), "pixel_values": _pixels()}),
        _DECODER | {"vision_config": _VISION},
    ),
    "vilt": Family(
        "ViltForQuestionAnswering",
        _one(
            lambda: {
                "input_ids": _tokens(),
                "pixel_values": _pixels(),
                "pixel_mask": torch.ones(ROWS, SIDE, SIDE, dtype=torch.int64),
                "labels": torch.rand(ROWS, N_CLASSES),
            }
        ),
        _ENCODER | {"image_size": SIDE, "patch_size": 8},
    ),
    "layoutlm": Family(
        "LayoutLMForMaskedLM", _LANGUAGE, _ENCODER | {"max_2d_position_embeddings": 64}
    ),
    # time series and decisions
    "time_series_transformer": Family("TimeSeriesTransformerForPrediction", _one(_series), _SERIES),
    "informer": Family("InformerForPrediction", _one(_series), _SERIES),
    "autoformer": Family(
        "AutoformerForPrediction", _one(_series), _SERIES | {"label_length": 7, "moving_average": 5}
    ),
    "patchtst": Family(
        "PatchTSTForPrediction",
        _one(_patches),
        {
            "num_input_channels": 4,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
    "patchtsmixer": Family(
        "PatchTSMixerForPrediction",
        _one(_patches),
        {
            "num_input_channels": 4,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "num_layers": 2,
        },
    ),
}
