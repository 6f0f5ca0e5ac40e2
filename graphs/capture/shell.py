"""Calls a module with fake tensors in place of its parameters, buffers and batch.

The module is unchanged afterwards: `torch.func.functional_call` swaps the tensors for the duration
of a call.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import annotate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphs.capture.as_eager import (
    KnowingMode,
    Leaf,
    Recipe,
    casts_once,
    generator_states,
    record_checks,
)
from graphs.capture.called_losses import annotate_loss_calls
from graphs.capture.differentiated import recording_differentiated
from graphs.capture.left_behind import LeftBehind
from graphs.capture.opaque import StandIn
from graphs.capture.refuse import (
    SideEffectError,
    attributes_unchanged,
    buffers_of,
    no_unseen_changes,
    no_untraced_calls,
    random_states_untouched,
    refuse_own_generator,
    refuse_replaced_buffers,
)
from graphs.capture.shared_outputs import with_markers
from graphs.capture.tensor_parallel import (
    refuse_distributed,
    report_gradient_placement,
    with_local_part,
)
from graphs.capture.traced_calls import VIEW_OF_SCATTER
from graphs.model_calls import (
    HOLE,
    Call,
    LayoutForShapes,
    TraceError,
    device_of,
    is_distributed,
    local_part,
    named_state,
    nested,
    strided_like,
)


class _WithoutHooks(nn.Module):
    """A module of ours, not of the user's model: global module hooks do not run for it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class _Forward(_WithoutHooks):
    """Calls `model.forward`, not the model: the model's own hooks run around the planned step.

    Raises SideEffectError for what a planned step would not do.
    """

    def __init__(self, inner: nn.Module, left: LeftBehind | None) -> None:
        super().__init__()
        self.inner, self._left = inner, left

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = buffers_of(self.inner)
        inner = self.inner
        with (
            random_states_untouched(inner),
            no_unseen_changes(inner),
            no_untraced_calls(inner),
            _OperatorChecks(),
            annotate_loss_calls(),
        ):
            if self._left is None:
                output = inner.forward(*args, **kwargs)
            else:
                self._left.begin()
                output = inner.forward(*args, **kwargs)
                self._left.take()
        refuse_replaced_buffers(before, inner)
        return output


class Shell(_WithoutHooks):
    """Owns fake copies of a module's tensors and calls the module with them.

    batch, real_batch: the fake and the real tensors of the batch.
    stand_ins: called instead of the opaque parts.
    paths: the shell's name of a parameter or buffer -> the model's.
    mode: the fake tensor mode of the copies.
    spec: structure of the model's output in the last call.
    gradient_outputs: indices of the outputs that get a gradient in the last call.
    flat_outputs: the flat outputs of the last call, with HOLE in place of tensors.
    differentiable: indices of the outputs that require a gradient in the last call.
    checks: results of the checks of values (`record_checks`) in the last call; returned after the
        flat outputs.
    gradient_specs: parameter -> how DTensor places its gradient, once it has been computed.
    left: takes what forward leaves in attributes, as further outputs (None: this is refused).
    as_read: as in `KnowingMode`.
    differentiated: as in `Capture`, in the last call.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        *,
        choose: Callable[[Any], tuple[int, ...]],
        device: torch.device | None,
        stand_ins: Sequence[StandIn] = (),
        gradient_layouts: Mapping[int, LayoutForShapes] | None = None,
        left: LeftBehind | None = None,
        as_read: Sequence[Recipe] = (),
    ) -> None:
        super().__init__()
        self._gradient_layouts = {} if gradient_layouts is None else gradient_layouts
        self.left = left
        self.differentiated: tuple[str, ...] = ()
        refuse_distributed(model, call.tensors)
        self.stand_ins = tuple(stand_ins)
        self._unregistered = (model, call, choose)  # in a tuple: not registered as a submodule
        self.real_batch = call.tensors
        self.paths: dict[str, str] = {}
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self.spec: nested.Spec | None = None
        self.gradient_outputs: tuple[int, ...] = ()
        self.flat_outputs: list[Any] = []
        self.checks: list[torch.Tensor] = []
        self.differentiable: tuple[int, ...] = ()
        self.gradient_specs: dict[str, Any] = {}
        real_leaves = {
            leaf: tensor
            for leaf, tensor in leaves_of(model, call).items()
            if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
        }
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.mode = KnowingMode(real_leaves, names, as_read=as_read)
        with self.mode:
            for i, (name, parameter) in enumerate(model.named_parameters()):
                fake = nn.Parameter(_fake(parameter, device), requires_grad=parameter.requires_grad)
                self.register_parameter(f"p{i}", fake)
                self.paths[f"p{i}"] = name
            for i, (name, buffer) in enumerate(model.named_buffers()):
                fake_buffer = self.mode.set_leaf(_fake(buffer, device), Leaf("buffer", name))
                self.register_buffer(f"b{i}", fake_buffer)
                self.paths[f"b{i}"] = name
            self.batch = [
                self.mode.set_leaf(_fake(tensor, device), Leaf("input", index)).requires_grad_(
                    tensor.requires_grad
                )
                for index, tensor in enumerate(call.tensors)
            ]

    @property
    def model(self) -> nn.Module:
        return self._unregistered[0]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The model's own parameters and buffers by their names."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def call(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The model's output for the shell's parameters and buffers and these batch tensors."""
        return self._call(tensors, self._fake_state())

    def _fake_state(self) -> dict[torch.Tensor, torch.Tensor]:
        """The model's parameters and buffers -> the fake tensors that stand for them."""
        found: dict[torch.Tensor, torch.Tensor]
        found = {p: getattr(self, f"p{i}") for i, p in enumerate(self.model.parameters())}
        found |= {b: getattr(self, f"b{i}") for i, b in enumerate(self.model.buffers())}
        if not any(map(is_distributed, found)):
            return found
        names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        note = self.gradient_specs.__setitem__
        return {
            tensor: report_gradient_placement(fake, functools.partial(note, names[tensor]))
            if is_distributed(tensor) and tensor in names
            else fake
            for tensor, fake in found.items()
        }

    def _call(
        self, tensors: Sequence[torch.Tensor], fakes: Mapping[torch.Tensor, torch.Tensor]
    ) -> Any:
        model, call, _ = self._unregistered
        self.mode.begin_call()
        self.checks.clear()
        for each in self.stand_ins:
            each.requests.clear()
        # Each attribute of each module once. With `tie_weights=True`, PyTorch would list an
        # attribute once for each name of its module (a shared module has several), and at the end
        # restore a fake tensor there.
        state = {f"inner.{name}": fakes[tensor] for name, tensor in named_state(model)}
        args, kwargs = call.arguments(tensors)
        forward = _Forward(model, self.left)
        with record_checks(self.checks), recording_differentiated(model) as found:
            output = torch.func.functional_call(forward, state, args, kwargs, tie_weights=False)
        self.differentiated = tuple(found)
        return output

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        """Call the module and return what is traced: the output's tensors, then the checks.

        Outputs that get no gradient are detached. Raises TraceError for outputs that cannot be
        planned.
        """
        fakes = self._fake_state()
        leaves = [*fakes.values(), *tensors]
        # A trace calls forward more than once, so each call must restore the attributes it changes.
        with (
            casts_once(leaves, cache_enabled=self._cache_enabled),
            attributes_unchanged(self.model),
        ):
            output = self._call(tensors, fakes)
        # `choose` numbers the outputs of the model, which come first.
        everything = output if self.left is None else (output, self.left.values)
        flat, self.spec = nested.flatten(everything)
        flat = nested.with_repeats_marked(flat)
        for index, item in enumerate(flat):
            if is_distributed(item):
                raise TraceError(
                    "the model returns a DTensor; return this rank's part (use_local_output=True "
                    "in the parallel style of its last submodule) or all of it (full_tensor())"
                )
            if isinstance(item, torch.Tensor | nested.Repeated | int | float | bool | str | None):
                continue
            name = type(item).__name__
            library: Any = sys.modules.get("transformers.cache_utils")
            if library is not None and isinstance(item, library.Cache):
                raise TraceError(
                    "the model returns the cache that transformers fills for generation "
                    f"({name}); pass use_cache=False"
                )
            where = pytree.keystr(nested.paths(self.spec)[index])
            title = f"{name} (output{where})" if where else name
            raise TraceError(
                f"the model returns an object of type {title}, which hides its tensors; return "
                "tensors, tuples, lists, dicts, dataclasses or distributions of torch"
            )
        gradient_outputs = self._unregistered[2](output)
        if missing := [index for index in gradient_outputs if not 0 <= index < len(flat)]:
            raise TraceError(
                f"output {missing[0]} is to get a gradient, but the model returns {len(flat)} "
                f"output{'s' if len(flat) != 1 else ''} (numbered from 0): the plan was made for "
                "another model, or was edited"
            )
        repeated = {
            i: item.index for i, item in enumerate(flat) if isinstance(item, nested.Repeated)
        }
        self.gradient_outputs = tuple(
            sorted({repeated.get(index, index) for index in gradient_outputs})
        )
        self.flat_outputs = [HOLE if isinstance(item, torch.Tensor) else item for item in flat]
        self.differentiable = tuple(
            index
            for index, item in enumerate(flat)
            if isinstance(item, torch.Tensor) and item.requires_grad
        )
        traced_outputs = [
            item if i in self.gradient_outputs else item.detach()
            for i, item in enumerate(
                with_markers(flat, self.gradient_outputs, self._gradient_layouts)
            )
            if isinstance(item, torch.Tensor)
        ]
        return [*traced_outputs, *self.checks]


def leaves_of(model: nn.Module, call: Call) -> dict[Leaf, torch.Tensor]:
    """The real tensors whose values a module may read in a call.

    These are its buffers, the batch, and the states of the default generators.
    """
    with _disable_current_modes():
        states = generator_states(device_of(model))
    leaves = {Leaf("random", device): state for device, state in states.items()}
    leaves |= {Leaf("buffer", name): buffer for name, buffer in model.named_buffers()}
    return leaves | {Leaf("input", i): tensor for i, tensor in enumerate(call.tensors)}


def _fake(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """A fake tensor of the same size, strides and dtype; to be called under a fake mode.

    Raises TraceError for tensor subclasses and for layouts other than strided.
    """
    if is_distributed(tensor):
        return with_local_part(tensor, _fake(local_part(tensor), device))
    if type(tensor) is not torch.Tensor and not isinstance(tensor, nn.Parameter | FakeTensor):
        raise TraceError(
            f"tensors of type {type(tensor).__name__} are not supported: pass a plain tensor "
            "(tensor.as_subclass(torch.Tensor), or .dequantize() and the like)"
        )
    if tensor.layout != torch.strided:
        raise TraceError(f"a tensor of layout {tensor.layout} is not supported; use strided")
    return strided_like(tensor, device)


_CHECKS_RESULT = (
    "forward calls a function of torch.linalg that reads its result, to raise an error where the "
    "matrix is singular (cholesky, inv, solve, lu_factor), so that steps could differ. Use the "
    "variant that does not check: cholesky_ex(a).L, inv_ex(a).inverse, solve_ex(a, b).result, "
    "lu_factor_ex(a)[:2]"
)
_CHECKS_IN_BACKWARD = (
    "the gradient of torch.linalg.eig and eigvals is computed by a function that reads its result, "
    "to raise an error where the eigenvectors are dependent. Put the call into a submodule of its "
    "own, which is planned as one piece; use eigh for a symmetric matrix; or detach the matrix"
)
_OBSERVES_FIRST = (
    "an observer of torch.ao.quantization has not seen a tensor yet: its first call gives its "
    "buffers one element for each channel. Call the model once before it is planned"
)


class _OperatorChecks(TorchDispatchMode):
    """Annotates in-place operators, and refuses some operators.

    An fx node is annotated with "in_place" if its operator overwrites its first argument in eager
    mode, which the functional graph no longer shows. Operators are refused if they read values that
    the step computes, or draw from a generator of their own.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse_own_generator(func, args, kwargs or {})
        if func is torch.ops.aten._linalg_check_errors.default:
            raise TraceError(_CHECKS_RESULT)
        is_eig = func is torch.ops.aten.linalg_eig.default
        if is_eig and torch.is_grad_enabled() and args[0].requires_grad:
            raise SideEffectError(_CHECKS_IN_BACKWARD)
        if func is torch.ops.aten._fused_moving_avg_obs_fq_helper.default:
            x, running_min, axis, *by_channel = args[0], args[3], *args[10:12]
            if any(by_channel) and running_min.numel() != x.shape[axis]:
                raise SideEffectError(_OBSERVES_FIRST)
        first = next(iter(func._schema.arguments), None)
        is_in_place = (
            first is not None and first.alias_info is not None and first.alias_info.is_write
        )
        # A trace has scatters for writes into views, too: those that `forward` calls are marked.
        is_marked = is_in_place or func in VIEW_OF_SCATTER
        with annotate({"in_place": is_in_place}) if is_marked else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))
