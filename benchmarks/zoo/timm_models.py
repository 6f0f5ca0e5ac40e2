"""Image models of the timm library: a small one of each of its modules, and batches of images.

Each is a registered name, with fewer or narrower layers where its module takes them as arguments,
so that a step takes a few seconds at most on one core. Nothing is downloaded: weights are random.
Images are as small as the model takes, or so large that activations take more than the optimizer's
step. Rates of dropout are a little above zero, for the logits and for whole branches (stochastic
depth) where the constructor takes such a rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo.matrix import Entry

ROWS = 8
N_CLASSES = 10
DROP_RATE = 0.1
LABELLED = Entry(
    lambda: (nn.Identity(), None),
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    inputs=lambda batch: batch[0],
)
"""How to step any model that is called with images and returns logits."""
Labelled = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ImageModel:
    """A registered model of timm with small images.

    kind: its registered name.
    config: further arguments of its constructor.
    side: of the images, in pixels.
    sized: the constructor takes the side of the images.
    branches: the constructor takes a rate at which whole branches are dropped.
    """

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    side: int = 64
    sized: bool = False
    branches: bool = True

    @property
    def entry(self) -> Entry:
        """How its steps go: the loss is outside of the model."""
        return LABELLED

    @property
    def batches(self) -> Mapping[str, Callable[[], Labelled]]:
        """The only batch, by its size."""
        return {f"{ROWS} x {self.side} px": self._batch}

    def _batch(self) -> Labelled:
        images = torch.randn(ROWS, 3, self.side, self.side)
        return images, torch.arange(ROWS) % N_CLASSES

    def made(self, batch: str) -> tuple[nn.Module, Labelled]:
        """The model, in training mode, and this batch; the same each time."""
        import timm

        torch.manual_seed(0)
        config = {"num_classes": N_CLASSES, "drop_rate": DROP_RATE, **self.config}
        if self.sized:
            config["img_size"] = self.side
        if self.branches:
            config["drop_path_rate"] = DROP_RATE
        model = timm.create_model(self.kind, pretrained=False, **config).train()
        return model, self.batches[batch]()


# fmt: off
_LAYERS = {"embed_dim": 64, "depth": 3, "num_heads": 4}
_STAGES = {"embed_dims": (16, 32, 64, 128), "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8)}
_WINDOWS = {"embed_dim": 24, "depths": (1, 2, 2, 1), "num_heads": (1, 2, 4, 8)}
_HIERARCHY = {"embed_dim": 24, "num_heads": 1}
_IN_ATTENTION = {"attn_drop_rate": 0.1, "proj_drop_rate": 0.1}

MODELS: Mapping[str, ImageModel] = {
    "beit": ImageModel("beit_base_patch16_224", _LAYERS | _IN_ATTENTION, sized=True),
    "byoanet": ImageModel("eca_botnext26ts_256", side=96, sized=True),
    "byobnet": ImageModel("test_byobnet"),
    "cait": ImageModel("cait_xxs24_224", {"depth": 3}, side=128, sized=True),
    "coat": ImageModel("coat_tiny", {"parallel_depth": 2}, sized=True),
    "convit": ImageModel("convit_tiny", {"depth": 4, "local_up_to_layer": 2}, side=128, sized=True),
    "convmixer": ImageModel("convmixer_768_32", branches=False),
    "convnext": ImageModel("test_convnext"),
    "cpubone": ImageModel("cpubone_nano", side=192),
    "crossvit": ImageModel("crossvit_tiny_240", {"depth": ((1, 2, 0), (1, 1, 0))}),
    "csatv2": ImageModel("csatv2", side=192),
    "cspnet": ImageModel("cs3darknet_focus_s", side=96),
    "cspnext": ImageModel("cspnext_tiny", side=96),
    "davit": ImageModel("davit_tiny", _STAGES),
    "deepseek_vit": ImageModel("deepseek_vit_412m", _LAYERS, side=70, sized=True),
    "deit": ImageModel("deit_tiny_patch16_224", {"depth": 3}, side=128, sized=True),
    "densenet": ImageModel("densenet121", {"growth_rate": 8, "block_config": (2, 2, 3, 2),
        "proj_drop_rate": 0.1}, branches=False),
    "dla": ImageModel("dla46x_c", branches=False),
    "dpn": ImageModel("dpn48b", {"k_sec": (1, 1, 2, 1)}, side=96, branches=False),
    "edgenext": ImageModel("edgenext_xx_small", {"depths": (1, 2, 2, 1)}),
    "efficientformer": ImageModel("efficientformer_l1", {"depths": (1, 1, 2, 2)}, side=224),
    "efficientformer_v2": ImageModel("efficientformerv2_s0", {"depths": (1, 1, 2, 2)}, side=96,
        sized=True),
    "efficientnet": ImageModel("test_efficientnet"),
    "efficientvim": ImageModel("efficientvim_m1", side=160),
    "efficientvit_mit": ImageModel("efficientvit_b0", side=96, branches=False),
    "efficientvit_msra": ImageModel("efficientvit_m0", side=160, sized=True, branches=False),
    "eva": ImageModel("vit_tiny_patch16_dinov3_qkvb", {"depth": 3}, side=96, sized=True),
    "fasternet": ImageModel("fasternet_t0", {"depths": (1, 2, 2, 2)}, side=128),
    "fastvit": ImageModel("fastvit_t8"),
    "focalnet": ImageModel("focalnet_tiny_srf", side=96),
    "gcvit": ImageModel("gcvit_xxtiny", side=96, sized=True),
    "gemma4_vit": ImageModel("gemma4_vit_167m", _LAYERS, side=96, sized=True),
    "ghostnet": ImageModel("ghostnet_050", side=96, branches=False),
    "hardcorenas": ImageModel("hardcorenas_b", side=96),
    "hgnet": ImageModel("hgnetv2_b0", side=128),
    "hiera": ImageModel("hiera_tiny_224", _HIERARCHY | {"stages": (1, 2, 2, 1)}, sized=True),
    "hieradet_sam2": ImageModel("sam2_hiera_tiny", _HIERARCHY | {"stages": (1, 2, 3, 1),
        "global_att_blocks": (4, 5)}),
    "hrnet": ImageModel("hrnet_w18_small", side=160, branches=False),
    "iformer": ImageModel("iformer_t", side=96),
    "inception_next": ImageModel("inception_next_atto", side=96),
    "inception_resnet_v2": ImageModel("inception_resnet_v2", side=96, branches=False),
    "inception_v3": ImageModel("inception_v3", side=96, branches=False),
    "inception_v4": ImageModel("inception_v4", side=96, branches=False),
    "lcnetv2": ImageModel("lcnetv2_small", side=96, branches=False),
    "levit": ImageModel("levit_128s", {"depth": (1, 1, 2)}, side=192, sized=True),
    "lowformer": ImageModel("lowformer_b0", side=160),
    "mambaout": ImageModel("test_mambaout"),
    "maxxvit": ImageModel("test_coatnet", sized=True),
    "metaformer": ImageModel("poolformerv2_s12", side=128),
    "mlp_mixer": ImageModel("gmlp_ti16_224", sized=True),
    "mobilenetv3": ImageModel("lcnet_035"),
    "mobilenetv5": ImageModel("mobilenetv5_base", {"channel_multiplier": 0.25}),
    "mobilevit": ImageModel("mobilevit_xxs", sized=True),
    "mvitv2": ImageModel("mvitv2_tiny", side=128, sized=True),
    "naflexvit": ImageModel("naflexvit_base_patch16_parfac_gap", _LAYERS, sized=True),
    "nasnet": ImageModel("nasnetalarge", {"num_features": 192, "stem_size": 16}, branches=False),
    "nest": ImageModel("nest_tiny", side=96, sized=True),
    "nextvit": ImageModel("nextvit_small", side=96),
    "nfnet": ImageModel("test_nfnet"),
    "pit": ImageModel("pit_ti_224", side=128, sized=True),
    "pnasnet": ImageModel("pnasnet5large", branches=False),
    "pvt_v2": ImageModel("pvt_v2_b0", {"depths": (1, 1, 2, 1)}, side=96),
    "qwen3_vit": ImageModel("qwen3_vit_88m", _LAYERS, side=96, sized=True),
    "rdnet": ImageModel("rdnet_tiny", side=128),
    "regnet": ImageModel("regnetx_002", side=96),
    "repghost": ImageModel("repghostnet_050", side=96, branches=False),
    "repvit": ImageModel("repvit_m1", side=96, branches=False),
    "res2net": ImageModel("res2next50", side=96),
    "resnest": ImageModel("resnest14d", side=128),
    "resnet": ImageModel("test_resnet", {"drop_block_rate": 0.1}),
    "resnetv2": ImageModel("resnetv2_18", side=224),
    "rexnet": ImageModel("rexnet_100"),
    "selecsls": ImageModel("selecsls42", side=160, branches=False),
    "senet": ImageModel("legacy_seresnet18", side=192, branches=False),
    "sequencer": ImageModel("sequencer2d_s", {"layers": (1, 1, 2, 1)}, side=96, sized=True),
    "shvit": ImageModel("shvit_s1", side=192, branches=False),
    "sknet": ImageModel("skresnet18", side=160),
    "starnet": ImageModel("starnet_s050"),
    "swiftformer": ImageModel("swiftformer_xs", sized=True),
    "swin_transformer": ImageModel("swin_tiny_patch4_window7_224", _WINDOWS | _IN_ATTENTION,
        sized=True),
    "swin_transformer_v2": ImageModel("swinv2_tiny_window8_256", _WINDOWS, sized=True),
    "swin_transformer_v2_cr": ImageModel("swinv2_cr_tiny_224", _WINDOWS, sized=True),
    "tiny_vit": ImageModel("tiny_vit_5m_224", {"depths": (1, 1, 2, 1)}),
    "tnt": ImageModel("tnt_s_legacy_patch16_224", {"depth": 3, "embed_dim": 96}, sized=True),
    "tresnet": ImageModel("tresnet_m", {"layers": (1, 1, 2, 1), "width_factor": 0.5}, side=128),
    "twins": ImageModel("twins_svt_small", _STAGES, sized=True),
    "vgg": ImageModel("vgg11", {"mlp_ratio": 0.05}, side=160, branches=False),
    "visformer": ImageModel("visformer_tiny", {"depth": (2, 2, 2)}, side=160, sized=True),
    "vision_transformer": ImageModel("test_vit", _IN_ATTENTION | {"patch_drop_rate": 0.25},
        sized=True),
    "vision_transformer_hybrid": ImageModel("vit_tiny_r_s16_p8_224", {"depth": 3}, side=128,
        sized=True),
    "vision_transformer_relpos": ImageModel("test_vit_relpos", side=96, sized=True),
    "vision_transformer_sam": ImageModel("samvit_base_patch16_224", _LAYERS
        | {"global_attn_indexes": (2,)}, sized=True),
    "vitamin": ImageModel("vitamin_small_224", side=96, sized=True),
    "volo": ImageModel("volo_d1_224", side=128, sized=True),
    "vovnet": ImageModel("ese_vovnet19b_slim_dw"),
    "xception": ImageModel("legacy_xception", side=128, branches=False),
    "xception_aligned": ImageModel("xception41p", side=128),
    "xcit": ImageModel("xcit_nano_12_p16_224", {"depth": 3}, side=96, sized=True),
}
# fmt: on
