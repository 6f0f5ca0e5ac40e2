"""Check every differentiable operator of PyTorch's own tests: is it bitwise as in eager mode?

    pip install expecttest            # PyTorch's test data need it
    python -m benchmarks.operators --samples 1 --out benchmarks/results/operators.json

The sample inputs are those of `op_db` (torch.testing) on the CPU: `--samples` of them, at equal
distances. Each operator becomes a module whose differentiable inputs are parameters, and whose loss
is a weighted sum of its outputs. Loss, outputs, gradients and the random state of a step are
compared with eager mode, byte by byte (-0 is not 0, any NaN equals any NaN):

- "watched": the step under a dispatch mode that does nothing, as in the first step of `fit` with a
  loss outside of the model;
- "planned": the step under the schedule that saves nothing for backward.

Operators that differ between two runs in eager mode are listed separately. LAPACK's solvers do, as
their results depend on the address of their workspace.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks import harness
from benchmarks.same_bits import keeping_nothing
from checkpoint_solver import apply
from graphs.model_calls import TraceError
from graphs.trace import trace
from scheduler_runtime.execute import WatchingMode


@dataclass
class Tally:
    """Counts and names of operators, and why some were refused or skipped."""

    dtype: str
    n_operators: int = 0
    n_watched: int = 0
    n_planned: int = 0
    differ_watched: list[str] = field(default_factory=list)
    differ_planned: list[str] = field(default_factory=list)
    differ_in_eager_mode: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


class Watch(WatchingMode):
    """A mode that observes nothing."""

    is_over = False

    def note_missed_backward(self) -> None:
        pass

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.call_operator(func, args, kwargs)


class Operator(nn.Module):
    """The operator applied to a sample's arguments; inputs that require gradients are parameters.

    batch: the other tensors of the sample, which the model is called with.
    """

    def __init__(self, operator: Any, sample: Any) -> None:
        super().__init__()
        self.operator, self.batch = operator, []
        flat, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.trained = nn.ParameterList()
        self.kinds: list[str] = []
        self.others: list[Any] = []
        for item in flat:
            if not isinstance(item, torch.Tensor):
                self.kinds.append("other")
                self.others.append(item)
            elif item.requires_grad:
                self.kinds.append("trained")
                self.trained.append(nn.Parameter(item.detach().clone()))
            else:
                self.kinds.append("batch")
                self.batch.append(item)

    def outputs(self, *batch: torch.Tensor) -> list[torch.Tensor]:
        """The outputs that require gradients; complex ones as pairs of real numbers."""
        items = {"other": iter(self.others), "trained": iter(self.trained), "batch": iter(batch)}
        first, args, kwargs = pytree.tree_unflatten([next(items[k]) for k in self.kinds], self.spec)
        results = pytree.tree_leaves(self.operator(first, *args, **kwargs))
        results = [
            each for each in results if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in results]

    def forward(self, weights: list[torch.Tensor], *batch: torch.Tensor) -> Any:
        outputs = self.outputs(*batch)
        terms = [(output * each).sum() for output, each in zip(outputs, weights, strict=True)]
        return sum(terms), [output.detach() for output in outputs]


def step(model: nn.Module, weights: list[torch.Tensor], batch: list[torch.Tensor]) -> list[Any]:
    """Loss, outputs, gradients and the random state of one step, as bytes."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    loss, outputs = model(weights, *batch)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [_comparable_bytes(each) for each in (loss, *outputs, *gradients, torch.get_rng_state())]


def _comparable_bytes(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach().to_dense().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if tensor.is_floating_point():
        tensor = tensor.where(~tensor.isnan(), torch.nan)  # the same bits for every NaN
    return tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def try_sample(name: str, operator: Any, sample: Any, tally: Tally) -> None:
    """Compare one sample with eager mode and add the result to the tally."""
    try:
        model = Operator(operator, sample)
        torch.manual_seed(3)
        shapes = [(each.shape, each.dtype) for each in model.outputs(*model.batch)]
        torch.manual_seed(1)
        weights = [torch.randn(shape, dtype=dtype) for shape, dtype in shapes]
        if not weights:
            return
        expected = step(model, weights, model.batch)
        repeated = step(model, weights, model.batch)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        # eager mode itself refuses the sample (no gradient, this dtype): nothing to compare with
        tally.skipped[name] = f"{type(error).__name__}: {error}"[:200]
        return
    if repeated != expected:
        tally.differ_in_eager_mode.append(name)
        return
    watch = Watch()
    watch.watch()
    try:
        watched = step(model, weights, model.batch)
    finally:
        watch.unwatch()
    tally.n_watched += 1
    if watched != expected:
        tally.differ_watched.append(name)
    try:
        planned = apply(model, keeping_nothing(trace(model, (weights, *model.batch))))
        planned_results = step(planned, weights, model.batch)
    except TraceError as error:
        root = f"{Path(__file__).parents[1]}/"
        tally.refused[name] = str(error).replace(root, "")[:200]
        return
    tally.n_planned += 1
    if planned_results != expected:
        tally.differ_planned.append(name)


def differentiable_operators(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Names and `op_db` entries of the operators that support autograd in this dtype."""
    module: Any = importlib.import_module("torch.testing._internal.common_methods_invocations")
    # the wrapper sets the seed, which a planned forward may not do
    module.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
    for each in module.op_db:
        if dtype in each.dtypes and each.supports_autograd:
            yield f"{each.name}.{each.variant_test_name}".rstrip("."), each


def main() -> None:
    parser = harness.parser("operators", __doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=(), help="beginnings of names")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    dtype, tally = getattr(torch, arguments.dtype), Tally(arguments.dtype)
    for name, entry in differentiable_operators(dtype):
        if arguments.only and not name.startswith(tuple(arguments.only)):
            continue
        torch.manual_seed(0)
        samples = list(entry.sample_inputs("cpu", dtype, requires_grad=True))
        stride = max(1, len(samples) // arguments.samples)
        for sample in samples[::stride][: arguments.samples]:
            try_sample(name, entry, sample, tally)
        tally.n_operators += 1
    report = {"circumstances": harness.circumstances(0.0), **vars(tally)}
    harness.write(arguments.out, report)
    n = len(tally.differ_planned), len(tally.differ_watched)
    print(f"{tally.n_planned} planned, {tally.n_watched} watched samples: {n} differ")
    sys.exit(any(n))


if __name__ == "__main__":
    main()
