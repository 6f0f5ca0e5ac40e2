"""The interface of what runs a planned call: generated code, a recording, a compiled function."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from graphs.model_calls import Call


class StepProgram(Protocol):
    """The planned step of a module for one kind of call."""

    def fits(self, model: nn.Module, call: Call) -> bool:
        """Whether the program is for this call, of a kind that it was made for."""
        ...

    def run(self, model: nn.Module, call: Call) -> Any:
        """Run the forward pass; returns the module's output."""
        ...
