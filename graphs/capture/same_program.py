"""Finds out, by one step on fake tensors, whether a module would be traced to the same program.

A program is what the forward and the backward pass run. Both are run here in eager mode, which
takes less time than tracing them. The backward pass has to be run too: a custom
`autograd.Function`, or a hook on a tensor or on a node, may compute with Python values that the
forward pass does not show. `describe` makes a digest of each operator with its arguments, the
outputs, the gradients, the forms of the tensors that the module is given, and the settings that
autograd and AOTAutograd look at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphs.capture.refuse import global_hooks, shared_storages
from graphs.capture.shell import Shell
from graphs.model_calls import (
    PLAIN_TYPES,
    Call,
    is_distributed,
    is_distributed_class,
    local_part,
    storage_key,
)

_LIFT_OPERATORS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Operators whose argument is a real tensor that forward makes in each call, such as
`torch.tensor(2.0)`."""


@dataclass(frozen=True)
class StepDescription:
    """A description of a step; equal descriptions mean that tracing makes the same program.

    digest: SHA-256 of all that was recorded.
    by_identity: the objects that the digest knows by their ids. They are kept alive, so that no
        other object gets such an id.
    """

    digest: str
    by_identity: tuple[Any, ...] = field(compare=False, repr=False)


class _DigestMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, adds the operators of a step to `digest`.

    given_tensors: the fake tensors that the step is given, by name.
    """

    def __init__(self, given_tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digest = hashlib.sha256()
        self.by_identity: dict[int, Any] = {}
        # id -> (tensor, name); the tensors are kept alive, so that ids and storages are not reused.
        self._named_tensors: dict[int, tuple[torch.Tensor, str]] = {}
        self._storages: dict[int, str] = {}
        for name, tensor in given_tensors.items():
            self._remember(tensor, name)
            if is_distributed(tensor):
                self._remember(local_part(tensor), f"{name}, here")
        self._n_run = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_distributed_class, types)):  # the operators of its parts come next
            return NotImplemented
        kwargs = kwargs or {}
        self.note(str(func), torch.is_grad_enabled(), by_value=func in _LIFT_OPERATORS)
        self.note(args, kwargs, by_value=func in _LIFT_OPERATORS)
        result = func(*args, **kwargs)
        self._n_run += 1
        for index, item in enumerate(pytree.tree_leaves(result)):
            if isinstance(item, torch.Tensor):
                self._remember(item, f"{self._n_run}.{index}")
        return result

    def note(self, *items: Any, by_value: bool = False) -> None:
        """Add items to the digest.

        by_value: whether real tensors are described by their values instead of their identity.
        """
        for words in self._words(items, by_value=by_value):
            self.digest.update(words.encode() + b"\n")

    def _remember(self, tensor: torch.Tensor, name: str) -> None:
        self._named_tensors[id(tensor)] = tensor, name
        if isinstance(tensor, FakeTensor):
            self._storages.setdefault(storage_key(tensor), name)

    def _words(self, item: Any, *, by_value: bool) -> Iterator[str]:
        if isinstance(item, torch.Size | str):
            yield f"{type(item).__name__} {item!r}"
        elif isinstance(item, list | tuple):
            yield f"{type(item).__name__} {len(item)}"
            for each in item:
                yield from self._words(each, by_value=by_value)
        elif isinstance(item, dict):
            yield from self._words([*item.items()], by_value=by_value)
        elif isinstance(item, torch.Tensor):
            yield self._tensor_words(item, by_value=by_value)
        elif type(item) in PLAIN_TYPES:
            yield f"{type(item).__name__} {item!r}"
        else:
            yield self._identity_words(item)

    def _tensor_words(self, item: torch.Tensor, *, by_value: bool) -> str:
        if id(item) in self._named_tensors:
            return self._named_tensors[id(item)][1]
        if isinstance(item, FakeTensor):
            # Autograd may pass on a tensor that no operator returned, on a known storage.
            storage = self._storages.get(storage_key(item))
            if storage is not None:
                return f"on {storage}: {_form(item)} {item.is_conj()} {item.is_neg()}"
        elif by_value and item.device.type == "cpu":
            with _disable_current_modes():
                numbers = item.detach().contiguous().reshape(-1).view(torch.uint8)
                return f"{item.dtype} {item.shape} {numbers.numpy().tobytes().hex()}"
        return self._identity_words(item)  # a constant of the program

    def _identity_words(self, item: Any) -> str:
        self.by_identity[id(item)] = item
        return f"{type(item).__name__} {id(item)}"


def describe(shell: Shell, call: Call) -> StepDescription:
    """Describe a step of a model, by running it on the shell's fake tensors.

    To be called in a context in which the model can be called on fake tensors.
    """
    model, kind = shell.model, next((t.device.type for t in shell.batch), "cpu")
    inputs = {f"input {index}": tensor for index, tensor in enumerate(shell.batch)}
    state = dict(zip(shell.state, [*shell.parameters(), *shell.buffers()], strict=True))
    digest_mode = _DigestMode({**state, **inputs})
    digest_mode.note(
        [(name, _form(tensor)) for name, tensor in (*state.items(), *inputs.items())],
        [name for name, _ in model.named_parameters()],
        shared_storages(call.tensors),
        global_hooks(),
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        (torch.is_autocast_cache_enabled(), torch.is_grad_enabled()),
        (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
    )
    leaves = [leaf for leaf in (*shell.parameters(), *shell.batch) if leaf.requires_grad]
    with shell.mode, digest_mode, torch.enable_grad():
        outputs = shell(*shell.batch)
        digest_mode.note(outputs, shell.flat_outputs, str(shell.spec), shell.differentiable)
        digest_mode.note(gradients(outputs, leaves))
    return StepDescription(digest_mode.digest.hexdigest(), tuple(digest_mode.by_identity.values()))


def gradients(
    returned: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The gradient of each leaf for gradients of ones; () if there are none to compute.

    The backward pass runs in this thread, so that dispatch modes see its operators.
    """
    outputs = [item for item in returned if item.requires_grad]
    if not outputs or not leaves:
        return ()
    with torch._C._DisableAutocast(), torch.autograd.set_multithreading_enabled(False):
        ones = [torch.ones_like(item) for item in outputs]
        return torch.autograd.grad(outputs, leaves, ones, allow_unused=True)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the traced program depends on, of a tensor without values."""
    form = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    return (*form, tensor.requires_grad)
