"""A model that uses activation checkpointing already: with a plan it would recompute twice.

Calls of `torch.utils.checkpoint` are found while the module is traced, whoever makes them; the
switches of libraries are found before that, so that the error names the switch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from graphs.calls import TraceError
from graphs.capture import at_each_checkpoint


class CheckpointedAlreadyError(TraceError):
    """The module uses activation checkpointing; says where and how to turn it off."""


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise CheckpointedAlreadyError for switches that are on and for wrapped submodules."""
    for path, module in model.named_modules():
        title = f"submodule {path!r}" if path else f"the model ({type(module).__name__})"
        if getattr(module, "is_activation_checkpointing", False) is True:
            raise CheckpointedAlreadyError(
                f"activation checkpointing is on in {title}, and the plan decides what is "
                "recomputed: leave out activation_checkpointing (or gradient_checkpointing, its "
                "older name), or call model.activation_checkpointing_disable()"
            )
        if isinstance(module, ActivationWrapper):
            raise CheckpointedAlreadyError(
                f"{title} is wrapped in {type(module).__name__}, and the plan decides what is "
                "recomputed: do not wrap it"
            )


def no_checkpoints() -> AbstractContextManager[None]:
    """Refuse calls of `torch.utils.checkpoint.checkpoint` inside."""
    return at_each_checkpoint(_refuse)


def _refuse() -> NoReturn:
    raise CheckpointedAlreadyError(
        "forward calls torch.utils.checkpoint, and the plan decides what is recomputed: call the "
        "function directly (most libraries have a switch for it)"
    )
