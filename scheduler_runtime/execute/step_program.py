"""What runs a call: the generated code, a recording of it, or a compiled function."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from graphs.model_calls import Call


class StepProgram(Protocol):
    """The planned step of a module for one kind of call."""

    def fits(self, model: nn.Module, call: Call) -> bool: ...

    def run(self, model: nn.Module, call: Call) -> Any: ...
