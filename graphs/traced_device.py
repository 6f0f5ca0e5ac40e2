"""The device of a step that is traced."""

from __future__ import annotations

import torch
from torch import nn

from graphs.capture import can_trace_absent
from graphs.hardware import Hardware
from graphs.model_calls import Call, TraceError


def refuse_other(device: torch.device) -> None:
    """Raise TraceError for a device other than cpu, cuda and meta."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise TraceError(
            f"the step is on {device}; steps are planned for cpu and cuda only, where the peak "
            "can be measured and random numbers replayed"
        )


def traced_device(
    model: nn.Module, call: Call, device: torch.device | str | None, card: Hardware | None
) -> torch.device:
    """The device of the step; meta tensors are planned as CPU tensors.

    card: that the costs are of, which can be traced for where it is not.
    """
    if device is not None:
        target = torch.device(device)
    else:
        state = [*model.parameters(), *model.buffers(), *call.tensors]
        kinds = {t.device for t in state if t.dim() > 0 or t.device.type != "cpu"}
        kinds = {d for d in kinds if d.type != "meta"} or {torch.device("cpu")}
        if len(kinds) > 1:
            names = ", ".join(sorted(map(str, kinds)))
            raise TraceError(
                f"model and batch are on several devices ({names}); move them to one: a plan is "
                "for one device"
            )
        target = kinds.pop()
    if target.type == "meta":
        target = torch.device("cpu")
    refuse_other(target)
    if target.type == "cuda" and not torch.cuda.is_available():
        if card is None or card.kind != "cuda":
            raise TraceError(
                "no CUDA device is available: to trace for one all the same, give the costs of a "
                "named card (costs=Roofline(named('h100'))), or name it to solve (device='h100')"
            )
        if not can_trace_absent():
            raise TraceError(
                "a graph for CUDA cannot be traced by this build of PyTorch without a card; trace "
                "on the CPU and plan with the named device's rates"
            )
        return torch.device("cuda", target.index or 0)
    return target
