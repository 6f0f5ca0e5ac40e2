"""Stock checkpointing put into a module: the same object, its forward called through
`torch.utils.checkpoint.checkpoint(use_reentrant=False)`.

Only `forward` is replaced, on the instance, so names of parameters and keys of the state dict stay,
and hooks (those of FSDP2 and of people) run once, outside. All tensors of the call, wherever they
are nested, are handed over as arguments, so that an outer checkpoint can drop them.

Buffers that the forward pass changes (running statistics) are put back after it has run again:
PyTorch by itself changes them twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from graphs.calls import Call


class CountMismatchError(RuntimeError):
    """A module ran other operators than those that its plan was made for; says which."""


class SavedCalls:
    """Which operator calls of a module keep their results: by the name of the operator, the how
    manieth calls of it, counted from 0 in each forward.

    n_calls: how many calls of it there are in all, so that a program that is not the planned one is
    noticed. An operator that works in place counts as the one that does not, as in a traced graph.
    """

    def __init__(
        self, path: str, saved: Mapping[str, frozenset[int]], n_calls: Mapping[str, int]
    ) -> None:
        self.path = path
        self.saved = dict(saved)
        self.n_calls = dict(n_calls)

    def contexts(self) -> tuple[Any, Any]:
        """A pair for one call of `checkpoint`: for the forward pass, and for running it again."""
        seen: Counter[str] = Counter()
        forward, again = create_selective_checkpoint_contexts(functools.partial(self._save, seen))
        return self._checked(forward, seen), again

    def unchecked_contexts(self) -> tuple[Any, Any]:
        """The same for torch.compile, which takes no context managers of others."""
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(
            functools.partial(self._save, Counter())
        )
        return contexts

    def _save(
        self, seen: Counter[str], _context: Any, operator: Any, *_args: Any, **_kwargs: Any
    ) -> CheckpointPolicy:
        name = functional_name(str(operator))
        index = seen[name]
        seen[name] += 1
        in_place = getattr(getattr(operator, "_schema", None), "is_mutable", False)
        if index in self.saved.get(name, ()) and not in_place:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    @contextlib.contextmanager
    def _checked(self, context: Any, seen: Counter[str]) -> Iterator[None]:
        with context:
            yield
        for name, n_planned in self.n_calls.items():
            if seen[name] != n_planned:
                raise CountMismatchError(
                    f"{self.path} called {name} {seen[name]} times, planned were {n_planned}: this "
                    "call runs another program than the plan's; remove() the export, and solve "
                    "again with this batch"
                )


def _unchecked(saved: SavedCalls) -> tuple[Any, Any]:
    return saved.unchecked_contexts()


def functional_name(operator: str) -> str:
    """aten.relu_.default -> aten.relu.default: what it is called when it does not work in place."""
    parts = operator.split(".")
    if len(parts) == 3 and parts[1].endswith("_") and not parts[1].startswith("__"):
        parts[1] = parts[1].rstrip("_")
    return ".".join(parts)


class ReplacedForward:
    """Stands in for `module.forward`; this one changes nothing, and marks what a plan that leaves
    all as it is was applied to.
    """

    def __init__(self, module: nn.Module) -> None:
        self.instance_forward = module.__dict__.get("forward")
        self._module = module
        functools.update_wrapper(self, self.own_forward, updated=())

    def why_not_traced(self, title: str) -> str:
        """Asked by `graphs.trace`, which would trace this instead of the module's own forward."""
        return (
            f"{title} has an exported plan (to_torch_checkpoint), which would be traced as part of "
            "the model: exported.remove() or scheduler_runtime.remove(model) first, and export "
            "again afterwards"
        )

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The forward that the module had before."""
        if self.instance_forward is not None:
            return self.instance_forward  # type: ignore[no-any-return]
        return functools.partial(type(self._module).forward, self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


class CheckpointedForward(ReplacedForward):
    """Runs the module again as a whole, but for what is saved."""

    def __init__(
        self, module: nn.Module, *, saved: SavedCalls | None, changed_buffers: tuple[str, ...]
    ) -> None:
        super().__init__(module)
        self.saved = saved
        self.changed_buffers = changed_buffers
        self.n_runs = 0
        # the compiler takes a plain function or a partial of one
        self._compiled_contexts = None if saved is None else functools.partial(_unchecked, saved)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own_forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler functionalises buffers itself
            if self._compiled_contexts is None:
                return checkpoint(self.own_forward, *args, use_reentrant=False, **kwargs)
            return checkpoint(
                self.own_forward,
                *args,
                use_reentrant=False,
                context_fn=self._compiled_contexts,
                **kwargs,
            )
        call = Call.of(args, kwargs)
        return checkpoint(
            functools.partial(self._run, call.rest, call.spec),
            *call.tensors,
            use_reentrant=False,
            context_fn=self._contexts,
        )

    def _run(self, rest: list[Any], spec: Any, *tensors: torch.Tensor) -> Any:
        self.n_runs += 1
        args, kwargs = Call(list(tensors), rest, spec).arguments(tensors)
        return self.own_forward(*args, **kwargs)

    def _contexts(self) -> tuple[Any, Any]:
        forward, again = (
            (contextlib.nullcontext(), contextlib.nullcontext())
            if self.saved is None
            else self.saved.contexts()
        )
        return forward, with_buffers_kept(again, self._module, self.changed_buffers)


@contextlib.contextmanager
def with_buffers_kept(
    context: Any, module: nn.Module, changed_buffers: Iterable[str]
) -> Iterator[None]:
    """The context, with these buffers of the module afterwards as they were before."""
    buffers = [module.get_buffer(name) for name in changed_buffers]
    before = [buffer.clone() for buffer in buffers]
    try:
        with context:
            yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            # autograd has them among what batch norm saved, but does not read their values
            with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
                buffer.copy_(value)


def put(
    module: nn.Module,
    *,
    saved: SavedCalls | None = None,
    changed_buffers: tuple[str, ...] = (),
) -> CheckpointedForward:
    """Replace the module's forward; `changed_buffers`: names, in the module, of what it changes."""
    forward = CheckpointedForward(module, saved=saved, changed_buffers=changed_buffers)
    module.forward = forward
    return forward


def take_out(module: nn.Module) -> None:
    """Undo what replaced the module's forward; a module without it stays as it is."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, ReplacedForward):
        del module.forward
        if forward.instance_forward is not None:
            module.forward = forward.instance_forward


def remove_torch_checkpoint(model: nn.Module) -> nn.Module:
    """Undo `to_torch_checkpoint`, on a copy of the model too. Returns the same module."""
    for module in model.modules():
        take_out(module)
    return model


def has_checkpoints(model: nn.Module) -> bool:
    """Whether the forward of one of its modules is replaced, for checkpoints or for none."""
    return any(
        isinstance(module.__dict__.get("forward"), ReplacedForward) for module in model.modules()
    )
