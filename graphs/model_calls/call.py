"""How a model is called with a batch, and where the loss is in its output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from graphs.model_calls import nested
from graphs.model_calls.tensors import autograd_functions, strided_like


class TraceError(ValueError):
    """The step cannot be captured as one graph; the message says why and what to change.

    runs_in_eager: whether the module may still run in eager mode, and only recording it as one
        graph fails. Then it can be planned from measured submodules, and the message says so.
    why: the message without that sentence.
    short: what cannot be captured and where, without advice.
    """

    def __init__(self, why: str, *, runs_in_eager: bool = False, short: str = "") -> None:
        super().__init__(why.removesuffix(".") + _SUBMODULES_ADVICE if runs_in_eager else why)
        self.why = why
        self.runs_in_eager = runs_in_eager
        self.short = short or why


class NoLossError(TraceError):
    """What the model or the loss function returns has no recognizable loss."""


_SUBMODULES_ADVICE = (
    ". A model that runs but cannot be traced can still be planned by its submodules: "
    "checkpoint_solver.fallback.plan_chain"
)


@dataclass
class Call:
    """A call of a model, separated into its tensors and everything else.

    tensors: the tensors of its arguments, in order.
    rest: the flat arguments, with HOLE in place of each tensor.
    spec: the structure of the arguments.
    """

    tensors: list[torch.Tensor]
    rest: list[Any]
    spec: nested.Spec

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, order: Sequence[str] = ()
    ) -> Call:
        """The call with these arguments.

        order: names in the order to bring keyword arguments into (`argument_order`), so that the
            order in which they are given makes no difference.
        """
        named = {name: kwargs[name] for name in order if name in kwargs}
        flat, spec = nested.flatten((args, {**named, **kwargs}))
        tensors = [item for item in flat if isinstance(item, torch.Tensor)]
        rest = [HOLE if isinstance(item, torch.Tensor) else item for item in flat]
        return cls(tensors=tensors, rest=rest, spec=spec)

    def without_values(self) -> Call:
        """The same call with tensors on the meta device, to keep after the batch is freed."""
        tensors = [
            strided_like(tensor, "meta").requires_grad_(tensor.requires_grad)
            if tensor.layout == torch.strided
            else tensor
            for tensor in self.tensors
        ]
        return replace(self, tensors=tensors)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The (args, kwargs) of the call with these tensors in the holes."""
        values = iter(tensors)
        flat = [next(values) if item is HOLE else item for item in self.rest]
        args, kwargs = nested.unflatten(flat, self.spec)
        return args, kwargs


def signature_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of forward; None for compiled code, which has none."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def argument_order(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The argument names that forward declares (the order of **kwargs is visible to it)."""
    signature = signature_of(forward)
    if signature is None:
        return ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(each.name for each in signature.parameters.values() if each.kind in named)


class Hole:
    """Marks the place of a tensor that was taken out."""


HOLE = Hole()


def as_call(
    batch: Any, inputs: Callable[[Any], Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The (args, kwargs) that a model is called with: model(x) for a tensor, model(*x) for a tuple
    or list, model(**x) for a dict.

    inputs: selects the part of the batch that the model is called with (None: all of it).
    """
    if isinstance(batch, DataLoader):
        raise TraceError("the batch is a DataLoader; give one of its batches: next(iter(loader))")
    if inputs is not None:
        batch = inputs(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch,), {}


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TraceError if forward does not take these arguments.

    The most common mistake is a batch that includes the targets.
    """
    signature = signature_of(model.forward)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{type(model).__name__}.forward{signature} cannot be called with this batch: {error}. "
            "A tensor is called as model(x), a tuple as model(*x), a dict as model(**x); if the "
            "model takes only part of the batch, and the loss the rest, select that part: "
            "inputs=lambda batch: batch[0], in a model file get_inputs(batch)"
        ) from error


def find_loss(output: Any) -> torch.Tensor:
    """The scalar to differentiate: the output, its `.loss`, or the only scalar of a tuple.

    A scalar that depends on less than half as many parameters as the other outputs do is not taken
    for the loss: CLIP returns its temperature beside the logits.

    Raises NoLossError if there is no loss, and TraceError if it requires no gradient.
    """
    if isinstance(output, torch.Tensor):
        candidates = [output]
    elif isinstance(output, Mapping) and "loss" in output:
        candidates = [output["loss"]]
    elif getattr(output, "loss", None) is not None:
        candidates = [output.loss]
    else:
        flat = nested.leaves(output)
        candidates = [
            t for t in flat if isinstance(t, torch.Tensor) and t.dim() == 0 and t.requires_grad
        ]
        others = [t for t in flat if isinstance(t, torch.Tensor) and t.dim() > 0]
        if len(candidates) == 1 and len(_leaf_nodes(others)) > 2 * len(_leaf_nodes(candidates)):
            candidates = []
    if len(candidates) != 1 or not isinstance(candidates[0], torch.Tensor):
        raise NoLossError(
            f"the model returns {_describe(output)}, in which no single loss can be found; return "
            "a scalar or an object with .loss, or give a function that computes it from output and "
            "batch (loss=lambda output, batch: ...)"
        )
    loss = candidates[0]
    if loss.numel() != 1 or not loss.is_floating_point():
        raise NoLossError(
            f"the loss must be one floating-point number; it is {_describe(loss)}; reduce it "
            "(mean or sum) in forward, or in a function that computes it from output and batch "
            "(loss=lambda output, batch: ...)"
        )
    if not loss.requires_grad:
        raise TraceError(
            "the loss does not depend on any parameter that requires a gradient; is the model "
            "frozen, the loss detached, or torch.no_grad() on?"
        )
    return loss


def _leaf_nodes(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """The leaves of the autograd graph of these tensors: one gradient accumulator per parameter."""
    return {f for f in autograd_functions(tensors) if not f.next_functions}


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    return f"a {type(value).__name__}"


def device_of(model: nn.Module) -> torch.device:
    """The device of the module's parameters; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
