"""What the benchmark scripts of linkedin/Liger-Kernel run for PyTorch's own implementations.

There is a function for each script (the row's `op`); it takes the row's config and x together. It
returns the module, whose parameters are the tensors that get gradients, and everything else that
matters for memory: which other tensors the script holds, and how it calls backward. Written after
`benchmark/scripts` of that repository, as of the releases that the rows name.
"""

from collections.abc import Callable, Mapping

from benchmarks.published.scripts import layers, losses
from benchmarks.published.scripts.script import Script
from benchmarks.published.scripts.settings import Settings

__all__ = ["REASONS", "SCRIPTS", "Script", "Settings"]

SCRIPTS: Mapping[str, Callable[[Settings], Script]] = {
    "swiglu": layers.mlp,
    "geglu": layers.mlp,
    "tiled_swiglu": layers.mlp,
    "tiled_geglu": layers.mlp,
    "rms_norm": layers.rms_norm,
    "fused_add_rms_norm": layers.added_rms_norm,
    "poly_norm": layers.poly_norm,
    "layer_norm": layers.layer_norm,
    "group_norm": layers.group_norm,
    "dyt": layers.dynamic_tanh,
    "rope": layers.rope,
    "qwen2vl_mrope": layers.mrope,
    "llama4_rope": layers.complex_rope,
    "embedding": layers.embedding,
    "softmax": layers.softmax,
    "fused_neighborhood_attention": layers.neighborhood_attention,
    "cross_entropy": losses.cross_entropy,
    "kl_div": losses.kl_div,
    "jsd": losses.jsd,
    "tvd": losses.total_variation,
    "fused_linear_cross_entropy": losses.head_and_cross_entropy,
    "fused_linear_jsd": losses.head_and_jsd,
    "distill_jsd_loss": losses.distilled_jsd,
    "distill_cosine_loss": losses.distilled_cosine,
    "fused_linear_orpo_loss": losses.orpo,
    "fused_linear_cpo_loss": losses.cpo,
    "fused_linear_simpo_loss": losses.cpo,
    "dpo_loss": losses.dpo,
    "fused_linear_grpo_loss_token": losses.grpo,
    "fused_linear_grpo_loss_sequence": losses.grpo,
}
_CONVOLVED = "the workspace of a convolution is cuDNN's choice when it runs"
REASONS: Mapping[str, str] = {
    "kto_loss": "which samples are preferred is drawn at random, and the sizes of tensors with it",
    "sparsemax": "what CUDA's sort takes as workspace is not known",
    "multi_token_attention": _CONVOLVED,
    "sparse_multi_token_attention": _CONVOLVED,
}
"""Scripts whose memory cannot be predicted, with the reason."""
