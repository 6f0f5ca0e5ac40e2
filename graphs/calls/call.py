"""How a model is called: its batch as a call, the loss in what it returns, and its environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.calls import nested


class TraceError(ValueError):
    """The step cannot be captured as one graph; the message says why and what to change.

    runs_in_eager: the module may still run in eager mode; only recording it as one graph fails, so
        it can be planned from measured submodules, and the message says so.
    why: the message without that sentence.
    """

    def __init__(self, why: str, *, runs_in_eager: bool = False) -> None:
        super().__init__(why + (_BY_SUBMODULES if runs_in_eager else ""))
        self.why = why
        self.runs_in_eager = runs_in_eager


_BY_SUBMODULES = ". A model that runs but cannot be traced can still be planned by its submodules"


@dataclass
class Call:
    """A call of a model with its tensors taken out: `tensors` fill the holes of `rest`."""

    tensors: list[torch.Tensor]
    rest: list[Any]
    spec: nested.Spec

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, order: Sequence[str] = ()
    ) -> Call:
        """order: of named arguments, whose order makes no other call (see `argument_order`)."""
        named = {name: kwargs[name] for name in order if name in kwargs}
        flat, spec = nested.flatten((args, {**named, **kwargs}))
        tensors = [item for item in flat if isinstance(item, torch.Tensor)]
        rest = [HOLE if isinstance(item, torch.Tensor) else item for item in flat]
        return cls(tensors=tensors, rest=rest, spec=spec)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The (args, kwargs) of the call with these tensors in the holes."""
        values = iter(tensors)
        flat = [next(values) if item is HOLE else item for item in self.rest]
        args, kwargs = nested.unflatten(flat, self.spec)
        return args, kwargs


def signature_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    """None: something compiled, which does not tell."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def argument_order(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names that forward declares; what it takes as **kwargs it may see in their order."""
    signature = signature_of(forward)
    if signature is None:
        return ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(each.name for each in signature.parameters.values() if each.kind in named)


class Hole:
    """Stands where a tensor was."""


HOLE = Hole()


def as_call(
    batch: Any, inputs: Callable[[Any], Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor is called as model(x), a tuple as model(*x), a dict as model(**x).

    inputs: which part of the batch the model is called with (None: all of it).
    """
    if inputs is not None:
        batch = inputs(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch,), {}


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """The commonest mistake has an answer of its own: a batch with targets that forward lacks.

    Raises TraceError where forward does not take these arguments.
    """
    signature = signature_of(model.forward)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{type(model).__name__}.forward{signature} cannot be called with this batch: {error}. "
            "A tensor is called as model(x), a tuple as model(*x), a dict as model(**x); where the "
            "model takes a part of the batch and the loss the rest, say which part: "
            "inputs=lambda batch: batch[0], in a model file get_inputs(batch)"
        ) from error


def find_loss(output: Any) -> torch.Tensor:
    """The scalar to differentiate: the output, its `.loss`, or the only scalar of a tuple."""
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
    if len(candidates) != 1 or not isinstance(candidates[0], torch.Tensor):
        raise TraceError(
            f"the model returns {_described(output)}, in which no single loss can be found; return "
            "a scalar, or something with .loss, or give a loss function of (output, batch)"
        )
    loss = candidates[0]
    if loss.numel() != 1 or not loss.is_floating_point():
        raise TraceError(
            f"the loss must be one floating-point number; it is {_described(loss)}; reduce it "
            "(mean or sum), or give a loss function of (output, batch)"
        )
    if not loss.requires_grad:
        raise TraceError(
            "the loss does not depend on any parameter that requires a gradient; is the model "
            "frozen, or the loss detached?"
        )
    return loss


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    return f"a {type(value).__name__}"


def device_of(model: nn.Module) -> torch.device:
    """Where the module's parameters are; the CPU where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def environment_of(
    call: Call, model: nn.Module, *, device: torch.device | None = None
) -> dict[str, Any]:
    """What the traced graph depends on: another value of any of these is another graph.

    device: where the step runs (None: where the model is).
    """
    kind = (device_of(model) if device is None else device).type
    autocast = (
        str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if kind != "meta" and torch.is_autocast_enabled(kind)
        else None
    )
    return {
        "torch": torch.__version__.split("+")[0],
        "train": model.training,
        "autocast": autocast,
        "shapes": [list(t.shape) for t in call.tensors],
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in call.tensors],
    }
