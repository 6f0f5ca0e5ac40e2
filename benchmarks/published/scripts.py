"""What the scripts of linkedin/Liger-Kernel's benchmarks build for PyTorch's own implementation.

One function per script (`op` of a row), of the row's config and x together. It returns the module,
with the tensors that get gradients as its parameters, and what else matters for memory: which
tensors the script holds beside it, how it calls backward. Written after `benchmark/scripts` of that
repository, as of the releases that the rows name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Script:
    """One measured call: forward and backward of a module, after earlier calls of the same.

    module: on the meta device. beside: tensors that the script holds and the call does not use.
    gradient: of the output: none for a scalar loss; "held" from the start; "made" after forward.
    retains_graph: backward(retain_graph=True): what forward saved is held to the end of the call.
    accumulates: gradients of the earlier calls are still there, and are added to.
    has_multiplied: a product ran before, so that the caller's thread has a workspace of cuBLAS.
    compiles: other calls in the process ran torch.compile, which keeps tensors of theirs; rows do
        not say how many.
    """

    module: nn.Module
    batch: tuple[torch.Tensor, ...] = ()
    beside: tuple[torch.Tensor, ...] = field(default=())
    gradient: Literal["none", "held", "made"] = "none"
    retains_graph: bool = False
    accumulates: bool = True
    has_multiplied: bool = False
    compiles: bool = False


class Applied(nn.Module):
    """A function of parameters, such as x: they get gradients, as in the scripts."""

    def __init__(self, function: Callable[..., Any], **parts: torch.Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, *batch: torch.Tensor) -> Any:
        return self.function(self, *batch)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int64)


def linear(n_in: int, n_out: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=bias, dtype=dtype, device="meta")


def dtype_of(settings: Settings) -> torch.dtype:
    found = getattr(torch, str(settings["dtype"]).removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


# ---- layers ------------------------------------------------------------------------------------

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def mlp(settings: Settings) -> Script:
    """The gated MLP of transformers' Llama: swiglu, geglu and the tiled ones."""
    width, inner, dtype = (
        settings["hidden_size"],
        settings["intermediate_size"],
        dtype_of(settings),
    )
    activation = _ACTIVATIONS[settings["hidden_act"]]
    n_batch = settings.get("bsz", settings.get("B"))
    module = Applied(
        lambda m: m.down(activation(m.gate(m.x)) * m.up(m.x)),
        x=tensor(n_batch, settings["T"], width, dtype=dtype),
        gate=linear(width, inner, dtype),
        up=linear(width, inner, dtype),
        down=linear(inner, width, dtype),
    )
    return Script(module, gradient="made", retains_graph=True)


def rms_norm(settings: Settings) -> Script:
    """Llama's, written out; float32 weights. The script builds a second one.

    The output is float32, and so is the gradient that autograd makes of the script's own.
    """
    width, eps, dtype = settings["H"], settings["eps"], dtype_of(settings)

    def normed(m: Any) -> torch.Tensor:
        x = m.x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return m.weight * x.to(m.x.dtype)

    module = Applied(
        normed,
        x=tensor(settings["M"], width, dtype=dtype),
        weight=tensor(width),
    )
    beside = (tensor(width), tensor(settings["M"], width, dtype=dtype))
    return Script(module, beside=beside, gradient="held", retains_graph=True)


def layer_norm(settings: Settings) -> Script:
    """nn.LayerNorm; the script builds a second one."""
    width, dtype = settings["N"], dtype_of(settings)
    module = Applied(
        lambda m: m.norm(m.x),
        x=tensor(settings["M"], width, dtype=dtype),
        norm=nn.LayerNorm(width, eps=settings["eps"], dtype=dtype, device="meta"),
    )
    beside = (tensor(width, dtype=dtype), tensor(width, dtype=dtype))
    return Script(module, beside=beside, gradient="held", retains_graph=True)


def group_norm(settings: Settings) -> Script:
    """nn.GroupNorm with float32 weights; the script builds a second one."""
    n_channels, dtype = settings["C"], dtype_of(settings)
    n_groups = n_channels // settings["channels_per_group"]
    module = Applied(
        lambda m: m.norm(m.x),
        x=tensor(settings["M"], n_channels, settings["H"], dtype=dtype),
        norm=nn.GroupNorm(n_groups, n_channels, eps=settings["eps"], device="meta"),
    )
    beside = (tensor(n_channels), tensor(n_channels))
    return Script(module, beside=beside, gradient="held", retains_graph=True)


def rope(settings: Settings) -> Script:
    """Rotary embedding of queries and keys; torch.autograd.grad, so nothing accumulates."""
    dtype, n_heads, n_kv_heads = (
        dtype_of(settings),
        settings["num_q_heads"],
        settings["num_kv_heads"],
    )
    length = settings.get("seq_len", settings.get("T"))
    head_size = settings.get("hidden_size", settings.get("H")) // n_heads

    def half_turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    def rotated(m: Any, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        heads = (m.q.transpose(1, 2), m.k.transpose(1, 2))
        return tuple(x * cos + half_turned(x) * sin for x in heads)

    module = Applied(
        rotated,
        q=tensor(1, length, n_heads, head_size, dtype=dtype),
        k=tensor(1, length, n_kv_heads, head_size, dtype=dtype),
    )
    angles = (tensor(1, length, head_size, dtype=dtype),) * 2
    return Script(
        module,
        batch=tuple(torch.empty_like(each) for each in angles),
        beside=(indices(1, length), tensor(head_size // 2)),
        gradient="held",
        retains_graph=True,
        accumulates=False,
        has_multiplied=True,  # positions times frequencies
    )


def embedding(settings: Settings) -> Script:
    """nn.Embedding; the script builds a second one."""
    n_rows, width, dtype = settings["V"], settings["D"], dtype_of(settings)
    module = Applied(
        lambda m, tokens: m.embedding(tokens),
        embedding=nn.Embedding(n_rows, width, dtype=dtype, device="meta"),
    )
    batch = (indices(settings["B"], settings["T"]),)
    beside = (tensor(n_rows, width, dtype=dtype),)
    return Script(module, batch=batch, beside=beside, gradient="made", compiles=True)


# ---- losses ------------------------------------------------------------------------------------


def cross_entropy(settings: Settings) -> Script:
    """Of float32 logits."""
    n_rows, n_classes = settings["B"] * settings["T"], settings["V"]
    module = Applied(lambda m, target: F.cross_entropy(m.x, target), x=tensor(n_rows, n_classes))
    return Script(module, batch=(indices(n_rows),))


def head_and_cross_entropy(settings: Settings) -> Script:
    """A head and the loss of its logits; the script builds a second head."""
    dtype, n_rows = dtype_of(settings), settings["BT"]
    width, n_classes = settings["H"], settings["V"]
    module = Applied(
        lambda m, target: F.cross_entropy(m.head(m.x), target),
        x=tensor(n_rows, width, dtype=dtype),
        head=linear(width, n_classes, dtype),
    )
    beside = (tensor(n_classes, width, dtype=dtype),)
    return Script(module, batch=(indices(n_rows),), beside=beside)


def kl_div(settings: Settings) -> Script:
    """Of float32 log-probabilities, made before the call, from their logits."""
    n_rows, n_classes = settings["B"] * settings["T"], settings["V"]
    module = Applied(
        lambda m, target: F.kl_div(m.x.log_softmax(-1), target, reduction="batchmean"),
        x=tensor(n_rows, n_classes),
    )
    return Script(module, batch=(tensor(n_rows, n_classes),), retains_graph=True)


def jsd(settings: Settings) -> Script:
    """Jensen-Shannon divergence of float32 log-probabilities, made before the call."""
    n_rows, n_classes = settings["B"] * settings["T"], settings["V"]

    def divergence(m: Any, target: torch.Tensor) -> torch.Tensor:
        return jensen_shannon(m.x.log_softmax(-1), target)

    module = Applied(divergence, x=tensor(n_rows, n_classes))
    return Script(module, batch=(tensor(n_rows, n_classes),), retains_graph=True)


def jensen_shannon(log_q: torch.Tensor, log_p: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    """Summed over classes, averaged over rows; of float32 log-probabilities."""
    mixed = torch.lerp(torch.exp(log_q), torch.exp(log_p), beta)

    def kl(target: torch.Tensor) -> torch.Tensor:
        return F.kl_div(torch.log(mixed), target, reduction="none", log_target=True)

    loss = beta * kl(log_p).sum(dim=-1) + (1 - beta) * kl(log_q).sum(dim=-1)
    return (loss / log_q.shape[0]).sum()


def head_and_jsd(settings: Settings) -> Script:
    """Jensen-Shannon divergence of two heads' float32 log-probabilities.

    The teacher's head gets gradients too. The script's second pair of heads shares these weights.
    """
    dtype, n_rows = dtype_of(settings), settings["BT"]
    width, n_classes = settings["H"], settings["V"]

    def divergence(m: Any, teacher_input: torch.Tensor) -> torch.Tensor:
        student, teacher = m.student(m.x), m.teacher(teacher_input)
        of_student = torch.log_softmax(student / 1.0, dim=-1)
        of_teacher = torch.log_softmax(teacher / 1.0, dim=-1)
        log_p, log_q = of_teacher.to(torch.float32), of_student.to(torch.float32)
        return jensen_shannon(log_q, log_p).to(dtype)

    module = Applied(
        divergence,
        x=tensor(n_rows, width, dtype=dtype),
        student=linear(width, n_classes, dtype),
        teacher=linear(width, n_classes, dtype),
    )
    return Script(module, batch=(tensor(n_rows, width, dtype=dtype),))


def distillation_jsd(settings: Settings) -> Script:
    """Cross-entropy of a student's float32 logits and their divergence from a frozen teacher's.

    The student is half as wide. The script builds both heads twice, and holds the student's input
    three times.
    """
    dtype, n_rows = dtype_of(settings), settings["BT"]
    width, n_classes = settings["H"], settings["V"]
    hard, soft = settings["weight_hard_loss"], settings["weight_soft_loss"]
    ignored, beta = settings["ignore_index"], 0.5

    def loss_of(m: Any, teacher_input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        student = (m.x @ m.student.weight.t()).float()
        with torch.no_grad():
            teacher = (teacher_input @ m.teacher.weight.t()).float()
        of_targets = F.cross_entropy(student, target, ignore_index=ignored)
        soft_student, soft_teacher = student / 1.0, teacher / 1.0
        log_q, log_p = F.log_softmax(soft_student, dim=-1), F.log_softmax(soft_teacher, dim=-1)
        mixed = beta * torch.exp(log_q) + (1 - beta) * torch.exp(log_p)
        log_mixed = mixed.log()
        of_q = F.kl_div(log_mixed, log_q, reduction="batchmean", log_target=True)
        of_p = F.kl_div(log_mixed, log_p, reduction="batchmean", log_target=True)
        return hard * of_targets + soft * (beta * of_p + (1 - beta) * of_q)

    module = Applied(
        loss_of,
        x=tensor(n_rows, width // 2, dtype=dtype),
        student=linear(width // 2, n_classes, dtype),
        teacher=linear(width, n_classes, dtype),
    )
    heads = (tensor(n_classes, width // 2, dtype=dtype), tensor(n_classes, width, dtype=dtype))
    inputs = (tensor(n_rows, width // 2, dtype=dtype),) * 2
    batch = (tensor(n_rows, width, dtype=dtype), indices(n_rows))
    return Script(module, batch=batch, beside=(*heads, *inputs), compiles=True)


def head_and_orpo(settings: Settings) -> Script:
    """Odds-ratio preference loss of a head; half of the batch is chosen. A second head is built.

    The script was changed on the day of its runs (release 0.4.0): from the mean of all
    log-probabilities to those of the labels, of float32 logits, as TRL has it.
    """
    dtype, width, n_classes = dtype_of(settings), settings["H"], settings["V"]
    n_batch, length = settings["B"], settings["T"]
    half = n_batch // 2

    def of_all(m: Any, target: torch.Tensor) -> torch.Tensor:
        logits = m.head(m.x)
        of_targets = F.cross_entropy(logits[:half].view(-1, n_classes), target[:half].view(-1))
        log_probabilities = F.log_softmax(logits, dim=-1).mean(dim=-1)
        return of_targets - odds_ratio(log_probabilities[:half], log_probabilities[half:]).mean()

    def of_labels(m: Any, target: torch.Tensor) -> torch.Tensor:
        outputs = m.x @ m.head.weight.t()
        logits = outputs.float()
        of_targets = F.cross_entropy(logits[:half].view(-1, n_classes), target[:half].view(-1))
        counts = target != -100
        labels = torch.where(target == -100, 0, target).unsqueeze(2)
        each = torch.gather(logits.log_softmax(-1), dim=2, index=labels).squeeze(2)
        log_probabilities = (each * counts).sum(-1) / counts.sum(-1)
        return of_targets - odds_ratio(log_probabilities[:half], log_probabilities[half:]).mean()

    module = Applied(
        of_all if settings["date"] < "2024-11-13 22" else of_labels,
        x=tensor(n_batch, length, width, dtype=dtype),
        head=linear(width, n_classes, dtype),
    )
    beside = (tensor(n_classes, width, dtype=dtype),)
    return Script(module, batch=(indices(n_batch, length),), beside=beside, compiles=True)


def odds_ratio(chosen: torch.Tensor, rejected: torch.Tensor, beta: float = 0.1) -> torch.Tensor:
    """Hong et al. 2024 (ORPO), equations 4 and 7, of log-probabilities."""
    log_odds = (chosen - rejected) - (
        torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
    )
    return beta * F.logsigmoid(log_odds)


SCRIPTS: Mapping[str, Callable[[Settings], Script]] = {
    "swiglu": mlp,
    "geglu": mlp,
    "tiled_swiglu": mlp,
    "tiled_geglu": mlp,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "rope": rope,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
    "kl_div": kl_div,
    "jsd": jsd,
    "fused_linear_cross_entropy": head_and_cross_entropy,
    "fused_linear_jsd": head_and_jsd,
    "distill_jsd_loss": distillation_jsd,
    "fused_linear_orpo_loss": head_and_orpo,
}
