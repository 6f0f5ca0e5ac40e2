"""Operators whose kernels take one dtype only: a trace must fail where eager mode does.

PyTorch's meta functions let most mixtures of dtypes pass, so a float64 batch on float32 weights
would be planned and fail in the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

_ALL_ALIKE = "mm bmm addmm baddbmm mv addmv dot convolution _cdist_forward"
_NORMS = """
    native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_functional
"""
_OPERATORS = {
    getattr(aten, name).default: names for names in (_ALL_ALIKE, _NORMS) for name in names.split()
}
_HALVES = (torch.bfloat16, torch.float16)


def refuse_mixed_dtypes(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for a call whose kernel would reject its mixture of dtypes.

    Norms take half-precision inputs with float32 weights and statistics.
    """
    kind = _OPERATORS.get(operator)
    if kind is None:
        return
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    if len(dtypes) < 2:
        return
    if kind is _NORMS:
        if tensors[0].device.type != "cpu":
            return
        if tensors[0].dtype in _HALVES and set(dtypes) == {tensors[0].dtype, torch.float32}:
            return
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise TypeError(
        f"{operator.overloadpacket.__name__} takes tensors of one dtype, and got {names}: convert "
        "the batch or the model (.to(dtype)), or run the step under autocast"
    )
