"""Whether a module would be traced to the same program again, told by its forward pass alone.

A trace records forward and backward and takes ten times as long as the forward pass on fake
tensors. The program follows from what the forward pass runs and returns, from the form of the
tensors that it is given, and from the settings that autograd and AOTAutograd look at. `described`
is a digest of all of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphs.calls import Call, nested
from graphs.capture.refuse import global_hooks, sharing
from graphs.capture.shell import Shell

_MADE_ANEW = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Their argument is a real tensor that forward makes anew (`torch.tensor(2.0)`)."""


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators of a forward pass in `digest`.

    own: the fake tensors that it is given, by their names.
    """

    def __init__(self, own: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digest = hashlib.sha256()
        # with the tensor itself, so that its id stays taken
        self._made = {id(tensor): (tensor, name) for name, tensor in own.items()}
        self._n_run = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.note(str(func), torch.is_grad_enabled(), by_value=func in _MADE_ANEW)
        self.note(args, kwargs, by_value=func in _MADE_ANEW)
        result = func(*args, **kwargs)
        self._n_run += 1
        for index, item in enumerate(pytree.tree_leaves(result)):
            if isinstance(item, torch.Tensor):
                self._made[id(item)] = item, f"{self._n_run}.{index}"
        return result

    def note(self, *items: Any, by_value: bool = False) -> None:
        """Add to the digest. by_value: of real tensors the numbers count, not which one it is."""
        for words in self._words(items, by_value=by_value):
            self.digest.update(words.encode() + b"\n")

    def _words(self, item: Any, *, by_value: bool) -> Iterator[str]:
        if isinstance(item, list | tuple):
            yield f"{type(item).__name__} {len(item)}"
            for each in item:
                yield from self._words(each, by_value=by_value)
        elif isinstance(item, dict):
            yield from self._words([*item.items()], by_value=by_value)
        elif not isinstance(item, torch.Tensor):
            yield f"{type(item).__name__} {item!r}"
        elif id(item) in self._made:
            yield self._made[id(item)][1]
        elif by_value and not isinstance(item, FakeTensor) and item.device.type == "cpu":
            with _disable_current_modes():
                numbers = item.detach().contiguous().reshape(-1).view(torch.uint8)
                yield f"{item.dtype} {item.shape} {numbers.numpy().tobytes().hex()}"
        else:
            yield f"tensor {id(item)}"  # it is a constant of the program, which keeps it alive


def described(shell: Shell, call: Call) -> str:
    """The digest for a model and a call; called where the model may be called on fake tensors."""
    model, kind = shell.model, next((t.device.type for t in shell.batch), "cpu")
    inputs = {f"input {index}": tensor for index, tensor in enumerate(shell.batch)}
    own = dict(zip(shell.state, [*shell.parameters(), *shell.buffers()], strict=True))
    watched = _Watched({**own, **inputs})
    watched.note(
        [(name, _form(tensor)) for name, tensor in (*own.items(), *inputs.items())],
        [name for name, _ in model.named_parameters()],
        sharing(call.tensors),
        [id(hook) for hook in global_hooks()],
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        (torch.is_autocast_cache_enabled(), torch.is_grad_enabled()),
        (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
    )
    with shell.mode, watched:
        output = shell.call(shell.batch)
    leaves, spec = nested.flatten(output)
    watched.note(leaves, str(spec))
    return watched.digest.hexdigest()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    form = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    return (*form, tensor.requires_grad)
