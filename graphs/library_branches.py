"""Where a library runs other operators under a tracer than in eager mode, and what to do about it.

transformers looks at the values of the position ids: several sequences packed into one row need a
mask. Under a tracer it cannot look, builds the mask in any case (T x T, once a layer as numbers),
and leaves the fused causal attention: another program, more memory, other bits than eager mode.
Position ids that the model counts up by itself depend on no data, so they can be known while
tracing: they are computed for real, and the library's own test decides.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode


@contextlib.contextmanager
def eager_branches() -> Iterator[None]:
    """Let libraries that are loaded take the branches that they take in eager mode."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return
    masks.find_packed_sequence_indices = _decided_by_value(original)
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = original


def _decided_by_value(original: Callable[..., Any]) -> Callable[..., Any]:
    """The library's test, on the real values where they do not depend on data."""

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> Any:
        values = constant_value(position_ids)
        if values is not None and original_outside_trace(original, values) is None:
            return None
        return original(position_ids)

    return find_packed_sequence_indices


def original_outside_trace(function: Callable[..., Any], *args: torch.Tensor) -> Any:
    """Call with every tracing mode and flag off."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        with _no_modes():
            return function(*args)
    finally:
        torch.compiler._is_compiling_flag = before


def constant_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real value of a tensor that is traced and depends on no input; None if it does.

    Its operators, back to the constants that they start from, are run for real on the CPU.
    """
    mode = get_proxy_mode()
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        torch._functionalize_sync(tensor.elem)
        tensor = torch._from_functional_tensor(tensor.elem)
    entry = mode.tracer.tensor_tracker.get(tensor)
    if entry is None:
        return None
    return _evaluate(entry.proxy.node)


def _evaluate(node: fx.Node) -> torch.Tensor | None:
    wanted: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        each = stack.pop()
        if each.op != "call_function":
            return None
        if each not in wanted:
            wanted[each] = None
            stack.extend(each.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    with _no_modes():
        for each in node.graph.nodes:
            if each in wanted:
                args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
                if "device" in kwargs:
                    kwargs = {**kwargs, "device": torch.device("cpu")}
                values[each] = each.target(*args, **kwargs)
    result = values[node]
    return result if isinstance(result, torch.Tensor) else None


@contextlib.contextmanager
def _no_modes() -> Iterator[None]:
    """Real tensors and eager dispatch inside a trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        ),
    ):
        yield
