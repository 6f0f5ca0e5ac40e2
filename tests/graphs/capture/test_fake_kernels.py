"""Results of operators on fake tensors have the memory layout of the CPU kernels."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.same_bits import keeping_nothing
from graphs.capture.as_eager.known_values import KnowingMode
from graphs.trace import trace
from scheduler_runtime import apply
from tests.support.bitwise import assert_equal, assert_same_gradients, one_step

aten = torch.ops.aten
Tensor = torch.Tensor


def batch_norm(x: Tensor) -> Tensor:
    n = x.shape[1]
    mean, variance = torch.zeros(n), torch.ones(n)
    return aten._native_batch_norm_legit_functional(
        x, torch.ones(n), torch.zeros(n), mean, variance, True, 0.1, 1e-5
    )[0]


FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "batch norm": batch_norm,
    "log sigmoid": lambda x: aten.log_sigmoid_forward(x)[0],
    "roll": lambda x: x.roll(1, 1),
    "relu": F.relu,
}
WITH_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "log sigmoid": F.logsigmoid,
    "elu": F.elu,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "leaky relu": F.leaky_relu,
    "softplus": F.softplus,
    "log softmax": lambda x: F.log_softmax(x, 1),
    "prelu": lambda x: F.prelu(x, torch.full((x.shape[1],), 0.3)),
    "huber": lambda x: F.huber_loss(x, torch.zeros(x.shape), reduction="none"),
    "squares": lambda x: F.mse_loss(x, torch.zeros(x.shape), reduction="none"),
    "smooth l1": lambda x: F.smooth_l1_loss(x, torch.zeros(x.shape), reduction="none"),
    "gelu": F.gelu,
}


def layouts(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Tensors of this shape: contiguous, transposed, expanded, with gaps, channels last."""
    yield torch.randn(shape)
    for one, other in itertools.combinations(range(len(shape)), 2):
        order = list(shape)
        order[one], order[other] = order[other], order[one]
        yield torch.randn(order).transpose(one, other)
    yield torch.randn(1, *shape[1:]).expand(shape)
    yield torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    if len(shape) == 4:
        yield torch.randn(shape).contiguous(memory_format=torch.channels_last)


def assert_laid_out_alike(real: Tensor, fake: Tensor) -> None:
    assert real.shape == fake.shape
    of_more_than_one = [d for d, size in enumerate(real.shape) if size > 1]
    for dim in of_more_than_one:
        assert real.stride(dim) == fake.stride(dim), (real.stride(), fake.stride())


SHAPES = [(4, 16, 5), (2, 4, 3, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str, shape: tuple[int, ...]) -> None:
    for x in layouts(shape):
        mode = KnowingMode({})
        fake_x = mode.from_tensor(x)
        with mode:
            fake = FORWARD[name](fake_x)
        assert_laid_out_alike(FORWARD[name](x), fake)


@pytest.mark.slow(sample=3, keep=8)
@pytest.mark.parametrize("name", WITH_GRADIENT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(name: str, shape: tuple[int, ...]) -> None:
    for x, incoming in itertools.product(layouts(shape), list(layouts(shape))[::3]):
        mode = KnowingMode({})
        fake_x, fake_incoming = mode.from_tensor(x).requires_grad_(), mode.from_tensor(incoming)
        real_x = x.detach().requires_grad_()
        (real,) = torch.autograd.grad(WITH_GRADIENT[name](real_x), real_x, incoming)
        with mode:
            (fake,) = torch.autograd.grad(WITH_GRADIENT[name](fake_x), fake_x, fake_incoming)
        assert_laid_out_alike(real, fake)


class NormOverTokens(nn.Module):
    """Whether a reshape copies is decided by the strides of what batch norm returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(3))
        self.mixes = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            normed = norm(x.transpose(1, 2)).transpose(1, 2)
            x = x + F.hardswish(mix(normed.reshape(-1, 16))).view(x.shape)
        return x.square().mean()


@pytest.mark.slow
def test_a_step_with_such_operators_runs_and_has_eagers_bits() -> None:
    torch.manual_seed(0)
    plain, x = NormOverTokens(), torch.randn(4, 8, 16)
    model = copy.deepcopy(plain)
    apply(model, keeping_nothing(trace(model, x)))
    assert_equal(one_step(plain, (x,), 3), one_step(model, (x,), 3))


def _through_frequencies(x: Tensor) -> Tensor:
    """Where the gradient's strides decide how the convolution before it rounds."""
    window = torch.hann_window(16)
    spectrum = torch.stft(x.flatten(), 16, 4, window=window, return_complex=True)
    mask = F.conv1d(spectrum.abs()[None], torch.full((9, 9, 3), 0.1), padding=1)
    return torch.istft(spectrum * mask[0], 16, 4, window=window).square().sum()


TAKEN_APART: dict[str, Callable[[Tensor], Tensor]] = {
    "multi margin": lambda x: F.multi_margin_loss(x[:, 0], torch.tensor([1, 0, 2, 1])),
    "multilabel margin": lambda x: F.multilabel_margin_loss(
        x[:, 0], torch.tensor([[1, 2, *[-1] * 8]] * 4)
    ),
    "hardshrink": lambda x: F.hardshrink(x, 0.3).square().sum(),
    "softshrink": lambda x: F.softshrink(x, 0.3).square().sum(),
    "bicubic": lambda x: F.interpolate(x[None], scale_factor=1.7, mode="bicubic").square().sum(),
    "antialiased": lambda x: (
        F.interpolate(x[None], size=5, mode="bilinear", antialias=True).square().sum()
    ),
    "antialiased bicubic": lambda x: (
        F.interpolate(x[None], size=5, mode="bicubic", antialias=True).square().sum()
    ),
    "istft": _through_frequencies,
}


class Scaled(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.randn(10))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("name", TAKEN_APART)
def test_what_pytorch_would_take_apart_while_tracing_has_eagers_bits(name: str) -> None:
    torch.manual_seed(0)
    plain, x = Scaled(TAKEN_APART[name]), torch.randn(4, 7, 10)
    model = copy.deepcopy(plain)
    apply(model, keeping_nothing(trace(model, x)))
    assert_equal(one_step(plain, (x,), 3), one_step(model, (x,), 3))


@pytest.mark.slow
def test_half_precision_batch_norm_in_channels_last_is_planned() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3), nn.Flatten()]
    plain = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    model = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.bfloat16):
        apply(model, keeping_nothing(trace(model, x, loss=lambda out, _x: out.float().sum())))
    gradients = []
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x).float().sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    assert_equal(*gradients)


def statistics(one: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if one is None else one.dtype
    return torch.zeros(8, dtype=dtype), torch.ones(8, dtype=dtype)


NORMS: dict[str, Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]] = {
    "layer norm": lambda x, one: aten.native_layer_norm(x, [8], one, one, 1e-5),
    "group norm": lambda x, one: aten.native_group_norm(x, one, one, 2, 8, 8, 2, 1e-5),
    "batch norm": lambda x, one: aten._native_batch_norm_legit_functional(
        x, one, one, *statistics(one), True, 0.1, 1e-5
    ),
    "batch norm in evaluation": lambda x, one: aten._native_batch_norm_legit_functional(
        x, one, one, *statistics(one), False, 0.1, 1e-5
    ),
    "batch norm without running statistics": lambda x, one: aten._native_batch_norm_legit.no_stats(
        x, one, one, True, 0.1, 1e-5
    ),
}
MIXTURES = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, None),
    (torch.float32, torch.float32),
    (torch.float32, None),
]


@pytest.mark.parametrize(("values", "parameters"), MIXTURES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_norms_have_the_dtypes_of_the_kernels(
    name: str, values: torch.dtype, parameters: torch.dtype | None
) -> None:
    """Under autocast parameters in float32 meet values in half precision."""

    def run() -> list[tuple[torch.Size, torch.dtype]]:
        one = None if parameters is None else torch.ones(8, dtype=parameters)
        results = NORMS[name](torch.ones(2, 8, 8, dtype=values), one)
        return [(each.shape, each.dtype) for each in results[:3]]

    with KnowingMode({}):
        fake = run()
    assert fake == run()


class Transcribed(nn.Module):
    """Sequences of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 5)

    def forward(
        self, x: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor
    ) -> Tensor:
        log_probs = self.linear(x).log_softmax(-1)
        return F.ctc_loss(log_probs, targets, lengths, target_lengths, zero_infinity=True)


@pytest.mark.slow
def test_the_longest_target_decides_how_much_ctc_keeps() -> None:
    """The batch tells it; a batch whose longest target has another length is another program."""
    plain, generator = Transcribed(), torch.Generator().manual_seed(0)
    model = copy.deepcopy(plain)
    for step, longest in enumerate((4, 4, 3, 4)):
        batch = (
            torch.randn(12, 2, 8, generator=generator),
            torch.randint(1, 5, (2, 4), generator=generator),
            torch.tensor([12, 10]),
            torch.tensor([2, longest]),
        )
        if step == 0:
            apply(model, keeping_nothing(trace(model, batch)), on_mismatch="replan")
        assert_equal(one_step(plain, batch, 3), one_step(model, batch, 3))


def test_targets_in_bytes() -> None:
    """PyTorch's meta functions take no bytes, its kernels do; 156 is -100 in a byte."""

    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 200)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), y)

    plain, x = Bytes(), torch.randn(5, 8)
    y = torch.tensor([156, 0, 199, 3, 156], dtype=torch.uint8)
    model = copy.deepcopy(plain)
    apply(model, keeping_nothing(trace(model, (x, y))))
    for each in (plain, model):
        each(x, y).backward()
    assert_same_gradients(plain, model)
