"""Steps traced for a card that is not in this machine run the operators that CUDA would."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torchgen
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphs.capture.absent_card import AttentionCall, attention_of, can_trace_absent
from graphs.capture.absent_card.engine import no_accelerator
from graphs.capture.absent_card.operators import _FUSED_ON_CUDA
from graphs.costs import Roofline
from graphs.graph import Graph
from graphs.hardware import named
from graphs.model_calls import TraceError
from graphs.trace import trace
from solver import solve

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not can_trace_absent(),
    reason="planning for a card that is absent: a card is here, or PyTorch lacks fake CUDA tensors",
)
CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32


class Attention(nn.Module):
    def __init__(self, width: int = 64, n_heads: int = 2, **options) -> None:
        super().__init__()
        self.n_heads, self.options = n_heads, options
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, mask, **self.options)
        return out.square().mean()


def for_card(model: nn.Module, batch, card: str = "h100", **options) -> Graph:
    return trace(model, batch, device="cuda", costs=Roofline(named(card)), **options)


def operators(graph: Graph) -> Counter[str]:
    return Counter(node.op.removeprefix("aten.").rpartition(".")[0] for node in graph.nodes)


def call(card: tuple[int, int] = (8, 0), dtype=BF16, size: int = 64, **changes) -> AttentionCall:
    n_queries, n_keys = changes.pop("n_queries", 16), changes.pop("n_keys", 16)
    n_heads, of_keys = 8, changes.pop("of_keys", 8)
    given = {
        "query": torch.empty(2, n_heads, n_queries, size, dtype=dtype, device="meta"),
        "key": torch.empty(2, of_keys, n_keys, size, dtype=dtype, device="meta"),
        "value": torch.empty(2, of_keys, n_keys, size, dtype=dtype, device="meta"),
        "mask": None,
        "dropout": 0.0,
        "is_causal": False,
        "shares_keys": False,
        "needs_gradient": True,
        "compute_capability": card,
    }
    return AttentionCall(**{**given, **changes})


MASK = torch.empty(2, 1, 16, 16, dtype=BF16, device="meta")


@pytest.mark.parametrize(
    ("expected", "of"),
    [
        (FLASH, call()),
        (CUDNN, call((9, 0))),
        (CUDNN, call((10, 0))),
        (FLASH, call((10, 3))),
        (FLASH, call((12, 0))),
        (MATH, call((7, 5))),  # no bfloat16
        (EFFICIENT, call((7, 5), HALF)),
        (EFFICIENT, call((9, 0), SINGLE)),
        (MATH, call((8, 0), torch.float64)),
        (EFFICIENT, call(mask=MASK)),
        (CUDNN, call((9, 0), mask=MASK)),
        (EFFICIENT, call(is_causal=True, n_keys=32)),
        (FLASH, call(size=20)),
        (FLASH, call((9, 0), size=20)),
        (MATH, call(size=20, mask=MASK)),
        (CUDNN, call((9, 0), size=256)),
        (FLASH, call((10, 0), size=256)),
        (EFFICIENT, call(size=264)),
        (FLASH, call((8, 6), size=192)),
        (EFFICIENT, call((8, 6), size=200)),
        (FLASH, call((8, 6), size=200, needs_gradient=False)),
        (EFFICIENT, call((8, 9), size=256, dropout=0.1)),
        (FLASH, call(of_keys=2, shares_keys=True)),
        (MATH, call(of_keys=2)),
        (FLASH, call((9, 0), n_keys=1)),
        (MATH, call(n_queries=0)),
    ],
)
def test_the_kernel_of_attention_is_chosen_as_pytorch_does(expected, of):
    assert attention_of(of) == expected


def test_settings_of_the_process_decide_about_attention(monkeypatch):
    with sdpa_kernel([EFFICIENT, MATH]):
        assert attention_of(call((9, 0))) == EFFICIENT
    with sdpa_kernel([FLASH, CUDNN], set_priority=True):
        assert attention_of(call((9, 0))) == FLASH
    with sdpa_kernel(FLASH), pytest.raises(RuntimeError, match="No available kernel"):
        attention_of(call(mask=MASK))
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert attention_of(call((9, 0))) == FLASH


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("card", "dtype", "kind"),
    [("h100", BF16, "cudnn"), ("a100", BF16, "flash"), ("t4", SINGLE, "efficient")],
)
def test_a_step_has_the_attention_of_its_card(card, dtype, kind):
    graph = for_card(Attention(is_causal=True).to(dtype), torch.randn(2, 16, 64, dtype=dtype), card)
    name = f"_scaled_dot_product_{kind}_attention"
    assert {name: 1, f"{name}_backward": 1}.items() <= operators(graph).items()
    assert graph.meta.environment["device"] == "cuda"
    (backward,) = (node for node in graph.nodes if node.op.startswith(f"aten.{name}_backward"))
    assert backward.workspace_bytes > 0


@pytest.mark.slow
def test_masks_are_prepared_as_the_kernel_takes_them():
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    graph = for_card(Attention().to(BF16), (torch.randn(2, 9, 64, dtype=BF16), mask), "a100")
    found = operators(graph)
    assert found["_scaled_dot_product_efficient_attention"] == 1
    assert found["where"] == found["constant_pad_nd"] == 1
    plain = for_card(Attention().double(), (torch.randn(2, 9, 64).double(), mask), "a100")
    assert operators(plain)["bmm"] > 0


def test_heads_of_odd_sizes_are_padded_for_flash_attention():
    graph = for_card(Attention(40).to(BF16), torch.randn(2, 9, 40, dtype=BF16), "a100")
    padded = [node for node in graph.forward_nodes if "constant_pad_nd" in node.op]
    assert len(padded) == 3


def normalized_bytes(graph: Graph) -> int:
    (norm,) = (node for node in graph.nodes if node.op == "aten.native_layer_norm.default")
    return graph.tensor_by_name[norm.outputs[0]].size_bytes


@pytest.mark.slow
def test_autocast_is_that_of_cuda():
    """On CUDA layer norm runs in float32, on the CPU in bfloat16."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm = nn.Linear(8, 64), nn.LayerNorm(64)

        def forward(self, x):
            return self.norm(self.up(x)).float().mean()

    class OwnAutocast(Net):
        def forward(self, x):
            with torch.autocast("cuda", BF16):
                return super().forward(x)

    x = torch.randn(32, 8)
    with torch.autocast("cpu", BF16):
        on_card, on_cpu = for_card(Net(), x), trace(Net(), x)
    assert on_card.meta.environment["autocast"] == "bfloat16"
    assert operators(on_card) == operators(for_card(OwnAutocast(), x))
    assert normalized_bytes(on_card) == 2 * normalized_bytes(on_cpu) == 4 * 32 * 64
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.slow
def test_batch_norm_runs_in_cudnn_where_pytorch_would():
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x).float().mean()

    def net(dtype):
        return Net(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(dtype)

    x = torch.randn(2, 3, 8, 8)
    assert operators(for_card(net(SINGLE), x))["_batch_norm_with_update_functional"] == 1
    assert operators(for_card(net(BF16), x.to(BF16)))["_native_batch_norm_legit_functional"] == 1
    with torch.backends.cudnn.flags(enabled=False):
        assert operators(for_card(net(SINGLE), x))["_native_batch_norm_legit_functional"] == 1


def test_dropout_is_fused():
    class Net(nn.Linear):
        def forward(self, x):
            return functional.dropout(super().forward(x), 0.5).mean()

    found = operators(for_card(Net(8, 8), torch.randn(4, 8)))
    assert found["native_dropout"] == found["native_dropout_backward"] == 1


def test_operators_that_cuda_runs_whole_are_not_taken_apart():
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x).mean()

    graph = for_card(
        Net(nn.Linear(8, 8), nn.RMSNorm(8), nn.SiLU(), nn.Mish(), nn.Linear(8, 8)),
        torch.randn(4, 8),
    )
    found = operators(graph)
    assert found["_fused_rms_norm"] == found["_fused_rms_norm_backward"] == 1
    assert found["silu_backward"] == found["mish_backward"] == 1


@pytest.mark.slow
def test_the_list_of_those_operators_is_pytorchs():
    """All of native_functions.yaml with kernels of CUDA and a composition."""
    yaml = pytest.importorskip("yaml")
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    functions = {f["func"].partition("(")[0]: f for f in yaml.safe_load(path.read_text())}

    def kernels(function) -> set[str]:
        own = {key.strip() for keys in function.get("dispatch", ()) for key in keys.split(",")}
        delegate = functions.get(function.get("structured_delegate", ""), {})
        return own | (kernels(delegate) if delegate else set())

    both = {"CUDA", "CompositeImplicitAutograd"}
    assert {n for n, f in functions.items() if both <= kernels(f)} == set(_FUSED_ON_CUDA)


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}])
def test_optimizers_step_as_on_the_card(options):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1), nn.Flatten(0)).append(Mean())
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    graph = for_card(model, torch.randn(4, 64), optimizer=optimizer)
    n_bytes = sum(4 * p.numel() for p in model.parameters())
    (step,) = (node for node in graph.nodes if node.phase == "optimizer")
    assert step.workspace_bytes >= n_bytes if "fused" not in options else step.workspace_bytes == 0


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def test_python_code_sees_a_card():
    """In forward, and in the backward pass of a function that is written in Python."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            assert gradient.is_cuda
            return gradient * torch.full((8,), 2.0, device=gradient.device)

    class Net(nn.Linear):
        def forward(self, x):
            assert x.is_cuda
            assert x.device.type == "cuda"
            shift = torch.arange(8, device=x.device)
            return Twice.apply(super().forward(x) + shift).mean()

    graph = for_card(Net(8, 8), torch.randn(4, 8))
    assert operators(graph)["full"] == 1


def test_a_model_may_ask_for_the_compute_capability():
    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.mean() if torch.cuda.get_device_capability(x.device) >= (8, 0) else y.sum()

    x = torch.randn(4, 8)
    assert operators(for_card(Net(8, 8), x, "a100"))["mean"] == 1
    assert operators(for_card(Net(8, 8), x, "t4"))["mean"] == 0


def test_values_of_the_batch_can_be_read():
    class Net(nn.Linear):
        def forward(self, x, mask):
            y = super().forward(x)
            ahead = torch.arange(4, device=x.device)
            return y.mean() if bool(mask.all()) and int(ahead.max()) == 3 else y.sum()

    found = operators(for_card(Net(8, 8), (torch.randn(4, 8), torch.ones(4, dtype=torch.bool))))
    assert found["mean"] == 1


def test_a_loss_outside_of_the_model_is_traced_for_the_card_too():
    graph = for_card(
        nn.Linear(8, 8), torch.randn(4, 8), loss=lambda output, batch: output.square().mean()
    )
    assert any(node.phase == "outside" for node in graph.nodes)


@pytest.mark.slow
def test_recurrent_layers_of_cudnn_are_traced_on_the_cpu():
    class Net(nn.GRU):
        def forward(self, x):
            return super().forward(x)[0].mean()

    with pytest.raises(TraceError, match="gru runs in cuDNN"):
        for_card(Net(8, 8), torch.randn(4, 2, 8))
    solution = solve(Net(8, 8), torch.randn(4, 2, 8), budget="2GB", device="h100")
    assert solution.graph.meta.environment["device"] == "cpu"


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="this PyTorch is built without CUDA, so that there is no accelerator to take away; "
    "builds with CUDA (PyPI's for Linux) run this",
)
def test_a_build_with_cuda_has_it_again():
    with no_accelerator():
        assert torch.accelerator.current_accelerator() is None
    assert torch.accelerator.current_accelerator() == torch.device("cuda")


@pytest.mark.slow
def test_nothing_stays_behind():
    model = Attention()
    x = torch.randn(2, 9, 64)
    before = torch.autograd._engine_run_backward
    graph = trace(model, x)
    for_card(model, x)
    assert torch.autograd._engine_run_backward is before
    assert trace(model, x).graph_id == graph.graph_id
    model(x).backward()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(1, device="cuda")
    assert not torch.cuda.is_available()
