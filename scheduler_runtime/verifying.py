"""One training step run both ways, on this machine: is the plan kept, and are the bits the same.

    solve --budget 8GB --verify model.py

First the bits: from the same parameters, buffers and random state, the step is run without the plan
and with it, and loss, every gradient and every buffer must be equal bit for bit; what is not equal
in two steps without the plan (sums in no fixed order, on CUDA) is told apart. Then the figures:
peak and time of the step, optimizer included, without and with the plan, beside the prediction.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.calls import as_call, check_call, device_of, find_loss, nested
from scheduler_runtime.applying import apply, remove
from scheduler_runtime.measuring import Measurement, measure
from solver.runtime_hooks import Verification
from solver.schedule import Solution

SEED = 0
N_TIMED_STEPS = 3
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Loss = Callable[[Any, Any], torch.Tensor]


def verify(
    solution: Solution,
    *,
    model: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Loss | None,
    inputs: Callable[[Any], Any] | None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    device: str,
    autocast: str | None,
) -> Verification:
    """Run the step of `solution` with and without its plan. See solver.runtime_hooks.Verifier.

    Takes the memory of the step without the plan. Raises ValueError: no plan, one that does not
    fit the model, or a batch that it does not take; RuntimeError, MemoryError: the step cannot be
    run here.
    """
    if solution.schedule is None or solution.simulation is None:
        raise ValueError(f"there is no plan to verify: the status is {solution.status}")
    torch.manual_seed(SEED)
    bench = _Bench(
        inner=model().to(device),
        batch=_moved(batch(), device),
        loss=loss,
        inputs=inputs,
        optimizer=optimizer,
        autocast=autocast,
        gradients=str(solution.environment.get("gradients", "fresh")),
    )
    start = bench.state()
    plain = bench.bits(start)
    with bench.planned(solution):
        differences = _differences(plain, bench.bits(start))
    unsteady: tuple[str, ...] = ()
    if differences:  # what differs without a plan as well tells nothing of the plan
        again = bench.bits(start)
        unsteady = tuple(name for name in plain if not _same_bits(plain[name], again[name]))
        differences = [line for line in differences if line.split(":")[0] not in unsteady]
    baseline = bench.measured(start)
    with bench.planned(solution):
        planned = bench.measured(start)
    return Verification(
        device=_title(device),
        available_bytes=solution.request.available_bytes,
        predicted_peak_bytes=solution.simulation.peak_bytes,
        measured_peak_bytes=planned.peak_bytes,
        baseline_predicted_peak_bytes=solution.baseline.peak_bytes,
        baseline_measured_peak_bytes=baseline.peak_bytes,
        predicted_time_s=solution.simulation.time_s,
        measured_time_s=planned.time_s,
        baseline_predicted_time_s=solution.baseline.time_s,
        baseline_measured_time_s=baseline.time_s,
        spread_s=max(planned.spread_s, baseline.spread_s),
        n_timed_steps=N_TIMED_STEPS,
        n_gradients=sum(name.startswith("gradient of ") for name in plain),
        differences=tuple(differences),
        unsteady=unsteady,
        reserved_bytes=planned.reserved_bytes,
        context_bytes=planned.context_bytes,
    )


@dataclass(frozen=True)
class _Bench:
    """A model and all that its step needs, to be run several times from the same state."""

    inner: nn.Module
    batch: Any
    loss: Loss | None
    inputs: Callable[[Any], Any] | None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    autocast: str | None
    gradients: str

    @property
    def device(self) -> torch.device:
        return device_of(self.inner)

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers as they are, on the host, so that they take no device memory."""
        named = {**dict(self.inner.named_parameters()), **dict(self.inner.named_buffers())}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Back to `state`, without gradients, with the random numbers that follow the seed."""
        named = {**dict(self.inner.named_parameters()), **dict(self.inner.named_buffers())}
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(state[name])
        for parameter in self.inner.parameters():
            parameter.grad = None
        gc.collect()
        torch.manual_seed(SEED)

    @contextlib.contextmanager
    def planned(self, solution: Solution) -> Iterator[None]:
        apply(self.inner, solution)
        try:
            yield
        finally:
            remove(self.inner)

    def bits(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loss, gradients and buffers after a step; two steps where gradients add up."""
        self.restore(state)
        args, kwargs = as_call(self.batch, self.inputs)
        check_call(self.inner, args, kwargs)
        for _ in range(2 if self.gradients == "accumulate" else 1):
            with self._autocast():
                output = self.inner(*args, **kwargs)
                value = find_loss(output) if self.loss is None else self.loss(output, self.batch)
            value.backward()
        found = {"the loss": value}
        for name, parameter in self.inner.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
        found.update({f"buffer {name}": b for name, b in self.inner.named_buffers()})
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}

    def measured(self, state: Mapping[str, torch.Tensor]) -> Measurement:
        """Peak and time of the step with its optimizer."""
        self.restore(state)
        return measure(
            _ForwardUnder(self.inner, self._autocast),
            self.batch,
            loss=None if self.loss is None else self._loss_under_autocast,
            inputs=self.inputs,
            optimizer=self.optimizer(self.inner),
            gradients=self.gradients,
            n_steps=N_TIMED_STEPS,
        )

    def _loss_under_autocast(self, output: Any, batch: Any) -> torch.Tensor:
        assert self.loss is not None
        with self._autocast():
            return self.loss(output, batch)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = torch.autocast(
            self.device.type, dtype=_DTYPES[self.autocast]
        )
        return context


class _ForwardUnder(nn.Module):
    """Calls a module inside a context: autocast is for the forward pass, not for the backward."""

    def __init__(
        self, inner: nn.Module, context: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.inner = inner
        self.context = context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            return self.inner(*args, **kwargs)


def _differences(
    plain: Mapping[str, torch.Tensor], planned: Mapping[str, torch.Tensor]
) -> list[str]:
    """What is not the same bits, in words."""
    missing = [f"{name} is missing" for name in plain if name not in planned]
    extra = [f"{name} is there with the plan only" for name in planned if name not in plain]
    changed = [
        f"{name}: {_how(plain[name], planned[name])}"
        for name in plain
        if name in planned and not _same_bits(plain[name], planned[name])
    ]
    return missing + extra + changed


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal as bytes: NaN equals NaN, and -0 is not 0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    as_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return bool(torch.equal(*as_bytes))


def _how(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return (
            f"{tuple(other.shape)} {other.dtype}, without the plan {tuple(one.shape)} {one.dtype}"
        )
    n_different = int((one != other).sum())
    return f"{n_different} of {one.numel()} numbers differ"


def _moved(batch: Any, device: str) -> Any:
    return nested.map_tensors(lambda tensor: tensor.to(device), batch)


def _title(device: str) -> str:
    where = torch.device(device)
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "the CPU of this machine"
