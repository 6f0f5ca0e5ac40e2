"""Traces the call of an opaque part as one forward and one backward node.

While tracing, a stand-in is called instead of the module. It calls an operator whose fake results
have the forms that were observed when the module ran, with one more result that stands for all
saved tensors and has their bytes. After tracing, these nodes get the targets that run the module
(`graphs.capture.opaque.targets`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import annotate

from graphs.capture.opaque.forms import Form, OpaqueCall
from graphs.capture.opaque.functions import CalledFunction, is_function, piece_at
from graphs.capture.opaque.island import GradientRequest, state_of
from graphs.capture.opaque.methods import CalledMethod, attribute_set, is_method
from graphs.capture.own_operators import define
from graphs.capture.traced_calls import is_backward
from graphs.model_calls import Call, TraceError, storage_key

_TANGENT_STRIDES: dict[int, dict[int, tuple[int, ...]]] = {}
"""Number of a call whose backward pass has been traced -> `GradientRequest.tangent_strides`."""

_CALLS: dict[int, OpaqueCall] = {}
"""The calls that are being traced, by the number that their operators get as an argument."""
_numbers = itertools.count()


def _fake_forward(tensors: Sequence[torch.Tensor], number: int, _draws: bool) -> list[torch.Tensor]:
    call = _CALLS[number]
    device = tensors[0].device
    buffers = [torch.empty_like(tensors[i]) for i in call.island.changed_buffers]
    saved = torch.empty(call.saved_bytes, dtype=torch.uint8, device=device)
    return [*(form.empty(device) for form in call.outs), *buffers, saved]


def _fake_backward(saved: torch.Tensor, _known: Any, _gradients: Any, number: int) -> Any:
    return [form.empty(saved.device) for form in _CALLS[number].gradients]


FORWARD = define(
    "opaque_forward(Tensor[] tensors, int call, bool draws) -> Tensor[]",
    is_random=True,
    Meta=_fake_forward,
)
BACKWARD = define(
    "opaque_backward(Tensor saved, Tensor?[] known, Tensor?[] gradients, int call) -> Tensor[]",
    Meta=_fake_backward,
)


class _OpaqueCallFunction(torch.autograd.Function):
    """Tells autograd that `opaque_backward` computes the gradients of `opaque_forward`."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        call = _CALLS[number]
        island, n_outs = call.island, len(call.outs)
        # Copies of what the call overwrites: a recomputation needs the old values.
        read = [t.clone() if i in island.overwritten else t for i, t in enumerate(tensors)]
        *results, saved = FORWARD(read, number, call.draws)
        for i, index in island.overwritten.items():
            results[index] = tensors[i].copy_(results[index])
        ctx.number = number
        ctx.mark_dirty(*(tensors[i] for i in island.overwritten))
        known = enumerate([*read, *results[:n_outs]])
        reads = island.reads
        ctx.save_for_backward(
            *(t if reads is None or i in reads else None for i, t in known), saved
        )
        ctx.mark_non_differentiable(
            *(t for t, yes in zip(results, call.differentiable, strict=False) if not yes),
            *results[n_outs:],
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call = _CALLS[ctx.number]
        gradients = gradients[: len(call.outs)]
        _TANGENT_STRIDES[ctx.number] = {
            i: tuple(g.stride())
            for i, g in enumerate(gradients)
            if g is not None and not g.is_contiguous()
        }
        *known, saved = ctx.saved_tensors
        made_gradients = iter(BACKWARD(saved, known, list(gradients), ctx.number))
        return None, *(next(made_gradients) if needs else None for needs in call.island.needs)


@dataclass
class StandIn:
    """Called instead of a module while a step is traced.

    calls: the module's calls as they were observed, in order.
    numbers: the numbers of these calls in the trace.
    requests: for each call traced so far, which gradients it is asked for.
    """

    path: str
    module: nn.Module
    calls: Sequence[OpaqueCall]
    numbers: list[int] = field(default_factory=list)
    requests: list[GradientRequest] = field(default_factory=list)

    def requests_with_strides(self) -> tuple[GradientRequest, ...]:
        """What each traced call was asked for, with the tangents of the backward pass."""
        pairs = zip(self.numbers, self.requests, strict=False)
        return tuple(
            dataclasses.replace(a, tangent_strides=_TANGENT_STRIDES.get(n, {})) for n, a in pairs
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index = len(self.requests)
        if index == len(self.calls):
            raise TraceError(f"{self.path!r} is called more often than when the model ran")
        call, given = self.calls[index], Call.of(args, kwargs)
        forms = tuple(map(Form.of, given.tensors))
        is_same = given.spec == call.island.call.spec and given.rest == call.island.call.rest
        if not is_same or [f.shape for f in forms] != [f.shape for f in call.inputs]:
            raise TraceError(f"{self.path!r} is called with arguments other than those it ran with")
        state, _ = state_of(self.module)
        tensors = [*given.tensors, *state]
        self.requests.append(GradientRequest.current(tensors, first=call.island.first))
        is_module = not is_function(self.path) and not is_method(self.path)
        with annotate({"module_path": self.path}) if is_module else contextlib.nullcontext():
            for i in call.island.changed_buffers:
                tensors[i] = tensors[i].clone()  # a recomputation of the call needs the old values
            results = _OpaqueCallFunction.apply(self.numbers[index], *tensors)  # type: ignore[no-untyped-call]
            n_outs = len(call.outs)
            with torch.no_grad():
                for i, new in zip(call.island.changed_buffers, results[n_outs:], strict=True):
                    state[i - call.island.n_inputs].copy_(new)
        return call.output(results[:n_outs])


@contextlib.contextmanager
def replaced_by_stand_ins(
    model: nn.Module, observed: Mapping[str, Sequence[OpaqueCall]]
) -> Iterator[list[StandIn]]:
    """While inside, stand-ins are called instead of these modules; yields the stand-ins.

    observed: path of an opaque part -> its calls.
    """
    found = []
    with contextlib.ExitStack() as stack:
        for path, calls in observed.items():
            module = piece_at(model, path)
            numbers = [next(_numbers) for _ in calls]
            found.append(StandIn(path, module, calls, numbers))
            for number, call in zip(numbers, calls, strict=True):
                _CALLS[number] = call
                stack.callback(_CALLS.pop, number)
                stack.callback(_TANGENT_STRIDES.pop, number, None)
            stack.enter_context(called_instead(module, found[-1]))
        yield found


@contextlib.contextmanager
def called_instead(module: nn.Module, function: Any) -> Iterator[None]:
    """While inside, calls of the module call the function instead, and not the module's hooks."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute_set(module, "_compiled_call_impl", function))
        if isinstance(module, CalledFunction | CalledMethod):
            stack.enter_context(module.called_instead())
        yield


def saved_bytes(graph: fx.Graph) -> int:
    """Bytes that forward nodes allocate and backward nodes read: each storage once, no inputs."""
    storages: dict[int, int] = {}
    inputs = {_storage(node.meta.get("val")) for node in graph.find_nodes(op="placeholder")}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or is_backward(node):
            continue
        if any(map(is_backward, node.users)):
            storages[_storage(value)] = value.untyped_storage().nbytes()
    return sum(n_bytes for storage, n_bytes in storages.items() if storage not in inputs)


def _storage(value: object) -> int:
    return storage_key(value) if isinstance(value, torch.Tensor) else 0
