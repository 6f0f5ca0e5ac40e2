"""Checkpointing that is there already: a plan beside it would run the same operators twice over.

PyTorch's own `torch.utils.checkpoint` is found while the module is traced, whoever calls it; what
a library offers as a switch is found before that, with the name of the switch to turn off.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from graphs.calls import TraceError
from graphs.capture import at_each_checkpoint


class CheckpointedAlreadyError(TraceError):
    """The module recomputes activations by itself; says where and what turns it off."""


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise CheckpointedAlreadyError for switches that are on and for wrapped submodules."""
    for name, module in model.named_modules():
        if getattr(module, "is_activation_checkpointing", False) is True:
            raise CheckpointedAlreadyError(
                f"activation checkpointing is on in {_called(name, module)}, and the plan decides "
                "what is recomputed: leave activation_checkpointing (or gradient_checkpointing, "
                "its older name) out, or call model.activation_checkpointing_disable()"
            )
        if isinstance(module, ActivationWrapper):
            raise CheckpointedAlreadyError(
                f"{_called(name, module)} is wrapped in {type(module).__name__}, and the plan "
                "decides what is recomputed: do not wrap it"
            )


def no_checkpoints() -> AbstractContextManager[None]:
    """Refuse calls of `torch.utils.checkpoint.checkpoint` inside."""
    return at_each_checkpoint(_refuse)


def _refuse() -> NoReturn:
    raise CheckpointedAlreadyError(
        "forward calls torch.utils.checkpoint, and the plan decides what is recomputed: call the "
        "function without it (most libraries have a switch for it)"
    )


def _called(name: str, module: nn.Module) -> str:
    return f"submodule {name!r}" if name else f"the model ({type(module).__name__})"
