"""Put stock checkpointing into a module, by replacing its forward.

The new forward calls the old one through `torch.utils.checkpoint.checkpoint(use_reentrant=False)`.
It is set on the instance, so parameter names and state dict keys stay the same, and hooks (FSDP2's
and the user's) run once, outside of it. All tensors of a call, however deeply nested, are passed to
`checkpoint` as arguments, so that an outer checkpoint can free them.

A recomputation changes copies of what the forward pass changes in place (running statistics), not
the module's own buffers and parameters; PyTorch's checkpoints would change them twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from graphs.model_calls import Call
from scheduler_runtime.execute.as_in_forward import AsInForward
from scheduler_runtime.execute.replaced_forward import ReplacedForward, restore_forward
from scheduler_runtime.execute.unread_results import Keep, skipping_contexts


class CountMismatchError(RuntimeError):
    """A module ran other operators than its plan was made for; the message says which."""


def check_counts(title: str, seen: Mapping[str, int], planned: Mapping[str, int]) -> None:
    """Raise CountMismatchError if a module has not called each operator as often as planned.

    title: name of the module, for the message.
    seen, planned: operator -> number of calls.
    """
    for name, n_planned in planned.items():
        if seen[name] != n_planned:
            raise CountMismatchError(
                f"{title} called {name} {seen[name]} times, but the plan expects {n_planned}: this "
                "call runs a different program; remove() the export and solve again with this batch"
            )


@dataclass(frozen=True, eq=False)
class SavedCalls:
    """Which operator calls of the module at `path` keep their results.

    In-place operators are named by their functional forms, as in a traced graph.

    path: path of the module, for messages.
    saved: operator -> indices of the calls that keep results, counted from 0 in each forward.
    without_first: the same, for those saved calls whose first result nobody reads.
    skipped: the same, for calls whose results nobody reads when the module is recomputed.
    n_calls: operator -> number of calls, so that a program other than the planned one is noticed.
    counts_local_parts: whether to count operators on a rank's local parts of distributed tensors,
        which PyTorch's selective checkpointing does not see.
    """

    path: str
    saved: Mapping[str, frozenset[int]]
    without_first: Mapping[str, frozenset[int]]
    skipped: Mapping[str, frozenset[int]]
    n_calls: Mapping[str, int]
    counts_local_parts: bool = False

    def contexts(self) -> tuple[Any, Any]:
        """The contexts of forward and recomputation, for one call of `checkpoint`."""
        seen: Counter[str] = Counter()
        n_recomputed: Counter[str] = Counter()
        forward, recomputation = (
            (contextlib.nullcontext(), contextlib.nullcontext())
            if self.counts_local_parts
            else _unchecked_contexts(self, seen)
        )

        def keep(operator: Any) -> Keep:
            name = functional_name(str(operator))
            # otherwise the policy has counted this call already
            seen[name] += self.counts_local_parts
            index = seen[name] - 1
            if self._kept_by_us(operator, name, index):
                return "part"
            is_saved = self.counts_local_parts and index in self.saved.get(name, ())
            return "all" if is_saved else ""

        def skip(operator: Any) -> bool:
            name = functional_name(str(operator))
            index = n_recomputed[name]
            n_recomputed[name] += 1
            # only if the forward pass was the planned one: indices mean nothing in another program
            return index in self.skipped.get(name, ()) and seen[name] == self.n_calls[name]

        recording, skipping = skipping_contexts(keep=keep, skip=skip)
        return self._with_count_check(forward, recording, seen), _ContextsForOneRecomputation(
            self.path, recomputation, skipping
        )

    def _policy(
        self,
        seen: Counter[str],
        seen_again: Counter[str],
        context: Any,
        operator: Any,
        *_args: Any,
        **_kwargs: Any,
    ) -> CheckpointPolicy:
        name = functional_name(str(operator))
        # torch 2.13 asks in the forward pass alone, earlier releases in the recomputation as well
        counts = seen_again if context.is_recompute else seen
        index = counts[name]
        counts[name] += 1
        if index in self.saved.get(name, ()) and not self._kept_by_us(operator, name, index):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def _kept_by_us(self, operator: Any, name: str, index: int) -> bool:
        """Whether this is a saved call that PyTorch's selective checkpointing cannot handle: it can
        only keep all results of a call, and no results of in-place operators."""
        in_place = getattr(getattr(operator, "_schema", None), "is_mutable", False)
        is_part = index in self.without_first.get(name, ())
        return is_part or (in_place and index in self.saved.get(name, ()))

    @contextlib.contextmanager
    def _with_count_check(self, context: Any, recording: Any, seen: Counter[str]) -> Iterator[None]:
        with context, recording:
            yield
        check_counts(self.path, seen, {name: self.n_calls[name] for name in self.saved})


class _ContextsForOneRecomputation(contextlib.ExitStack):
    """The contexts, for one recomputation: it takes the results that were kept."""

    def __init__(self, path: str, *contexts: Any) -> None:
        super().__init__()
        self._path, self._contexts = path, contexts

    def __enter__(self) -> _ContextsForOneRecomputation:
        contexts, self._contexts = self._contexts, ()
        if not contexts:
            raise RuntimeError(
                f"backward ran a second time through {self._path}, which the export recomputes but "
                "for some operators, whose results are freed. Sum the losses and call backward "
                "once, or use the plain model for retain_graph and several backward calls "
                "(checkpoint_solver.remove(model))"
            )
        for each in contexts:
            self.enter_context(each)
        return self


def _unchecked_contexts(saved: SavedCalls, seen: Counter[str] | None = None) -> Any:
    """PyTorch's own selective checkpointing contexts, the only ones that torch.compile accepts.

    seen: counts the calls of each operator.
    """
    policy = functools.partial(saved._policy, Counter() if seen is None else seen, Counter())
    return create_selective_checkpoint_contexts(policy)


@functools.cache
def operator_named(operator: str) -> torch._ops.OpOverload | None:
    """The operator of this name. None: there is none; the name is that of an untraceable part."""
    found: Any = torch.ops
    for part in operator.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


@functools.cache
def functional_name(operator: str) -> str:
    """The name of an operator's functional form: aten.relu_.default -> aten.relu.default.

    As in functionalization, that is the overload with the same arguments, whatever its name:
    aten.bernoulli_.float -> aten.bernoulli.p. An operator without such a form keeps its name.
    """
    given = operator_named(operator)
    if given is None or not given._schema.is_mutable:
        return operator
    namespace, name, _ = operator.split(".")
    arguments = _arguments(given)
    for form in (name.rstrip("_"), f"{name.rstrip('_')}_functional"):
        packet = getattr(getattr(torch.ops, namespace), form, None)
        for overload in packet.overloads() if packet is not None else ():
            found = getattr(packet, overload)
            if not found._schema.is_mutable and _arguments(found) == arguments:
                return str(found)
    return operator


def _arguments(operator: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in operator._schema.arguments]


class ExportedForward(ReplacedForward):
    """Base class of the forwards of an exported plan. This one runs the module's own forward: it
    marks a plan that recomputes nothing."""

    def why_not_traced(self, title: str) -> str:
        return (
            f"{title} has an exported plan (to_torch_checkpoint), which would be traced as part of "
            "the model: exported.remove() or checkpoint_solver.remove(model) first, and export "
            "again afterwards"
        )

    def described(self) -> Any:
        """What was exported, as a JSON value: equal on ranks that run the same."""
        return None


class CheckpointedForward(ExportedForward):
    """Recomputes the module as a whole, except for the saved calls.

    saved: the calls that keep their results (None: none do).
    changed_buffers: names, relative to the module, of buffers that its forward pass changes, and
        whose values do not matter to its results.
    rewound: names, relative to the module, of parameters and buffers that the step changes, and
        whose values may matter. They are copied in each call.
    draws_elsewhere: whether it may draw from generators that are not torch's default ones.
    n_runs: how often the module has run outside of no_grad, recomputations included.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        saved: SavedCalls | None = None,
        changed_buffers: Sequence[str] = (),
        rewound: Sequence[str] = (),
        draws_elsewhere: bool = True,
    ) -> None:
        super().__init__(module)
        self.saved = saved
        self.draws_elsewhere = draws_elsewhere
        self.changed_buffers, self.rewound = changed_buffers, rewound
        self.n_runs = 0
        # as a partial: torch.compile accepts only plain functions and partials of them
        self._compiled_contexts: Any = (
            {} if saved is None else {"context_fn": functools.partial(_unchecked_contexts, saved)}
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own_forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler functionalises buffers itself
            return checkpoint(
                self.own_forward, *args, use_reentrant=False, **self._compiled_contexts, **kwargs
            )
        return checkpointed(self._run, args, kwargs, context_fn=self._contexts)

    def described(self) -> list[tuple[str, list[int]]]:
        """The calls that keep their results, by operator."""
        saved = self.saved.saved if self.saved else {}
        return [(operator, sorted(calls)) for operator, calls in sorted(saved.items())]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.n_runs += 1
        return self.own_forward(*args, **kwargs)

    def _contexts(self) -> tuple[Any, Any]:
        nothing = contextlib.nullcontext()
        forward, recomputation = self.saved.contexts() if self.saved else (nothing, nothing)
        again = AsInForward(
            recomputation,
            self._model,
            self.changed_buffers,
            rewound=self.rewound,
            forward=forward,
            draws_elsewhere=self.draws_elsewhere,
        )
        return again.in_forward, again


def checkpointed(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], **options: Any
) -> Any:
    """`torch.utils.checkpoint.checkpoint` with all tensors of the call as arguments."""
    call = Call.of(args, kwargs)
    run = functools.partial(_run_with, function, call.rest, call.spec)
    return checkpoint(run, *call.tensors, use_reentrant=False, **options)


def checkpointed_as_whole(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a forward of the module, and keep nothing for backward but its arguments and copies of
    the buffers. If it has changed parameters, a backward pass raises RuntimeError."""
    nothing = contextlib.nullcontext()
    changed: list[str] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if changed:
            raise RuntimeError(
                f"forward changes the parameter {changed[0]!r}, so it cannot be recomputed for a "
                "gradient, and none was expected in this epoch (StochasticWeightAveraging updates "
                "batch norm); make what forward changes a buffer"
            )
        before = {name: (each, each._version) for name, each in module.named_parameters()}
        output = forward(*args, **kwargs)
        changed.extend(n for n, (each, version) in before.items() if each._version != version)
        return output

    def contexts() -> tuple[Any, Any]:
        buffers = [name for name, _ in module.named_buffers()]
        again = AsInForward(nothing, module, (), rewound=buffers)
        return again.in_forward, again

    return checkpointed(run, args, kwargs, context_fn=contexts)


def _run_with(function: Callable[..., Any], rest: list[Any], spec: Any, *tensors: Any) -> Any:
    args, kwargs = Call(list(tensors), rest, spec).arguments(tensors)
    return function(*args, **kwargs)


def names_inside(names: Iterable[str], path: str) -> tuple[str, ...]:
    """The tensor names that are inside of the module at this path, relative to it."""
    prefix = f"{path}." if path else ""
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def remove_torch_checkpoint(model: nn.Module) -> nn.Module:
    """Undo `to_torch_checkpoint`, also on a copy of the model. Returns the same module."""
    for module in _modules_with_export(model):
        restore_forward(module)
    return model


def exports_in(model: nn.Module) -> list[tuple[str, Any]]:
    """The path of each module whose forward was replaced by an export, with what it runs."""
    found = []
    for path, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, ExportedForward):
            found.append((path, forward.described()))
    return found


def has_checkpoints(model: nn.Module) -> bool:
    """Whether a plan was exported to the model."""
    return any(True for _ in _modules_with_export(model))


def _modules_with_export(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if isinstance(m.__dict__.get("forward"), ExportedForward))
