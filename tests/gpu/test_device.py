"""The device itself: random numbers, memory limits, workspaces, and the cost of operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.bench import limited_memory
from graphs.costs import Measured, OpCall
from scheduler_runtime.execute import recompute_random, run_and_keep_state
from scheduler_runtime.measuring import context_bytes, free_unreferenced
from tests.support.bitwise import assert_equal

aten = torch.ops.aten


def test_versions_and_card(device, finding):
    finding(f"torch {torch.__version__}")
    for name in ("triton", "rich", "pulp", "highspy", "transformers", "matplotlib"):
        try:
            finding(f"{name} {__import__(name).__version__}")
        except (ImportError, AttributeError) as error:
            finding(f"{name}: {type(error).__name__}")
    finding(f"rates of {Measured(device).roofline.hardware.title}")
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        finding(f"{card.name}, sm_{card.major}{card.minor}, CUDA {torch.version.cuda}")
        finding(f"cuDNN {torch.backends.cudnn.version()}")
        finding(f"{free} of {total} bytes free, context {context_bytes(device)}")
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the latter is the older one
        finding(f"allocator {({n: os.environ[n] for n in names if n in os.environ}) or 'default'}")


@pytest.mark.parametrize("operator", ["rand_like", "native_dropout"])
def test_a_recomputed_random_operator_draws_the_same_numbers(device, operator, finding):
    x = torch.rand(1000, device=device)
    call, args = {
        "rand_like": (aten.rand_like.default, (x,)),
        "native_dropout": (aten.native_dropout.default, (x, 0.3, True)),
    }[operator]
    first, state = run_and_keep_state(call, x.device, *args)
    following = torch.rand(3, device=device)
    second = recompute_random(call, x.device, state, *args)
    assert_equal(tensors_of(first), tensors_of(second))
    # Recomputing neither rewinds the stream of random numbers nor moves it on.
    assert not torch.equal(following, torch.rand(3, device=device))
    torch.manual_seed(3)
    one = torch.rand(3, device=device)
    torch.manual_seed(3)
    recompute_random(call, x.device, state, *args)
    assert torch.equal(one, torch.rand(3, device=device))
    finding(f"state of {state.numel()} bytes on {state.device}")


def test_recomputed_attention_has_the_same_dropout(device, finding):
    """Every fused kernel that runs here: the output, and where it keeps its seeds."""
    for name, call in attention_kernels(device):
        try:
            first, state = run_and_keep_state(call, device)
        except RuntimeError as error:
            finding(f"{name} does not run here ({str(error).splitlines()[0][:90]})")
            continue
        torch.rand(5, device=device)
        second = recompute_random(call, device, state)
        assert torch.equal(tensors_of(first)[0], tensors_of(second)[0]), name
        seeds = [f"{str(t.dtype)[6:]}{list(t.shape)} {t.device}" for t in tensors_of(first)[2:]]
        finding(f"{name}: {', '.join(seeds) or 'no seeds'}")


def attention_kernels(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.rand(2, 4, 128, 64, device=device, dtype=dtype)
    yield "default", lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
    if device.type == "cuda":
        yield "flash", lambda: aten._scaled_dot_product_flash_attention(q, q, q, 0.2)
        efficient = aten._scaled_dot_product_efficient_attention
        yield "efficient", lambda: efficient(q, q, q, None, True, 0.2)
        cudnn = aten._scaled_dot_product_cudnn_attention
        yield "cudnn", lambda: cudnn(q, q, q, None, True, 0.2)


def tensors_of(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [item for item in parts if isinstance(item, torch.Tensor)]


def test_memory_can_be_limited_and_released(cuda, finding):
    with limited_memory(cuda, 4 * 10**9):
        half = torch.empty(5 * 10**8, dtype=torch.uint8, device=cuda)
        with pytest.raises(torch.OutOfMemoryError) as error:
            torch.empty(5 * 10**9, dtype=torch.uint8, device=cuda)
        after_the_error = torch.empty(5 * 10**8, dtype=torch.uint8, device=cuda)
        del half, after_the_error
    torch.empty(5 * 10**9, dtype=torch.uint8, device=cuda)
    finding(str(error.value).splitlines()[0][:200])


def test_bytes_that_cublas_keeps_after_a_product(cuda, finding):
    free_unreferenced(cuda)
    before = torch.cuda.memory_allocated(cuda)
    x = torch.rand(512, 512, device=cuda, dtype=torch.bfloat16).requires_grad_()
    (x @ x).sum().backward()
    del x
    free_unreferenced(cuda)
    finding(f"{torch.cuda.memory_allocated(cuda) - before} bytes")


# ---- the cost of operators, measured -----------------------------------------------------------


def check_measured(device: torch.device, calls: list[OpCall], finding: Callable[[str], None]):
    """Each call is measured on the device; none falls back to the roofline."""
    costs = Measured(device)
    for call in calls:
        cost = costs.cost(call)
        name = str(call.target)
        assert costs.n_fallbacks == 0, f"{name} could not be run, its cost is the roofline's"
        assert cost.time_s > 0, name
        finding(f"{name} {cost.time_s * 1e6:.1f} us + {cost.workspace_bytes} bytes")


@pytest.mark.parametrize("kind", ["products", "lookups", "convolutions"])
def test_costs_of_operators_are_measured(device, kind, finding):
    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device)

    x, w, n = rand(4, 8, 32, 32), rand(8, 8, 3, 3), rand(8)
    at = torch.arange(50, device=device)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    convolved = aten.convolution.default(x, w, None, *rest)
    calls = {
        "products": [
            (aten.mm.default, (rand(512, 512), rand(512, 512))),
            (aten.add.Tensor, (rand(512, 512), rand(512, 512))),
        ],
        "lookups": [
            (aten.embedding.default, (rand(100, 64), at)),
            (aten.embedding_dense_backward.default, (rand(50, 64), at, 100, -1, False)),
            (aten.nll_loss_forward.default, (rand(50, 100), at, None, 1, -100)),
        ],
        "convolutions": [
            (aten.convolution.default, (x, w, None, *rest)),
            (aten.convolution_backward.default, (convolved, x, w, [0], *rest, [True, True, False])),
            (aten._batch_norm_with_update_functional.default, (x, n, n, n, n, 0.1, 1e-5)),
        ],
    }[kind]
    check_measured(device, [OpCall(op, args, {}, op(*args)) for op, args in calls], finding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_costs_of_attention_are_measured_forward_and_backward(cuda, dtype, finding):
    calls: list[OpCall] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            value = func(*args, **(kwargs or {}))
            if "attention" in str(func):
                calls.append(OpCall(func, args, kwargs or {}, value))
            return value

    shape = {"device": cuda, "dtype": dtype, "requires_grad": True}
    q, k, v = (torch.rand(2, 4, 128, 64, **shape) for _ in range(3))
    with Noted():
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum().backward()
    assert len(calls) >= 2, "forward and backward each call a fused operator"
    check_measured(cuda, calls, finding)
