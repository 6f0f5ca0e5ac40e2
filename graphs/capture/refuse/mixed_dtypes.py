"""Refuses mixtures of dtypes that an operator's kernel rejects, as eager mode would.

PyTorch's meta functions let most mixtures of dtypes pass, so a float64 batch on float32 weights
would be planned and fail in the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = "mm bmm addmm baddbmm mv addmv dot convolution _cdist_forward"
_NORMS = {
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_native_batch_norm_legit_functional": "batch_norm",
}
_TITLES = {
    getattr(torch.ops.aten, name).default: title
    for name, title in ({name: name.strip("_") for name in _PRODUCTS.split()} | _NORMS).items()
}
"""Operator -> name for messages. A trace may record another variant of an operator than eager mode
runs; both have the same name, so that both raise the same message."""
_HALVES = (torch.bfloat16, torch.float16)


class MixedDtypesError(RuntimeError):
    """A kernel would reject the dtypes of its arguments.

    A RuntimeError, as in eager mode. (Python's operators, such as `@`, would replace a TypeError by
    one of their own.)
    """


class RefusingMixedDtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, calls `refuse_mixed_dtypes` for each operator; for use outside of a trace."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse_mixed_dtypes(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def refuse_mixed_dtypes(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise MixedDtypesError for a call whose kernel would reject its mixture of dtypes.

    CPU norms accept half-precision inputs with float32 weights and statistics; CUDA norms are not
    checked.
    """
    if (title := _TITLES.get(operator)) is None:
        return
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    if len(dtypes) < 2:
        return
    if title in _NORMS.values():
        if tensors[0].device.type == "cuda":
            return
        if tensors[0].dtype in _HALVES and set(dtypes) == {tensors[0].dtype, torch.float32}:
            return
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise MixedDtypesError(
        f"{title} takes tensors of one dtype, and got {names}: convert "
        "the batch or the model (.to(dtype)), or run the step under autocast"
    )
