"""Operators whose kernels take one dtype only: a trace must fail where eager mode does.

PyTorch's meta functions let most mixtures of dtypes pass, so a float64 batch on float32 weights
would be planned and fail in the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

_ALL_ALIKE = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
        aten._cdist_forward.default,
    }
)
_NORMS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_functional.default,
    }
)
_HALVES = (torch.bfloat16, torch.float16)


def refuse_mixed_dtypes(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for a call whose kernel would reject its mixture of dtypes.

    Norms take half-precision inputs with float32 weights and statistics.
    """
    if operator not in _ALL_ALIKE and operator not in _NORMS:
        return
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    if len(dtypes) < 2:
        return
    if operator in _NORMS:
        if tensors[0].device.type != "cpu":
            return
        if tensors[0].dtype in _HALVES and set(dtypes) == {tensors[0].dtype, torch.float32}:
            return
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise TypeError(
        f"{operator.overloadpacket.__name__} takes tensors of one dtype, and got {names}: convert "
        "the batch or the model (.to(dtype)), or run the step under autocast"
    )
