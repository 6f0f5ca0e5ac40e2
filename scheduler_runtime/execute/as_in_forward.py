"""The state of a module as its forward pass found it, for a recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from graphs.model_calls import PLAIN_TYPES, is_distributed_class
from scheduler_runtime.execute.other_generators import OtherGenerators


class AsInForward(contextlib.AbstractContextManager[None]):
    """The context, in which parameters and buffers are the tensors that they are now, and plain
    attributes of modules (`eps`, `training`) have their values of now: tensors of
    `torch.func.functional_call` are gone when the backward pass recomputes, and the training may
    have changed attributes. All random generators draw the numbers of the forward pass again.

    What the module changes in place is a copy while it is recomputed. The context may be entered
    again: with `retain_graph` each backward pass recomputes.

    context: a further context of the recomputation.
    forward: the context of the forward pass. `in_forward` is the one to use in its place.
    changed_buffers: names of buffers in whose place there are copies of their present values.
    rewound: names of parameters and buffers in whose place there are copies of their values now.
    parts: what is recomputed of the module (None: all of it).
    draws_elsewhere: whether it may draw from generators that are not torch's default ones.
    """

    def __init__(
        self,
        context: Any,
        module: nn.Module,
        changed_buffers: Iterable[str],
        *,
        rewound: Iterable[str] = (),
        parts: Iterable[nn.Module] | None = None,
        forward: Any = None,
        draws_elsewhere: bool = True,
    ) -> None:
        recomputed = [module] if parts is None else list(parts)
        self._generators = OtherGenerators(recomputed if draws_elsewhere else ())
        self.in_forward = self._generators.watched(forward or contextlib.nullcontext())
        self._context = context
        # name -> the tensor, and the one whose values its copy gets
        self._sources = {name: (t := _tensor_at(module, name), t) for name in changed_buffers}
        self._sources |= {
            name: (t := _tensor_at(module, name), t.detach().clone()) for name in rewound
        }
        copied = {id(tensor) for tensor, _ in self._sources.values()}
        self._now: list[tuple[dict[str, Any], str, Any]] = [
            (held, name, value)
            for part in recomputed
            for each in part.modules()
            # other tensors in attributes may be activations, which this would hold
            for held in (each._parameters, each._buffers, vars(each))
            for name, value in held.items()
            if held is not vars(each) or isinstance(value, PLAIN_TYPES) or id(value) in copied
        ]
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        copies = {id(tensor): _copy(tensor, source) for tensor, source in self._sources.values()}
        with contextlib.ExitStack() as stack:
            for held, name, value in self._now:
                other, now = held.get(name, value), copies.get(id(value), value)
                if other is not now and (now is not value or not _are_sharded(value, other)):
                    stack.callback(held.__setitem__, name, other)
                    held[name] = now
            stack.callback(self._check_unchanged, self._versions())
            stack.enter_context(self._generators.as_in_forward())
            stack.enter_context(self._context)
            self._entered.append(stack.pop_all())

    def _versions(self) -> dict[str, int]:
        """The versions of what is copied; tensors of inference mode have none and do not change."""
        tensors = {name: tensor for name, (tensor, _) in self._sources.items()}
        return {name: t._version for name, t in tensors.items() if not t.is_inference()}

    def _check_unchanged(self, before: Mapping[str, int]) -> None:
        """Raise RuntimeError if what is copied has another version than before."""
        for name, version in self._versions().items():
            if version != before[name]:
                raise RuntimeError(
                    f"the recomputation changed {name!r} a second time, because forward reaches it "
                    "by something else than an attribute of a module (a list, a view, a global "
                    "name); change the attribute itself"
                )

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)


def _tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(path), attribute)
    return found


def _copy(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A copy of the source that saves for backward what the tensor saves."""
    copy = source.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def _are_sharded(*values: Any) -> bool:
    """FSDP2 itself puts whole parameters in the place of these, and back."""
    return any(is_distributed_class(type(value)) for value in values)
