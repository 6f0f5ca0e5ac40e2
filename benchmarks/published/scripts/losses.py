"""Losses in the benchmark scripts of linkedin/Liger-Kernel, made of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.published.errors import NotPredictedError
from benchmarks.published.scripts.script import FunctionModule, Script, indices, linear, tensor
from benchmarks.published.scripts.settings import Settings

# ---- of logits or probabilities ----------------------------------------------------------------


def cross_entropy(settings: Settings) -> Script:
    """Cross-entropy of float32 logits."""
    shape = _rows_and_classes(settings)
    module = FunctionModule(lambda m, target: F.cross_entropy(m.x, target), x=tensor(*shape))
    return Script(module, batch=(indices(shape[0]),))


def kl_div(settings: Settings) -> Script:
    """Kullback-Leibler divergence of float32 log-probabilities, made before the measured call."""
    return _divergence_script(
        settings,
        lambda m, target: F.kl_div(m.x.log_softmax(-1), target, reduction="batchmean"),
        ops_run_before="aten._log_softmax",
    )


def jsd(settings: Settings) -> Script:
    """Jensen-Shannon divergence of float32 log-probabilities, made before the measured call."""
    return _divergence_script(
        settings,
        lambda m, target: jensen_shannon(m.x.log_softmax(-1), target),
        ops_run_before="aten._log_softmax",
    )


def total_variation(settings: Settings) -> Script:
    """Total variation distance of float32 probabilities, made before the measured call."""

    def distance(m: Any, target: torch.Tensor) -> torch.Tensor:
        each = torch.abs(m.x.softmax(-1) - target) / 2.0
        return torch.sum(each) / target.size(0)

    return _divergence_script(settings, distance, ops_run_before="aten._softmax")


def _divergence_script(
    settings: Settings,
    divergence: Callable[[Any, torch.Tensor], torch.Tensor],
    *,
    ops_run_before: str,
) -> Script:
    shape = _rows_and_classes(settings)
    module = FunctionModule(divergence, x=tensor(*shape))
    return Script(
        module, batch=(tensor(*shape),), retains_graph=True, ops_run_before=(ops_run_before,)
    )


def _rows_and_classes(settings: Settings) -> tuple[int, int]:
    return settings.size("B") * settings.size("T"), settings.size("V")


def jensen_shannon(log_q: torch.Tensor, log_p: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    """Jensen-Shannon divergence of log-probabilities: summed over classes, averaged over rows."""
    mixed = torch.lerp(torch.exp(log_q), torch.exp(log_p), beta)

    def kl(target: torch.Tensor) -> torch.Tensor:
        return F.kl_div(torch.log(mixed), target, reduction="none", log_target=True)

    loss = beta * kl(log_p).sum(dim=-1) + (1 - beta) * kl(log_q).sum(dim=-1)
    return (loss / log_q.shape[0]).sum()


# ---- of heads ----------------------------------------------------------------------------------


def head_and_cross_entropy(settings: Settings) -> Script:
    """A head and the cross-entropy of its logits; the script builds a second head."""
    dtype, n_rows = settings.dtype(), settings.size("BT")
    width, n_classes = settings.size("H"), settings.size("V")
    module = FunctionModule(
        lambda m, target: F.cross_entropy(m.head(m.x), target),
        x=tensor(n_rows, width, dtype=dtype),
        head=linear(width, n_classes, dtype),
    )
    unused_tensors = (tensor(n_classes, width, dtype=dtype),)
    return Script(module, batch=(indices(n_rows),), unused_tensors=unused_tensors)


def head_and_jsd(settings: Settings) -> Script:
    """Jensen-Shannon divergence of two heads' float32 log-probabilities.

    The teacher's head gets gradients too. The script's second pair of heads shares these weights.
    """
    dtype, n_rows = settings.dtype(), settings.size("BT")
    width, n_classes = settings.size("H"), settings.size("V")

    def divergence(m: Any, teacher_input: torch.Tensor) -> torch.Tensor:
        student, teacher = m.student(m.x), m.teacher(teacher_input)
        of_student = torch.log_softmax(student / 1.0, dim=-1)
        of_teacher = torch.log_softmax(teacher / 1.0, dim=-1)
        log_p, log_q = of_teacher.to(torch.float32), of_student.to(torch.float32)
        return jensen_shannon(log_q, log_p).to(dtype)

    module = FunctionModule(
        divergence,
        x=tensor(n_rows, width, dtype=dtype),
        student=linear(width, n_classes, dtype),
        teacher=linear(width, n_classes, dtype),
    )
    return Script(module, batch=(tensor(n_rows, width, dtype=dtype),))


def distilled_jsd(settings: Settings) -> Script:
    """Cross-entropy of a student's float32 logits, and their Jensen-Shannon divergence from a
    frozen teacher's."""

    def soft(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        beta = 0.5
        soft_student, soft_teacher = student / 1.0, teacher / 1.0
        log_q, log_p = F.log_softmax(soft_student, dim=-1), F.log_softmax(soft_teacher, dim=-1)
        mixed = beta * torch.exp(log_q) + (1 - beta) * torch.exp(log_p)
        log_mixed = mixed.log()
        of_q = F.kl_div(log_mixed, log_q, reduction="batchmean", log_target=True)
        of_p = F.kl_div(log_mixed, log_p, reduction="batchmean", log_target=True)
        return beta * of_p + (1 - beta) * of_q

    return _distillation_script(settings, soft)


def distilled_cosine(settings: Settings) -> Script:
    """Cross-entropy of a student's float32 logits, and their cosine distance from a frozen
    teacher's."""

    def soft(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        student /= 1.0
        teacher /= 1.0
        student_norm = F.normalize(student, p=2, dim=-1)
        teacher_norm = F.normalize(teacher, p=2, dim=-1)
        return (1 - F.cosine_similarity(student_norm, teacher_norm, dim=-1)).mean()

    return _distillation_script(settings, soft)


def _distillation_script(
    settings: Settings, soft_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Script:
    """A distillation loss: a weighted sum of the cross-entropy and of `soft_loss`.

    soft_loss: (logits of the student, logits of the teacher) -> loss.

    The student is half as wide as the teacher. The script builds both heads twice and holds the
    student's input three times. A row with biases raises NotPredictedError.
    """
    dtype, n_rows = settings.dtype(), settings.size("BT")
    width, n_classes = settings.size("H"), settings.size("V")
    hard_weight, soft_weight = (
        settings.number("weight_hard_loss"),
        settings.number("weight_soft_loss"),
    )
    if settings.flag("bias"):
        raise NotPredictedError("heads with a bias are none of the releases described here")
    ignored = -100

    def loss_of(m: Any, teacher_input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        student = (m.x @ m.student.weight.t()).float()
        with torch.no_grad():
            teacher = (teacher_input @ m.teacher.weight.t()).float()
        hard_loss = F.cross_entropy(student, target, ignore_index=ignored)
        return hard_weight * hard_loss + soft_weight * soft_loss(student, teacher)

    module = FunctionModule(
        loss_of,
        x=tensor(n_rows, width // 2, dtype=dtype),
        student=linear(width // 2, n_classes, dtype),
        teacher=linear(width, n_classes, dtype),
    )
    heads = (tensor(n_classes, width // 2, dtype=dtype), tensor(n_classes, width, dtype=dtype))
    inputs = (tensor(n_rows, width // 2, dtype=dtype),) * 2
    batch = (tensor(n_rows, width, dtype=dtype), indices(n_rows))
    return Script(module, batch=batch, unused_tensors=(*heads, *inputs), has_compiled_before=True)


# ---- of preferences ----------------------------------------------------------------------------


def orpo(settings: Settings) -> Script:
    """ORPO, by odds ratios (Hong et al. 2024, equations 4 and 7).

    The script was changed on the day of its runs (release 0.4.0), from the mean of all
    log-probabilities to those of the labels, computed from float32 logits, as in TRL.
    """

    def odds(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        log_odds = (chosen - rejected) - (
            torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
        )
        return -0.1 * F.logsigmoid(log_odds)

    return _preference_script(settings, odds, uses_labels=settings.date >= "2024-11-13 22")


def cpo(settings: Settings) -> Script:
    """CPO, a contrastive loss (Xu et al. 2024); SimPO's differs in a constant."""
    return _preference_script(
        settings,
        lambda chosen, rejected: -F.logsigmoid(0.1 * (chosen - rejected)),
        uses_labels=True,
    )


def dpo(settings: Settings) -> Script:
    """DPO, direct preferences (Rafailov et al. 2023), with a head and a frozen one without a bias.

    The script makes new heads in each call, and its inputs get no gradients. Before 2025 it had no
    frozen head.
    """
    if settings.date < "2025":
        raise NotPredictedError("what the script of dpo_loss built before 2025 is not described")
    dtype, width, n_classes = settings.dtype(), settings.size("H"), settings.size("V")
    shape = (settings.size("B"), settings.size("T"))
    half = shape[0] // 2
    if shape[0] % 2:
        raise NotPredictedError(f"B is {shape[0]}; half of the batch is chosen")

    def label_log_probabilities(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        counts = target != -100
        labels = torch.where(target == -100, 0, target).unsqueeze(2)
        each = torch.gather(logits.log_softmax(-1), dim=2, index=labels).squeeze(2)
        return (each * counts).sum(-1) / counts.sum(-1)

    def trained(m: Any, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = x @ m.head.weight.t()
        if m.head.bias is not None:
            outputs = outputs + m.head.bias
        logits = outputs.float()
        return label_log_probabilities(logits, target), logits

    def frozen(m: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return label_log_probabilities(x @ m.frozen.weight.t(), target)

    def loss_of(m: Any, x: torch.Tensor, frozen_x: torch.Tensor, target: torch.Tensor) -> Any:
        found, logits = trained(m, x, target)
        expected = frozen(m, frozen_x, target)
        chosen, rejected = found[:half] - expected[:half], found[half:] - expected[half:]
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        return loss, logits[:half].detach().mean(), logits[half:].detach().mean()

    module = FunctionModule(
        lambda m, *batch: loss_of(m, *batch)[0],
        head=linear(width, n_classes, dtype, bias=settings.flag("bias")),
        frozen=linear(width, n_classes, dtype),
    )
    inputs = tuple(tensor(*shape, width, dtype=dtype) for _ in range(2))
    return Script(
        module, batch=(*inputs, indices(*shape)), accumulates=False, has_compiled_before=True
    )


def grpo(settings: Settings) -> Script:
    """GRPO over the tokens of a group (Shao et al. 2024), with a frozen head. The script builds
    both heads twice."""
    dtype, width, n_classes = settings.dtype(), settings.size("H"), settings.size("V")
    shape = (settings.size("B"), settings.size("T"))
    by_sequence = settings.one_of("importance_sampling_level", {"token": False, "sequence": True})

    def loss_of(m: Any, frozen_x: torch.Tensor, tokens: torch.Tensor, *others: torch.Tensor) -> Any:
        logits = m.x @ m.head.weight.t()
        log_probabilities = F.log_softmax(logits.float(), dim=-1)
        found = log_probabilities.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            frozen_logits = frozen_x @ m.frozen.weight.t()
            frozen_log_probabilities = F.log_softmax(frozen_logits.float(), dim=-1)
            expected = frozen_log_probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return loss_of_tokens(found, expected, *others)

    def loss_of_tokens(
        found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        log_ratio = found - found.detach()
        if by_sequence:
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1)).unsqueeze(-1)
        ratio = torch.exp(log_ratio)
        clipped = torch.clamp(ratio, 0.8, 1.2) * advantages.unsqueeze(1)
        divergence = torch.exp(expected - found) - (expected - found) - 1.0
        each = 0.1 * divergence - torch.min(ratio * advantages.unsqueeze(1), clipped)
        return (each * mask).sum() / mask.sum()

    module = FunctionModule(
        loss_of,
        x=tensor(*shape, width, dtype=dtype),
        head=linear(width, n_classes, dtype),
        frozen=linear(width, n_classes, dtype),
    )
    weights = tuple(tensor(n_classes, width, dtype=dtype) for _ in range(2))
    mask_and_advantages = (tensor(*shape), tensor(shape[0], dtype=dtype))
    batch = (tensor(*shape, width, dtype=dtype), indices(*shape), *mask_and_advantages)
    return Script(module, batch=batch, unused_tensors=weights, has_compiled_before=True)


def _preference_script(
    settings: Settings,
    preference_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    uses_labels: bool,
) -> Script:
    """A preference loss of a head: one half of the batch is chosen, the other rejected. The script
    builds a second head.

    preference_loss: (log-probabilities of the chosen half, those of the rejected half) -> losses.
    uses_labels: compare the log-probabilities of the labels, else the mean over all classes.
    """
    dtype, width, n_classes = settings.dtype(), settings.size("H"), settings.size("V")
    n_batch, length = settings.size("B"), settings.size("T")
    half = n_batch // 2
    if n_batch % 2:
        raise NotPredictedError(f"B is {n_batch}; half of the batch is chosen")

    def with_all(m: Any, target: torch.Tensor) -> torch.Tensor:
        logits = m.head(m.x)
        target_loss = F.cross_entropy(logits[:half].view(-1, n_classes), target[:half].view(-1))
        log_probabilities = F.log_softmax(logits, dim=-1).mean(dim=-1)
        return (
            target_loss + preference_loss(log_probabilities[:half], log_probabilities[half:]).mean()
        )

    def with_labels(m: Any, target: torch.Tensor) -> torch.Tensor:
        outputs = m.x @ m.head.weight.t()
        logits = outputs.float()
        target_loss = F.cross_entropy(logits[:half].view(-1, n_classes), target[:half].view(-1))
        counts = target != -100
        labels = torch.where(target == -100, 0, target).unsqueeze(2)
        each = torch.gather(logits.log_softmax(-1), dim=2, index=labels).squeeze(2)
        log_probabilities = (each * counts).sum(-1) / counts.sum(-1)
        return (
            target_loss + preference_loss(log_probabilities[:half], log_probabilities[half:]).mean()
        )

    module = FunctionModule(
        with_labels if uses_labels else with_all,
        x=tensor(n_batch, length, width, dtype=dtype),
        head=linear(width, n_classes, dtype),
    )
    unused_tensors = (tensor(n_classes, width, dtype=dtype),)
    return Script(
        module,
        batch=(indices(n_batch, length),),
        unused_tensors=unused_tensors,
        has_compiled_before=True,
    )
