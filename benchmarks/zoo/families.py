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

from benchmarks.zoo.family_batches import (
    LANGUAGE,
    N_CLASSES,
    N_TOKENS,
    ROWS,
    SENTENCES,
    SIDE,
    Inputs,
    captioned,
    class_of_row,
    classified,
    detected,
    images,
    one_batch,
    patched_series,
    questions,
    random_tokens,
    segmented,
    spectra,
    speech,
    texts,
    time_series,
    unmasked,
)
from benchmarks.zoo.matrix import LOSS_INSIDE, Entry


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

    @property
    def entry(self) -> Entry:
        """How its steps go: the model returns the loss."""
        return LOSS_INSIDE

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


def _sides(*, n_heads: int, ffn_dim: int) -> dict[str, int]:
    """An encoder and a decoder of two layers."""
    of_each = {"layers": 2, "attention_heads": n_heads, "ffn_dim": ffn_dim}
    return {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in of_each.items()}


# fmt: off
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64}
_DECODER = {"vocab_size": N_TOKENS, "max_position_embeddings": 64, **_LAYERS, **_ENDS}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_EXPERTS = _GROUPED | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_ENCODER = _DECODER | {"type_vocab_size": 2, "num_labels": N_CLASSES}
_GPT = {"vocab_size": N_TOKENS, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, **_ENDS}
_SEQUENCES = {"vocab_size": N_TOKENS, "d_model": 32, **_sides(n_heads=4, ffn_dim=64),
    "max_position_embeddings": 64, "decoder_start_token_id": 2, **_ENDS}
_T5 = {"vocab_size": N_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
    "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
_VISION = _LAYERS | {"image_size": SIDE, "patch_size": 8, "num_labels": N_CLASSES}
_WAVES = _LAYERS | {"vocab_size": 32, "conv_dim": (32, 32, 32), "conv_stride": (4, 4, 4),
    "conv_kernel": (8, 8, 8), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_time_length": 2}
_STAGES = {"num_labels": N_CLASSES, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
_SERIES = {"prediction_length": 7, "context_length": 14, "lags_sequence": [1, 2, 3, 4, 5, 6, 7],
    "num_time_features": 2, "d_model": 16, **_sides(n_heads=2, ffn_dim=32)}
# fmt: on


def _two_towers(name: str, **more: Any) -> Callable[[], Any]:
    """The configuration of a model with a tower for texts and one for images."""

    def config() -> Any:
        import transformers

        return getattr(transformers, f"{name}Config")(
            text_config=dict(_ENCODER), vision_config=dict(_VISION), **more
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
    return DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_queries=6,
        num_labels=N_CLASSES,
        d_model=32,
        **_sides(n_heads=4, ffn_dim=64),
    )


# fmt: off
FAMILIES: Mapping[str, Family] = {
    # decoders
    "gpt2": Family("GPT2LMHeadModel", LANGUAGE, _GPT),
    "openai-gpt": Family("OpenAIGPTLMHeadModel", LANGUAGE, _GPT),
    "gpt_neo": Family("GPTNeoForCausalLM", LANGUAGE, _DECODER | {"num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]]}),
    "gptj": Family("GPTJForCausalLM", LANGUAGE, _GPT | {"rotary_dim": 4}),
    "gpt_neox": Family("GPTNeoXForCausalLM", LANGUAGE, _DECODER),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", LANGUAGE, _GPT),
    "codegen": Family("CodeGenForCausalLM", LANGUAGE, _GPT | {"rotary_dim": 4}),
    "opt": Family("OPTForCausalLM", LANGUAGE, _DECODER | {"ffn_dim": 64,
        "word_embed_proj_dim": 32}),
    "bloom": Family("BloomForCausalLM", LANGUAGE, {"vocab_size": N_TOKENS, "hidden_size": 32,
        "n_layer": 2, "n_head": 4, **_ENDS}),
    "llama": Family("LlamaForCausalLM", LANGUAGE, _GROUPED),
    "mistral": Family("MistralForCausalLM", LANGUAGE, _GROUPED | {"sliding_window": 16}),
    "mixtral": Family("MixtralForCausalLM", LANGUAGE, _GROUPED | {"num_local_experts": 4}),
    "qwen2": Family("Qwen2ForCausalLM", LANGUAGE, _GROUPED),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", LANGUAGE, _EXPERTS
        | {"shared_expert_intermediate_size": 32}),
    "qwen3": Family("Qwen3ForCausalLM", LANGUAGE, _GROUPED | {"head_dim": 8}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", LANGUAGE, _EXPERTS | {"head_dim": 8}),
    "gemma": Family("GemmaForCausalLM", LANGUAGE, _GROUPED | {"head_dim": 8}),
    "gemma2": Family("Gemma2ForCausalLM", LANGUAGE, _GROUPED | {"head_dim": 8,
        "sliding_window": 16}),
    "gemma3": Family("Gemma3ForCausalLM", LANGUAGE, _GROUPED | {"head_dim": 8,
        "sliding_window": 16}),
    "phi": Family("PhiForCausalLM", LANGUAGE, _DECODER),
    "phi3": Family("Phi3ForCausalLM", LANGUAGE, _GROUPED),
    "falcon": Family("FalconForCausalLM", LANGUAGE, _DECODER),
    "stablelm": Family("StableLmForCausalLM", LANGUAGE, _GROUPED),
    "olmo": Family("OlmoForCausalLM", LANGUAGE, _GROUPED),
    "olmo2": Family("Olmo2ForCausalLM", LANGUAGE, _GROUPED),
    "olmoe": Family("OlmoeForCausalLM", LANGUAGE, _EXPERTS),
    "starcoder2": Family("Starcoder2ForCausalLM", LANGUAGE, _GROUPED),
    "cohere": Family("CohereForCausalLM", LANGUAGE, _GROUPED),
    "granite": Family("GraniteForCausalLM", LANGUAGE, _GROUPED),
    "glm": Family("GlmForCausalLM", LANGUAGE, _GROUPED | {"head_dim": 8}),
    "gpt_oss": Family("GptOssForCausalLM", LANGUAGE, _GROUPED | {"head_dim": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", LANGUAGE, _DECODER
        | {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}),
    "mamba": Family("MambaForCausalLM", LANGUAGE, _DECODER | {"state_size": 4, "use_cache": False}),
    "mamba2": Family("Mamba2ForCausalLM", LANGUAGE, _DECODER | {"num_heads": 8, "head_dim": 8,
        "n_groups": 1, "chunk_size": 8, "state_size": 8}),
    "jamba": Family("JambaForCausalLM", LANGUAGE, _GROUPED | {"num_experts": 2,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False}),
    "recurrent_gemma": Family("RecurrentGemmaForCausalLM", LANGUAGE, _GROUPED
        | {"num_hidden_layers": 3}),
    "rwkv": Family("RwkvForCausalLM", one_batch(unmasked), _DECODER | {"attention_hidden_size": 32,
        "context_length": 64}),
    "xlnet": Family("XLNetLMHeadModel", LANGUAGE, {"vocab_size": N_TOKENS, "d_model": 32,
        "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "ctrl": Family("CTRLLMHeadModel", LANGUAGE, _GPT | {"dff": 64}),
    "xglm": Family("XGLMForCausalLM", LANGUAGE, _DECODER | {"d_model": 32, "num_layers": 2,
        "attention_heads": 4, "ffn_dim": 64}),
    # encoders
    "bert": Family("BertForMaskedLM", LANGUAGE, _ENCODER),
    "roberta": Family("RobertaForSequenceClassification", SENTENCES, _ENCODER),
    "albert": Family("AlbertForMaskedLM", LANGUAGE, _ENCODER | {"embedding_size": 16}),
    "distilbert": Family("DistilBertForSequenceClassification", SENTENCES, {"vocab_size": N_TOKENS,
        "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64,
        "num_labels": N_CLASSES}),
    "electra": Family("ElectraForTokenClassification", texts(lambda tokens: tokens % N_CLASSES),
        _ENCODER | {"embedding_size": 16}),
    "deberta": Family("DebertaForMaskedLM", LANGUAGE, _ENCODER | {"relative_attention": True}),
    "deberta_v2": Family("DebertaV2ForSequenceClassification", SENTENCES, _ENCODER
        | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "mpnet": Family("MPNetForQuestionAnswering", questions(), _ENCODER | {"num_labels": 2}),
    "modernbert": Family("ModernBertForMaskedLM", LANGUAGE, _ENCODER),
    "convbert": Family("ConvBertForMaskedLM", LANGUAGE, _ENCODER | {"embedding_size": 32}),
    "funnel": Family("FunnelForMaskedLM", LANGUAGE, {"vocab_size": N_TOKENS, "block_sizes": [1, 2],
        "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}),
    "fnet": Family("FNetForMaskedLM", one_batch(unmasked), _ENCODER),
    "nystromformer": Family("NystromformerForMaskedLM", LANGUAGE, _ENCODER
        | {"segment_means_seq_len": 32, "num_landmarks": 32}),
    "longformer": Family("LongformerForMaskedLM", LANGUAGE, _ENCODER | {"attention_window": 8,
        "max_position_embeddings": 80}),
    "big_bird": Family("BigBirdForMaskedLM", texts(torch.clone, length=64), _ENCODER
        | {"max_position_embeddings": 128, "attention_type": "block_sparse", "block_size": 8,
        "num_random_blocks": 1}),
    "reformer": Family("ReformerModelWithLMHead", LANGUAGE, {"vocab_size": N_TOKENS,
        "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16,
        "feed_forward_size": 32, "attn_layers": ["local", "local"], "local_attn_chunk_length": 8,
        "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 16], "is_decoder": True,
        "use_cache": False, **_ENDS}),
    # sequence to sequence
    "t5": Family("T5ForConditionalGeneration", LANGUAGE, _T5),
    "mt5": Family("MT5ForConditionalGeneration", LANGUAGE, _T5),
    "switch_transformers": Family("SwitchTransformersForConditionalGeneration", LANGUAGE, _T5
        | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}),
    "longt5": Family("LongT5ForConditionalGeneration", LANGUAGE, _T5 | {"local_radius": 4}),
    "bart": Family("BartForConditionalGeneration", LANGUAGE, _SEQUENCES),
    "mbart": Family("MBartForConditionalGeneration", LANGUAGE, _SEQUENCES),
    "pegasus": Family("PegasusForConditionalGeneration", LANGUAGE, _SEQUENCES),
    "marian": Family("MarianMTModel", LANGUAGE, _SEQUENCES),
    "m2m_100": Family("M2M100ForConditionalGeneration", LANGUAGE, _SEQUENCES
        | {"encoder_layerdrop": 0.1}),
    "blenderbot": Family("BlenderbotForConditionalGeneration", LANGUAGE, _SEQUENCES),
    "prophetnet": Family("ProphetNetForConditionalGeneration", LANGUAGE, {"vocab_size": N_TOKENS,
        "hidden_size": 32, **{name if name.endswith("dim") else f"num_{name}": value for name, value
        in _sides(n_heads=4, ffn_dim=64).items()}, "max_position_embeddings": 64, "ngram": 2,
        "decoder_start_token_id": 0, **_ENDS}),
    "led": Family("LEDForConditionalGeneration", LANGUAGE, {k: v for k, v in _SEQUENCES.items() if k
        != "max_position_embeddings"} | {"attention_window": 8,
        "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}),
    # speech
    "whisper": Family("WhisperForConditionalGeneration", one_batch(spectra), _SEQUENCES
        | {"max_source_positions": 30, "max_target_positions": 40}),
    "speech_to_text": Family("Speech2TextForConditionalGeneration", one_batch(lambda:
        {"input_features": torch.randn(4, 40, 16), "labels": random_tokens(4, 12)}), _SEQUENCES
        | {"input_feat_per_channel": 16, "input_channels": 1, "conv_channels": 32,
        "conv_kernel_sizes": (3, 3), "num_conv_layers": 2, "max_source_positions": 40,
        "max_target_positions": 40}),
    "wav2vec2": Family("Wav2Vec2ForCTC", speech(), _WAVES),
    "wav2vec2, no time masks": Family("Wav2Vec2ForCTC", speech(), _WAVES
        | {"apply_spec_augment": False}),
    "hubert": Family("HubertForCTC", speech(), _WAVES),
    "hubert, no time masks": Family("HubertForCTC", speech(), _WAVES
        | {"apply_spec_augment": False}),
    "wavlm": Family("WavLMForCTC", speech(), _WAVES),
    "sew": Family("SEWForCTC", speech(), _WAVES | {"squeeze_factor": 2}),
    "audio-spectrogram-transformer": Family("ASTForAudioClassification", one_batch(lambda:
        {"input_values": torch.randn(ROWS, 24, 16), "labels": class_of_row()}), _LAYERS
        | {"num_labels": N_CLASSES, "patch_size": 2, "max_length": 24, "num_mel_bins": 16,
        "frequency_stride": 2, "time_stride": 2}),
    # images
    "vit": Family("ViTForImageClassification", classified(), _VISION),
    "deit": Family("DeiTForImageClassification", classified(), _VISION),
    "beit": Family("BeitForImageClassification", classified(), _VISION),
    "dinov2": Family("Dinov2ForImageClassification", classified(), _VISION),
    "vit_mae": Family("ViTMAEForPreTraining", one_batch(lambda: {"pixel_values": images()}), _VISION
        | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4, "decoder_intermediate_size": 64}),
    "swin": Family("SwinForImageClassification", classified(), {"image_size": SIDE, "patch_size": 2,
        "embed_dim": 16, "depths": [1, 2, 1], "num_heads": [2, 2, 4], "window_size": 2,
        "num_labels": N_CLASSES}),
    "convnext": Family("ConvNextForImageClassification", classified(64), _STAGES
        | {"drop_path_rate": 0.1}),
    "convnextv2": Family("ConvNextV2ForImageClassification", classified(64), _STAGES),
    "resnet": Family("ResNetForImageClassification", classified(64), _STAGES
        | {"embedding_size": 16}),
    "regnet": Family("RegNetForImageClassification", classified(64), _STAGES
        | {"embedding_size": 16, "groups_width": 8}),
    "mobilenet_v2": Family("MobileNetV2ForImageClassification", classified(),
        {"num_labels": N_CLASSES, "depth_multiplier": 0.25, "depth_divisible_by": 8,
        "min_depth": 8}),
    "efficientnet": Family("EfficientNetForImageClassification", classified(), {"image_size": SIDE,
        "kernel_sizes": [3, 3, 5], "in_channels": [32, 16, 24], "out_channels": [16, 24, 20],
        "strides": [1, 1, 2], "num_block_repeats": [1, 1, 2], "expand_ratios": [1, 6, 1],
        "hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 1.0,
        "num_labels": N_CLASSES}),
    "mobilevit": Family("MobileViTForImageClassification", classified(), {"image_size": SIDE,
        "patch_size": 2, "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40,
        64], "num_labels": N_CLASSES}),
    "poolformer": Family("PoolFormerForImageClassification", classified(64),
        {"num_labels": N_CLASSES, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1]}),
    "segformer": Family("SegformerForSemanticSegmentation", segmented(64), {"num_labels": N_CLASSES,
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2,
        2], "decoder_hidden_size": 16}),
    "dpt": Family("DPTForSemanticSegmentation", segmented(SIDE), _VISION | {"num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 32, 32],
        "fusion_hidden_size": 16, "is_hybrid": False}),
    "detr": Family("DetrForObjectDetection", one_batch(detected), _detr),
    "yolos": Family("YolosForObjectDetection", one_batch(detected), _VISION | {"image_size": [64,
        64], "num_detection_tokens": 6}),
    "perceiver": Family("PerceiverForMaskedLM", texts(torch.clone), {"vocab_size": N_TOKENS,
        "max_position_embeddings": 32, "num_latents": 8, "d_latents": 16, "d_model": 32,
        "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4, "qk_channels": 16, "v_channels": 16}),
    # images and texts
    "clip": Family("CLIPModel", captioned(), _two_towers("CLIP", projection_dim=16)),
    "siglip": Family("SiglipModel", captioned(), _two_towers("Siglip")),
    "blip": Family("BlipForConditionalGeneration", captioned(generated=True), _two_towers("Blip",
        projection_dim=16)),
    "git": Family("GitForCausalLM", one_batch(lambda: {**unmasked(), "pixel_values": images()}),
        _DECODER | {"vision_config": _VISION}),
    "vilt": Family("ViltForQuestionAnswering", one_batch(lambda: {"input_ids": random_tokens(),
        "pixel_values": images(), "pixel_mask": torch.ones(ROWS, SIDE, SIDE, dtype=torch.int64),
        "labels": torch.rand(ROWS, N_CLASSES)}), _ENCODER | {"image_size": SIDE, "patch_size": 8}),
    "layoutlm": Family("LayoutLMForMaskedLM", LANGUAGE, _ENCODER
        | {"max_2d_position_embeddings": 64}),
    # time series and decisions
    "time_series_transformer": Family("TimeSeriesTransformerForPrediction", one_batch(time_series),
        _SERIES),
    "informer": Family("InformerForPrediction", one_batch(time_series), _SERIES),
    "autoformer": Family("AutoformerForPrediction", one_batch(time_series), _SERIES
        | {"label_length": 7, "moving_average": 5}),
    "patchtst": Family("PatchTSTForPrediction", one_batch(patched_series), {"num_input_channels": 4,
        "context_length": 32, "prediction_length": 8, "patch_length": 4, "patch_stride": 4,
        "d_model": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "patchtsmixer": Family("PatchTSMixerForPrediction", one_batch(patched_series),
        {"num_input_channels": 4, "context_length": 32, "prediction_length": 8, "patch_length": 4,
        "patch_stride": 4, "d_model": 32, "num_layers": 2}),
}
# fmt: on
