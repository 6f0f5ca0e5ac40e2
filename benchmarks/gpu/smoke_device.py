"""Checks of the device itself and of what operators cost on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import emptied, limited
from benchmarks.gpu.operators import hardware_of
from graphs.costs import Measured, OpCall
from scheduler_runtime.execute import recompute_random, run_and_keep_state
from scheduler_runtime.measuring import context_bytes

aten = torch.ops.aten


class NotHereError(AssertionError):
    """A check found something else than what must be."""


def must(holds: bool, what: str) -> None:
    if not holds:
        raise NotHereError(what)


@dataclass(frozen=True)
class Bench:
    """device, and the backend of torch.compile."""

    device: torch.device
    backend: str

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(*shape, device=self.device, dtype=dtype)


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where PyTorch reads the allocator's settings; the second is its older name."""

NEEDS_CUDA = "not looked at, needs CUDA"


# ---- the device --------------------------------------------------------------------------------


def what_is_here(bench: Bench) -> str:
    words = [f"torch {torch.__version__}"]
    for name in ("triton", "rich", "pulp", "highspy", "transformers", "matplotlib"):
        try:
            words.append(f"{name} {__import__(name).__version__}")
        except (ImportError, AttributeError) as error:
            words.append(f"{name}: {type(error).__name__}")
    if bench.on_cuda:
        card = torch.cuda.get_device_properties(bench.device)
        free, total = torch.cuda.mem_get_info(bench.device)
        words.append(f"{card.name}, sm_{card.major}{card.minor}, CUDA {torch.version.cuda}")
        words.append(f"cuDNN {torch.backends.cudnn.version()}")
        words.append(f"{free} of {total} bytes free, context {context_bytes(bench.device)}")
        set_to = {n: v for n in ALLOCATOR if (v := os.environ.get(n)) is not None}
        words.append(f"allocator {set_to or 'as it is'}")
        words.append(f"rates of {hardware_of(bench.device).title}")
    return "; ".join(words)


def random_operators_run_again_with_the_same_numbers(bench: Bench) -> str:
    x = bench.rand(1000)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.rand_like.default, (x,)),
        (aten.native_dropout.default, (x, 0.3, True)),
    ]
    device = x.device
    for operator, args in calls:
        first, state = run_and_keep_state(operator, device, *args)
        following = torch.rand(3, device=device)
        second = recompute_random(operator, device, state, *args)
        after = torch.rand(3, device=device)
        pairs = zip(_tensors(first), _tensors(second), strict=True)
        must(all(torch.equal(a, b) for a, b in pairs), f"{operator} gave other numbers")
        must(not torch.equal(following, after), "the stream went back")
        recompute_random(operator, device, state, *args)
        torch.manual_seed(3)
        one = torch.rand(3, device=device)
        torch.manual_seed(3)
        recompute_random(operator, device, state, *args)
        must(torch.equal(one, torch.rand(3, device=device)), "the stream was moved")
    return f"{len(calls)} operators, state of {state.numel()} bytes on {state.device}"


def attention_runs_again_with_the_same_numbers(bench: Bench) -> str:
    """Fused attention with dropout: result and saved seeds."""
    found = []
    for name, call in _attentions(bench):
        try:
            first, state = run_and_keep_state(call, bench.device)
        except RuntimeError as error:
            found.append(f"{name} does not run here ({str(error).splitlines()[0][:90]})")
            continue
        torch.rand(5, device=bench.device)
        second = recompute_random(call, bench.device, state)
        pairs = list(zip(_tensors(first), _tensors(second), strict=True))
        must(torch.equal(*pairs[0]), f"{name} gave another output")
        where = [f"{str(t.dtype)[6:]}{list(t.shape)} {t.device}" for t in _tensors(first)[2:]]
        found.append(f"{name}: {', '.join(where) or 'no seeds'}")
    return "; ".join(found)


def memory_can_be_limited_and_is_there_again(bench: Bench) -> str:
    if not bench.on_cuda:
        return NEEDS_CUDA
    device = bench.device
    with limited(device, 4 * 10**9):
        half = torch.empty(5 * 10**8, dtype=torch.uint8, device=device)
        try:
            torch.empty(5 * 10**9, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
        else:
            raise NotHereError("5 GB were given within a limit of 4 GB")
        again = torch.empty(5 * 10**8, dtype=torch.uint8, device=device)
        del half, again
    large = torch.empty(5 * 10**9, dtype=torch.uint8, device=device)
    del large
    emptied(device)
    return message[:200]


def workspaces_that_stay(bench: Bench) -> str:
    """What cuBLAS keeps after a product, forward and backward."""
    if not bench.on_cuda:
        return NEEDS_CUDA
    emptied(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    x = bench.rand(512, 512, dtype=torch.bfloat16).requires_grad_()
    (x @ x).sum().backward()
    del x
    emptied(bench.device)
    return f"{torch.cuda.memory_allocated(bench.device) - before} bytes"


DEVICE: tuple[Callable[[Bench], str], ...] = (
    what_is_here,
    random_operators_run_again_with_the_same_numbers,
    attention_runs_again_with_the_same_numbers,
    memory_can_be_limited_and_is_there_again,
    workspaces_that_stay,
)


# ---- costs of operators ------------------------------------------------------------------------


def products_and_pointwise(bench: Bench) -> str:
    x, y = bench.rand(512, 512), bench.rand(512, 512)
    return _measured(bench, (aten.mm.default, (x, y)), (aten.add.Tensor, (x, y)))


def lookups(bench: Bench) -> str:
    table, at = bench.rand(100, 64), torch.arange(50, device=bench.device)
    back = (bench.rand(50, 64), at, 100, -1, False)
    return _measured(
        bench,
        (aten.embedding.default, (table, at)),
        (aten.embedding_dense_backward.default, back),
        (aten.nll_loss_forward.default, (bench.rand(50, 100), at, None, 1, -100)),
    )


def convolution_and_norm(bench: Bench) -> str:
    x, w, n = bench.rand(4, 8, 32, 32), bench.rand(8, 8, 3, 3), bench.rand(8)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    y = aten.convolution.default(x, w, None, *rest)
    back = (y, x, w, [0], *rest, [True, True, False])
    return _measured(
        bench,
        (aten.convolution.default, (x, w, None, *rest)),
        (aten.convolution_backward.default, back),
        (aten._batch_norm_with_update_functional.default, (x, n, n, n, n, 0.1, 1e-5)),
    )


def attention_forward_and_backward(bench: Bench) -> str:
    if not bench.on_cuda:
        return NEEDS_CUDA
    words = []
    for dtype in (torch.bfloat16, torch.float32):
        operators, trial = _backward_calls(bench, dtype)
        words.append(f"{', '.join(operators)} ({trial})")
    return "; ".join(words)


OPERATORS: tuple[Callable[[Bench], str], ...] = (
    products_and_pointwise,
    lookups,
    convolution_and_norm,
    attention_forward_and_backward,
)


def _measured(bench: Bench, *calls: tuple[Any, tuple[Any, ...]]) -> str:
    """Each is measured on the device, none by the roofline."""
    costs = Measured(bench.device, fallback=hardware_of(bench.device))
    words = []
    for operator, args in calls:
        cost = costs.cost(OpCall(operator, args, {}, operator(*args)))
        words.append(
            f"{operator.overloadpacket.__name__} {cost.time_s * 1e6:.1f} us + "
            f"{cost.workspace_bytes} bytes"
        )
        must(costs.n_fallbacks == 0, f"{words[-1]}: by roofline, the operator could not be run")
        must(cost.time_s > 0, f"{words[-1]}: no time")
    return ", ".join(words)


def _backward_calls(bench: Bench, dtype: torch.dtype) -> tuple[list[str], str]:
    """Measure attention's operators, as a step with dropout calls them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[OpCall] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            value = func(*args, **(kwargs or {}))
            if "attention" in str(func):
                calls.append(OpCall(func, args, kwargs or {}, value))
            return value

    q, k, v = (bench.rand(2, 4, 128, 64, dtype=dtype).requires_grad_() for _ in range(3))
    with Noted():
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum().backward()
    costs = Measured(bench.device, fallback=hardware_of(bench.device))
    times = [f"{costs.cost(call).time_s * 1e6:.0f} us" for call in calls]
    must(costs.n_fallbacks == 0, f"{costs.n_fallbacks} of {len(calls)} could not be measured")
    must(len(calls) >= 2, f"only {[str(call.target) for call in calls]} were seen")
    return [str(call.target) for call in calls], ", ".join(times)


def _attentions(bench: Bench) -> list[tuple[str, Callable[[], Any]]]:
    dtype = torch.bfloat16 if bench.on_cuda else torch.float32
    q = bench.rand(2, 4, 128, 64, dtype=dtype)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("chosen", lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2))
    ]
    if bench.on_cuda:
        flash = aten._scaled_dot_product_flash_attention
        efficient = aten._scaled_dot_product_efficient_attention
        cudnn = aten._scaled_dot_product_cudnn_attention
        calls += [
            ("flash", lambda: flash(q, q, q, 0.2)),
            ("efficient", lambda: efficient(q, q, q, None, True, 0.2)),
            ("cudnn", lambda: cudnn(q, q, q, None, True, 0.2)),
        ]
    return calls


def _tensors(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [item for item in parts if isinstance(item, torch.Tensor)]
