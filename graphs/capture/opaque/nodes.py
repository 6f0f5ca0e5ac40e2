"""A module's call as one forward and one backward node of the traced graph.

While tracing, a stand-in is called instead of the module: an operator whose fake results have the
observed forms, and whose result "saved" has the observed bytes. Afterwards the operators' calls get
the targets that run the module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import annotate

from graphs.capture.opaque.forms import Form, OpaqueCall
from graphs.capture.opaque.functions import CalledFunction, is_function, piece_at
from graphs.capture.opaque.island import Asked, Saved, laid_out, state_of
from graphs.capture.traced_calls import is_backward
from graphs.costs import ObservedRun
from graphs.model_calls import Call, TraceError, nested

logger = logging.getLogger(__name__)

_library: Any = torch.library.Library("checkpoint_solver", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "opaque_forward(Tensor[] tensors, int call) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define(
    "opaque_backward(Tensor saved, Tensor?[] known, Tensor?[] gradients, int call) -> Tensor[]"
)

_TANGENTS: dict[int, dict[int, tuple[int, ...]]] = {}
"""Of those whose backward pass has been traced: `Asked.tangents`."""

_CALLS: dict[int, OpaqueCall] = {}
"""Those that are being traced, by the number that their operators are given."""
_numbers = itertools.count()


def _fake_forward(tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    call = _CALLS[number]
    device = tensors[0].device
    buffers = [torch.empty_like(tensors[i]) for i in call.island.changed]
    saved = torch.empty(call.saved_bytes, dtype=torch.uint8, device=device)
    return [*(form.empty(device) for form in call.outs), *buffers, saved]


def _fake_backward(saved: torch.Tensor, _known: Any, _gradients: Any, number: int) -> Any:
    return [form.empty(saved.device) for form in _CALLS[number].gradients]


_library.impl("opaque_forward", _fake_forward, "Meta")
_library.impl("opaque_backward", _fake_backward, "Meta")
_FORWARD = torch.ops.checkpoint_solver.opaque_forward.default
_BACKWARD = torch.ops.checkpoint_solver.opaque_backward.default


class _Traced(torch.autograd.Function):
    """The two operators, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        call = _CALLS[number]
        *made, saved = _FORWARD(list(tensors), number)
        n_outs = len(call.outs)
        ctx.number = number
        ctx.save_for_backward(*tensors, *made[:n_outs], saved)
        ctx.mark_non_differentiable(
            *(t for t, yes in zip(made, call.differentiable, strict=False) if not yes),
            *made[n_outs:],
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call = _CALLS[ctx.number]
        gradients = gradients[: len(call.outs)]
        _TANGENTS[ctx.number] = {
            i: tuple(g.stride())
            for i, g in enumerate(gradients)
            if g is not None and not g.is_contiguous()
        }
        *tensors, saved = ctx.saved_tensors
        given = call.island.given
        known = [t if given is None or i in given else None for i, t in enumerate(tensors)]
        made = iter(_BACKWARD(saved, known, list(gradients), ctx.number))
        return None, *(next(made) if needs else None for needs in call.island.needs)


_traced: Callable[..., Any] = _Traced.apply


@dataclass
class StandIn:
    """What is called instead of a module while a step is traced.

    calls: those that were observed, in order.
    asked: of each call that was traced, which gradients it was asked for there.
    """

    path: str
    module: nn.Module
    calls: Sequence[OpaqueCall]
    numbers: list[int] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def begin(self) -> None:
        """The model is called from the start."""
        self.asked.clear()

    def found(self) -> tuple[Asked, ...]:
        """Of each call, with the tangents of the backward pass."""
        pairs = zip(self.numbers, self.asked, strict=False)
        return tuple(dataclasses.replace(a, tangents=_TANGENTS.get(n, {})) for n, a in pairs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index = len(self.asked)
        if index == len(self.calls):
            raise TraceError(f"{self.path!r} is called more often than when the model ran")
        call, given = self.calls[index], Call.of(args, kwargs)
        forms = tuple(map(Form.of, given.tensors))
        same = given.spec == call.island.call.spec and given.rest == call.island.call.rest
        if not same or [f.shape for f in forms] != [f.shape for f in call.inputs]:
            raise TraceError(f"{self.path!r} is called with arguments other than those it ran with")
        state, _ = state_of(self.module)
        tensors = [*given.tensors, *state]
        self.asked.append(Asked.now(tensors, first=call.island.first))
        with (
            contextlib.nullcontext()
            if is_function(self.path)
            else annotate({"module_path": self.path})
        ):
            for i in call.island.changed:  # its old value, which the call may be run with again
                tensors[i] = tensors[i].clone()
            made = _traced(self.numbers[index], *tensors)
            n_outs = len(call.outs)
            with torch.no_grad():
                for i, new in zip(call.island.changed, made[n_outs:], strict=True):
                    state[i - call.island.n_inputs].copy_(new)
        return call.output(made[:n_outs])


@contextlib.contextmanager
def stand_ins(
    model: nn.Module, observed: Mapping[str, Sequence[OpaqueCall]]
) -> Iterator[list[StandIn]]:
    """The stand-ins of these modules, called instead of them while inside."""
    found = []
    with contextlib.ExitStack() as stack:
        for path, calls in observed.items():
            module = piece_at(model, path)
            numbers = [next(_numbers) for _ in calls]
            found.append(StandIn(path, module, calls, numbers))
            for number, call in zip(numbers, calls, strict=True):
                _CALLS[number] = call
                stack.callback(_CALLS.pop, number)
                stack.callback(_TANGENTS.pop, number, None)
            stack.enter_context(called_instead(module, found[-1]))
        yield found


@contextlib.contextmanager
def called_instead(module: nn.Module, function: Any) -> Iterator[None]:
    """A call of the module, its hooks included, calls the function while inside."""
    vars(module)["_compiled_call_impl"] = function
    try:
        if isinstance(module, CalledFunction):
            with module.called_instead():
                yield
        else:
            yield
    finally:
        vars(module).pop("_compiled_call_impl", None)


_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that have kept more than planned."""

# ---- after tracing -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OpaqueForward:
    """The target of a forward node: (tensors) -> outputs, new buffers, what is saved."""

    call: OpaqueCall
    tags = (torch.Tag.nondeterministic_seeded,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", "opaque_forward")  # for fx's generated code

    @property
    def observed(self) -> ObservedRun:
        return self.call.forward

    @property
    def recomputable(self) -> bool:
        return self.call.recomputable

    def keep_state(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Any]:
        """The results, and the state of the generators before."""
        state = self.call.random.states()
        return self(tensors), state

    def run_again(self, state: Any, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """With the state of the first run; the generators go on as if nothing had happened."""
        with self.call.random.as_before():
            self.call.random.put(state)
            return self(tensors)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        known = {t.untyped_storage()._cdata for t in tensors}

        def as_planned(spec: nested.Spec, outs: list[torch.Tensor]) -> list[torch.Tensor]:
            self._check(spec, outs)
            return [
                laid_out(t.clone() if t.untyped_storage()._cdata in known else t, form.strides)
                for t, form in zip(outs, self.call.outs, strict=True)
            ]

        ran = self.call.island.forward(tensors, as_planned)
        self._warn_of_more(ran.packed_bytes - self.call.outside_bytes)
        return [*ran.outs, *ran.buffers, ran.saved]

    def _check(self, spec: nested.Spec, outs: Sequence[torch.Tensor]) -> None:
        call = self.call
        here = [(tuple(t.shape), t.dtype) for t in outs]
        if spec != call.spec or here != [(f.shape, f.dtype) for f in call.outs]:
            raise RuntimeError(
                f"{call.path!r}, which is planned as one piece, returns "
                f"{', '.join(str(Form.of(t)) for t in outs)}, planned: "
                f"{', '.join(map(str, call.outs))}. Its results' sizes depend on values: plan by "
                "submodules (checkpoint_solver.fallback.plan_chain)"
            )

    def _warn_of_more(self, saved_bytes: int) -> None:
        """Than is planned; once for each module."""
        call, module = self.call, self.call.island.module
        if saved_bytes > call.saved_bytes and module not in _WARNED:
            _WARNED.add(module)
            logger.warning(
                "%r, which is planned as one piece, keeps %d bytes for backward in this step, "
                "planned: %d. What it keeps depends on values, and the step may take more than "
                "its budget: plan with a batch for which it keeps the most",
                call.path,
                saved_bytes,
                call.saved_bytes,
            )

    def __str__(self) -> str:
        return f"opaque_forward({type(self.call.island.module).__name__})"

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class OpaqueBackward:
    """The target of a backward node: (saved, known tensors, gradients, starts) -> gradients.

    always: for each gradient whether other operators read it, so that it is zeros where the call
        has none.
    """

    call: OpaqueCall
    always: tuple[bool, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", "opaque_backward")

    @property
    def observed(self) -> ObservedRun:
        return self.call.backward

    def __call__(
        self,
        saved: Saved,
        known: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        starts: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        found = self.call.island.backward(saved, known, gradients, starts)
        device = self.call.island.device
        made: list[torch.Tensor | None] = []
        for gradient, form, always in zip(found, self.call.gradients, self.always, strict=True):
            if gradient is not None:
                made.append(laid_out(gradient, form.strides))
            else:
                made.append(form.empty(device).zero_() if always else None)
        return made

    def __str__(self) -> str:
        return f"opaque_backward({type(self.call.island.module).__name__})"

    __repr__ = __str__


def bind(graph: fx.Graph, standing: Sequence[StandIn]) -> None:
    """Give the traced operators the targets that run the modules."""
    calls = {n: c for each in standing for n, c in zip(each.numbers, each.calls, strict=True)}
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is _FORWARD:
            tensors, number = node.args
            node.target, node.args = OpaqueForward(calls[number]), (tensors,)
        elif node.target is _BACKWARD:
            saved, known, gradients, number = node.args
            call = calls[number]
            made = {n.args[1]: n for n in node.users if n.target is operator.getitem}
            starts: list[fx.Node | None] = [None] * len(call.gradients)
            for index, gradient in made.items():
                starts[index] = _begun(gradient, position, before=position[node])
            forms = {i: Form.of(n.meta["val"]) for i, n in made.items() if starts[i] is not None}
            call = dataclasses.replace(
                call, gradients=tuple(forms.get(i, f) for i, f in enumerate(call.gradients))
            )
            always = tuple(
                i in made and not _only_returned(made[i]) for i in range(len(call.gradients))
            )
            node.target = OpaqueBackward(call, always)
            node.args = (saved, known, gradients, starts)


def saved_bytes(graph: fx.Graph) -> int:
    """What the forward nodes make and backward nodes read, but for inputs, each storage once."""
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
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else 0


def _begun(gradient: fx.Node, position: Mapping[fx.Node, int], *, before: int) -> fx.Node | None:
    """The sum of gradients that this one is added to; the addition is removed.

    The call adds its terms to it one by one, as autograd does where it is no island.
    """
    users = list(gradient.users)
    if len(users) != 1 or users[0].target is not torch.ops.aten.add.Tensor or users[0].kwargs:
        return None
    add = users[0]
    others = [argument for argument in add.args if argument is not gradient]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or position[others[0]] >= before:
        return None
    one, other = gradient.meta["val"], others[0].meta["val"]
    if not add.meta.get("is_gradient_acc") or one.shape != other.shape or one.dtype != other.dtype:
        return None
    add.replace_all_uses_with(gradient)
    gradient.meta["val"] = add.meta["val"]  # the sum lies in memory as autograd makes it
    add.graph.erase_node(add)
    return others[0]


def _only_returned(gradient: fx.Node) -> bool:
    """Whether nothing but the end of the step gets it, once, in the form that it has."""
    (output, *others) = gradient.users or [None]
    if output is None or others or output.op != "output":
        return False
    value = gradient.meta["val"]
    is_whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    n_times = sum(item is gradient for item in torch.utils._pytree.tree_leaves(output.args))
    return is_whole and n_times == 1
