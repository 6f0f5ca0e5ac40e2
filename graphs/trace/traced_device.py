"""Decides for which device a step is traced, and refuses devices that cannot be planned for."""

from __future__ import annotations

import torch
from torch import nn

from graphs.capture import can_trace_absent
from graphs.hardware import Hardware
from graphs.model_calls import Call, TraceError, tensor_names


def refuse_unsupported_device(device: torch.device) -> None:
    """Raise TraceError for a device other than cpu, cuda and meta."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise TraceError(
            f"the step is on {device}; steps are planned for cpu and cuda only, where the peak "
            "can be measured and random numbers replayed"
        )


def refuse_meta_batch(model: nn.Module, call: Call) -> None:
    """Raise TraceError if the batch is on the meta device but the model is not: that step could be
    planned but not run."""
    parameters = [*model.parameters()]
    if not parameters or any(p.device.type == "meta" for p in parameters):
        return
    for tensor, name in zip(call.tensors, tensor_names(call, model), strict=True):
        if tensor.device.type == "meta":
            raise TraceError(
                f"argument {name} is on the meta device, and the parameters of "
                f"{type(model).__name__} are on {parameters[0].device}: move the batch there (or "
                "plan with the model on the meta device too)"
            )


def traced_device(
    model: nn.Module, call: Call, device: torch.device | str | None, card: Hardware | None
) -> torch.device:
    """The device of the step; meta tensors are planned as CPU tensors.

    device: what the caller asks for; None: the device of the model and the batch.
    card: the hardware that the costs are for. A CUDA card can be traced for even if this machine
        has none.

    Raises TraceError if model and batch are on several devices, or the device cannot be planned
    for.
    """
    if device is not None:
        target = torch.device(device)
    else:
        state = [*model.parameters(), *model.buffers(), *call.tensors]
        devices = {t.device for t in state if t.dim() > 0 or t.device.type != "cpu"}
        devices = {d for d in devices if d.type != "meta"} or {torch.device("cpu")}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise TraceError(
                f"model and batch are on several devices ({names}); move them to one: a plan is "
                "for one device"
            )
        target = devices.pop()
    if target.type == "meta":
        target = torch.device("cpu")
    refuse_unsupported_device(target)
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
