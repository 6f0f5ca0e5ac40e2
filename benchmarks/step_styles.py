"""Training steps as people write them: how a model is prepared, and how an optimizer step runs.

Each style runs on a model with a plan and on one without, which must be bitwise identical. So a
style records everything that it can see: losses, the gradients that hooks get, the calls of hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.zoo import Entry
from graphs.model_calls import as_call, find_loss

Seen = dict[str, torch.Tensor]
"""Name -> tensor that a step has shown (besides parameters, buffers, gradients)."""


@dataclass
class Training:
    """One model in training, with what its steps need.

    entry: how the model is called and where its loss is computed.
    optimizer: None if the style has its own optimizers.
    scaler: gradient scaler, for half precision (None: none).
    seen: what the current step has shown.
    output: the model's output, held to the end of the step, as a plan expects.
    """

    model: nn.Module
    batch: Any
    entry: Entry
    optimizer: torch.optim.Optimizer | None = None
    scaler: torch.amp.GradScaler | None = None
    seen: Seen = field(default_factory=dict)
    output: Any = None

    def loss(self) -> torch.Tensor:
        """Run the forward pass and return the loss, which model or caller computes."""
        args, kwargs = as_call(self.batch, self.entry.inputs)
        self.output = self.model(*args, **kwargs)
        loss = self.entry.loss
        return find_loss(self.output) if loss is None else loss(self.output, self.batch)

    def zero_grad(self) -> None:
        self.model.zero_grad()
        for tensor in pytree.tree_leaves(self.batch):
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor under this name, with a count of those noted under it before.

        The copy is in NumPy's memory, which the measured peak of the step does not include.
        """
        count = sum(other.startswith(name) for other in self.seen)
        seen = tensor.detach().cpu()
        copied = torch.from_numpy(seen.reshape(-1).view(torch.uint8).numpy().copy())
        self.seen[f"{name} ({count})"] = copied.view(seen.dtype).view(seen.shape)


@dataclass(frozen=True)
class Style:
    """How a training step is written.

    step: runs one optimizer step.
    prepare: changes model and batch before planning (None: does not).
    set_up: adds hooks and optimizers to a training, after planning (None: adds none).
    applies: (model, batch) -> whether the style can train this model.
    autocast: dtype for the forward pass and the loss (None: no autocast).
    gradients: as in `solve`.
    steps_inside: the optimizer steps while the backward pass runs.
    own_bytes: model -> the most bytes that the step takes besides model, loss and optimizer. Plans
        do not know of them, so the measured peak may be higher by them.
    """

    step: Callable[[Training], None]
    prepare: Callable[[nn.Module, Any], tuple[nn.Module, Any]] | None = None
    set_up: Callable[[Training], None] | None = None
    applies: Callable[[nn.Module, Any], bool] = lambda _model, _batch: True
    autocast: torch.dtype | None = None
    gradients: str = "fresh"
    steps_inside: bool = False
    own_bytes: Callable[[nn.Module], int] = lambda _model: 0


def autocast_to(dtype: torch.dtype | None) -> torch.autocast:
    """Autocast of the forward pass; off for None."""
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


def _step(
    training: Training, *, autocast: torch.dtype | None = None, max_norm: float | None = None
) -> None:
    """A step as in PyTorch's examples, with a gradient scaler if the training has one."""
    optimizer, scaler = training.optimizer, training.scaler
    assert optimizer is not None
    training.zero_grad()
    with autocast_to(autocast):
        loss = training.loss()
    (loss if scaler is None else scaler.scale(loss)).backward()
    training.note("loss", loss)
    if scaler is not None:
        scaler.unscale_(optimizer)
    if max_norm is not None:
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), max_norm)
        training.note("norm", norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _accumulation_step(training: Training) -> None:
    """A step of two micro-batches; gradients are set to zero in place, not to None."""
    assert training.optimizer is not None
    training.optimizer.zero_grad(set_to_none=False)
    for _ in range(2):
        loss = training.loss() / 2
        loss.backward()
        training.note("loss", loss)
        training.output = None  # else it is live in the next micro-batch, which no plan expects
    training.optimizer.step()


def _add_scaler(training: Training) -> None:
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)


def _add_hooks(training: Training) -> None:
    """Add every kind of hook that training scripts put on parameters and on the whole model.

    One hook changes a gradient; others note gradients before and after they are accumulated.
    """
    named = [(n, p) for n, p in training.model.named_parameters() if p.requires_grad]
    named[0][1].register_hook(lambda gradient: gradient * 2)
    name, parameter = named[-1]
    parameter.register_hook(lambda gradient: training.note(f"gradient of {name}", gradient))
    middle, parameter = named[len(named) // 2]
    parameter.register_post_accumulate_grad_hook(
        lambda p: training.note(f"accumulated {middle}", p.grad)
    )

    def note_call(_module: nn.Module, args: Any, *rest: Any) -> None:
        tensors = [t for t in pytree.tree_leaves((args, rest)) if isinstance(t, torch.Tensor)]
        for tensor in tensors[:1]:
            training.note("handed to a hook of the model", tensor)

    training.model.register_forward_pre_hook(note_call, with_kwargs=True)
    training.model.register_forward_hook(note_call, with_kwargs=True)


def _step_in_backward(training: Training) -> None:
    """Step each parameter and drop its gradient as soon as the gradient is accumulated."""
    training.optimizer = None
    for name, parameter in training.model.named_parameters():
        if not parameter.requires_grad:
            continue
        optimizer = torch.optim.AdamW([parameter], lr=1e-3)

        def step(name: str, optimizer: torch.optim.Optimizer, stepped: torch.Tensor) -> None:
            training.note(f"gradient of {name}", stepped.grad)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(partial(step, name, optimizer))


def _backward_step(training: Training) -> None:
    loss = training.loss()
    loss.backward()
    training.note("loss", loss)


def _freeze_half(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Freeze the first half of the parameters, as when the upper layers are fine-tuned."""
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)
    return model, batch


def _add_lora(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Put the peft library's low-rank adapters on every linear layer; all else is frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    # peft refuses Mamba's out_proj, whose weight a fused kernel reads past the adapter
    refused = ("out_proj",) if model.config.model_type == "mamba" else ()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not name.endswith(refused)
    ]
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=linear)
    return get_peft_model(model, config).train(), batch


def _require_input_gradients(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Ask for gradients of the batch's floating-point tensors (saliency, adversarial examples)."""
    return model, pytree.tree_map_only(
        torch.Tensor, lambda t: t.requires_grad_(True) if t.is_floating_point() else t, batch
    )


def _has_floating_point(_model: nn.Module, batch: Any) -> bool:
    return any(
        isinstance(t, torch.Tensor) and t.is_floating_point() for t in pytree.tree_leaves(batch)
    )


SCALER_BYTES = 1024
"""The scalar tensors of a gradient scaler (scale, growth, found_inf); each takes a block of the
allocator."""


def _trainable_sizes_bytes(model: nn.Module) -> list[int]:
    return [p.nbytes for p in model.parameters() if p.requires_grad]


def _bytes_of_hooks(model: nn.Module) -> int:
    """For the doubled gradient of the first parameter, and the norm of each gradient."""
    sizes = _trainable_sizes_bytes(model)
    return sizes[0] + 2 * NORM_BYTES * len(sizes)


def _bytes_of_stepping(model: nn.Module) -> int:
    """For two temporaries of AdamW, as large as the parameter that it steps: the square root of the
    second moment, and that divided by the bias correction.
    """
    return 2 * max(_trainable_sizes_bytes(model))


NORM_BYTES = 64
"""What a scalar tensor takes in the allocator."""
STYLES: dict[str, Style] = {
    "plain": Style(_step),
    "accumulation": Style(_accumulation_step, gradients="accumulate"),
    "autocast bf16": Style(partial(_step, autocast=torch.bfloat16), autocast=torch.bfloat16),
    "autocast fp16, scaler": Style(
        partial(_step, autocast=torch.float16, max_norm=1.0),
        set_up=_add_scaler,
        autocast=torch.float16,
        own_bytes=lambda _model: SCALER_BYTES,
    ),
    "hooks, clipping": Style(
        partial(_step, max_norm=0.1), set_up=_add_hooks, own_bytes=_bytes_of_hooks
    ),
    "optimizer in backward": Style(
        _backward_step,
        set_up=_step_in_backward,
        steps_inside=True,
        own_bytes=_bytes_of_stepping,
    ),
    "half frozen": Style(_step, prepare=_freeze_half),
    "LoRA": Style(
        _step,
        prepare=_add_lora,
        applies=lambda model, _batch: type(model).__module__.startswith("transformers."),
    ),
    "gradients of inputs": Style(
        _step, prepare=_require_input_gradients, applies=_has_floating_point
    ),
}
