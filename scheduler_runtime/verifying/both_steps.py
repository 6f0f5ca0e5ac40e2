"""Run one training step with and without a plan, on this machine, and compare the two.

First the results: the step runs without the plan and with it, from the same parameters, buffers
and random state. How the results are compared depends on the plan's rewrites:

- The loss, every gradient and every buffer must be bitwise identical. Results that already differ
  between two steps without the plan (CUDA may sum in any order) are listed separately.
- If the rewrites change last bits, the loss and the gradients of both steps are compared with those
  of the step in float64, and the plan's errors must not be much larger (`rounding_errors.py`).
- If the plan rounds tensors that are saved for backward, the errors of its gradients against those
  of the step without the plan are measured.

Then memory and time: whole steps, optimizer included, run alternately without and with the plan.
Their peaks and times are reported next to the predicted ones.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphs.hardware import is_cuda
from graphs.model_calls import nested
from graphs.passes import passes_of
from graphs.rewrites import results_of
from scheduler_runtime.applying import PlanMismatchError, apply, remove
from scheduler_runtime.execute import no_watching_modes, without_plans
from scheduler_runtime.host_memory import on_device
from scheduler_runtime.measuring import Measurement, TrainingStep, measure_in_turns
from scheduler_runtime.verifying.rounding_errors import (
    InFloat64,
    errors,
    is_reference,
    relative_error,
)
from solver.reporting import Verification
from solver.schedule import Solution
from solver.sizes_deadlines_progress import counted

SEED = 0
N_ROUNDS = 3
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}

Loss = Callable[[Any, Any], torch.Tensor]


def run_both_steps(
    solution: Solution,
    *,
    model: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Loss | None,
    inputs: Callable[[Any], Any] | None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer | None],
    device: str,
    autocast: str | None,
    say: Callable[[str], object] = lambda _what: None,
) -> Verification:
    """Run the training step of `solution` with and without its plan, and compare the two.

    model, batch, optimizer: functions that create them.
    loss, inputs: as in `solve`.
    autocast: "bf16", "fp16" or None.
    say: is called with a few words on each measurement before it starts.

    Needs as much memory as the step takes without the plan. Raises ValueError if the solution has
    no plan or has one for another model, or if the model does not accept the batch; RuntimeError or
    MemoryError if the step cannot be run on this machine.
    """
    if solution.schedule is None or solution.simulation is None:
        raise ValueError(f"there is no plan to verify: the status is {solution.status}")
    if solution.environment.get("pipeline"):
        raise ValueError(
            "the plan is for a stage of a pipeline, whose step takes all stages: run it under its "
            "schedule, with and without apply(stage, solution)"
        )
    if (passes := passes_of(solution.environment)).n > 1:
        raise ValueError(
            f"the plan is for a step in which {passes.words}, and one pass is run here: compare "
            "your own step, with and without apply(model, solution)"
        )
    torch.manual_seed(SEED)
    bench = _Bench(
        model=model().to(device),
        batch=nested.map_tensors(lambda tensor: tensor.to(device), batch()),
        step={"loss": loss, "inputs": inputs, "autocast": _DTYPES[autocast]},
        optimizer=optimizer,
        gradients=str(solution.environment.get("gradients", "fresh")),
    )
    say("results of the baseline")
    results = results_of(solution.graph.meta.rewrites)
    plain = bench.results()
    say("results with the plan")
    with bench.with_plan(solution) as optimizer_of_step:
        planned = bench.results()
        n_steps = counted(2 * (2 + N_ROUNDS), "step")
        say(f"memory and time without and with the plan in turns, {n_steps}")
        baseline, measured = bench.measure(optimizer_of_step)
    found = differences(plain, planned)
    # results that differ between two steps without the plan say nothing about the plan
    unsteady = tuple(differences(plain, bench.results())) if found else ()
    largest = ""
    if results == "allclose":
        found, largest = _judge_by_errors(planned, plain, bench, found)
    elif results == "lossy":
        found, largest = _judge_as_rounded(planned, plain, found)
    where = torch.device(device)
    # The device that the plan is for. Predicted times come from its published rates, unless the
    # operators were measured.
    costs = solution.graph.meta.cost_model
    known = costs if isinstance(costs, Mapping) else {}
    on_cuda = bool(known) and is_cuda(known)
    title = str(known.get("title", known.get("device", "")))
    rates_of = title if on_cuda or not title else f"a {title}"
    if known.get("model") != "roofline":
        rates_of = ""
    return Verification(
        device=(
            torch.cuda.get_device_name(where) if where.type == "cuda" else "the CPU of this machine"
        ),
        available_bytes=solution.request.available_bytes,
        predicted_peak_bytes=solution.simulation.peak_bytes,
        measured_peak_bytes=measured.peak_bytes,
        baseline_predicted_peak_bytes=solution.baseline.peak_bytes,
        baseline_measured_peak_bytes=baseline.peak_bytes,
        predicted_time_s=solution.simulation.time_s,
        times_s=measured.times_s,
        baseline_predicted_time_s=solution.baseline.time_s,
        baseline_times_s=baseline.times_s,
        n_gradients=sum(name.startswith("gradient of ") for name in plain),
        differences=tuple(words for name, words in found.items() if name not in unsteady),
        unsteady=unsteady if results == "bitwise" else (),
        results=results,
        planned_for=title if on_cuda and where.type == "cpu" else "",
        rates_of=rates_of,
        largest_error=largest,
        reserved_bytes=measured.reserved_bytes,
        context_bytes=measured.context_bytes,
    )


@no_watching_modes()
def _judge_by_errors(
    planned: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    bench: _Bench,
    differing: Mapping[str, str],
) -> tuple[dict[str, str], str]:
    """Judge the results of a plan that may change last bits, by their errors against float64.

    differing: name -> description of each result that is not bitwise identical. Buffers must be
        identical, and both steps must have the same results.

    Returns name -> description of each result whose error is too large (the name is "" if errors
    could not be computed), and the error closest to its limit, in words.
    """
    both = {name for name in plain.keys() & planned.keys() if not name.startswith("buffer ")}
    found = {name: words for name, words in differing.items() if name not in both}
    try:
        exact = bench.in_float64().results()
    except (RuntimeError, TypeError, ValueError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return {**found, "": f"errors are not known: the step does not run in float64 ({line})"}, ""
    compared = sorted(errors(planned, plain, exact), key=lambda each: each.share)
    compared = [each for each in compared if each.name in both]
    dtypes = {tensor.dtype for tensor in plain.values()} | {bench.step["autocast"]} - {None}
    if not compared or not is_reference(compared, dtypes):
        reason = "the step in float64 computes something else (other random numbers?)"
        return {**found, "": f"errors are not known: {reason}"}, ""
    found |= {each.name: f"error of {each}" for each in compared if not each.share <= 1}
    return found, str(compared[-1])


def _judge_as_rounded(
    planned: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    differing: Mapping[str, str],
) -> tuple[dict[str, str], str]:
    """Judge the results of a plan that rounds tensors saved for backward: gradients may differ.

    Returns name -> description of each result that must not differ but does, and the median and
    largest relative error of the gradients, in words. A gradient with another shape, or with
    non-finite numbers at other places, is not explained by rounding, so it counts as different.
    """
    errors = {
        name: relative_error(planned[name], plain[name])
        for name in plain.keys() & planned.keys()
        if name.startswith("gradient ")
    }
    unexpected = [name for name in differing if not errors.get(name, math.inf) < math.inf]
    found = {name: differing[name] for name in unexpected}
    if not errors:
        return found, ""
    most = max(errors, key=lambda name: (errors[name], name))
    median = statistics.median(errors.values())
    return found, f"median {median:.1e}, largest {errors[most]:.1e} ({most})"


@dataclass(frozen=True)
class _Bench:
    """A model and its training step, to be run several times from the same state.

    step: options of `TrainingStep`.
    optimizer: creates the optimizer of a model (None: the step has no optimizer).
    gradients: "fresh", or "accumulate" if a step adds to existing gradients.
    mode: creates the context in which the step runs.
    start: the initial parameters and buffers, on the host, so that they take no device memory.
    """

    model: nn.Module
    batch: Any
    step: dict[str, Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer | None]
    gradients: str
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    start: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start.update(_copies_on_host(self._state()))

    def _state(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _restore(self) -> None:
        """Restore parameters and buffers, drop all gradients, and set the random seed."""
        with torch.no_grad():
            for name, tensor in self._state().items():
                tensor.copy_(self.start[name])
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()
        torch.manual_seed(SEED)

    @contextlib.contextmanager
    def with_plan(self, solution: Solution) -> Iterator[torch.optim.Optimizer | None]:
        """A context in which the model runs with the plan; it yields a new optimizer."""
        optimizer = self.optimizer(self.model)
        # By default, a batch of another shape would be planned anew, and the new plan compared.
        apply(self.model, solution, optimizer=optimizer, on_mismatch="error")
        try:
            yield optimizer
        except PlanMismatchError as error:
            raise PlanMismatchError(
                f"not the planned step: {error.difference or error}. The functions that create the "
                "model and the batch (get_model and get_batch of a model file) have to return the "
                "planned shapes, types and settings in every call"
            ) from error
        finally:
            remove(self.model)

    def in_float64(self) -> _Bench:
        """The same step in float64, without autocast."""
        self._restore()
        return _Bench(
            model=copy.deepcopy(self.model).double(),
            batch=nested.map_tensors(
                lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, self.batch
            ),
            step={**self.step, "autocast": None},
            optimizer=self.optimizer,
            gradients=self.gradients,
            mode=InFloat64,
        )

    def results(self) -> dict[str, torch.Tensor]:
        """Run a step from the start, and return the loss, the gradients and the buffers, by name.

        With gradients="accumulate" two steps run, so that the second one adds to gradients.
        """
        self._restore()
        step = TrainingStep(self.model, self.batch, **self.step)
        with self.mode():
            if self.gradients == "accumulate":
                step.run()
            found = {"the loss": step.run()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
        found.update({f"buffer {name}": b for name, b in self.model.named_buffers()})
        return _copies_on_host(found)

    def measure(self, optimizer: torch.optim.Optimizer | None) -> list[Measurement]:
        """Measure the step with its optimizer, inside `with_plan`: without the plan and with it."""

        def values_on_device() -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext() if optimizer is None else on_device(optimizer)

        @contextlib.contextmanager
        def without() -> Iterator[None]:
            with without_plans(self.model), values_on_device():
                yield

        with values_on_device():
            self._restore()

        return measure_in_turns(
            self.model,
            self.batch,
            (without, contextlib.nullcontext),
            optimizer=optimizer,
            gradients=self.gradients,
            n_steps=N_ROUNDS,
            **self.step,
        )


def _copies_on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def differences(
    plain: Mapping[str, torch.Tensor], planned: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Name -> description of each result that is not bitwise identical in both steps."""
    found = {name: f"{name} is missing" for name in plain if name not in planned}
    for name, other in planned.items():
        if name not in plain:
            found[name] = f"{name} exists only with the plan"
        elif not _same_bits(one := plain[name], other):
            found[name] = (
                f"{name}: {tuple(other.shape)} {other.dtype}, "
                f"without the plan {tuple(one.shape)} {one.dtype}"
                if (one.shape, one.dtype) != (other.shape, other.dtype)
                else f"{name}: {int((one != other).sum())} of {one.numel()} numbers differ"
            )
    return found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compared byte by byte: -0 differs from 0, NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    as_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return bool(torch.equal(*as_bytes))
