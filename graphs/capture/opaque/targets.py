"""The targets of an opaque part's nodes in a planned step: they run the module itself."""

from __future__ import annotations

import dataclasses
import logging
import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphs.capture.opaque.forms import Form, OpaqueCall
from graphs.capture.opaque.island import Saved, with_strides
from graphs.capture.opaque.nodes import BACKWARD, FORWARD, StandIn
from graphs.costs import ObservedRun
from graphs.model_calls import nested, storage_key

logger = logging.getLogger(__name__)

_WARNED_MODULES: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules for which a warning was given that they save more bytes than planned."""


@dataclass(frozen=True, eq=False)
class OpaqueForward:
    """The target of a forward node: (tensors) -> [*outputs, *new buffers, saved]."""

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
        """Run the call; returns its results, and the states of the generators before it."""
        state = self.call.random.states()
        return self(tensors), state

    def run_again(self, state: Any, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Recompute the call with the generator states of the first run.

        The generators have their present states afterwards.
        """
        with self.call.random.states_restored():
            self.call.random.set_states(state)
            return self(tensors)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Run the call.

        Raises RuntimeError if its outputs have other shapes than planned, or if it draws random
        numbers although none were planned. Warns once if it saves more bytes than planned.
        """
        known = {storage_key(t) for t in tensors}

        def as_planned(spec: nested.Spec, outs: list[torch.Tensor]) -> list[torch.Tensor]:
            forms = [(tuple(t.shape), t.dtype) for t in outs]
            call = self.call
            if spec != call.spec or forms != [(f.shape, f.dtype) for f in call.outs]:
                raise RuntimeError(
                    f"{call.path!r}, which is planned as one piece, returns "
                    f"{', '.join(str(Form.of(t)) for t in outs)} in this step, but "
                    f"{', '.join(map(str, call.outs))} was planned: what it returns depends on "
                    "values. Plan by submodules (checkpoint_solver.fallback.plan_chain)"
                )
            return [
                with_strides(t.clone() if storage_key(t) in known else t, form.strides)
                for t, form in zip(outs, self.call.outs, strict=True)
            ]

        before = None if self.call.draws else self.call.random.torch_states()
        result = self.call.island.forward(tensors, as_planned)
        if before is not None and not all(
            map(torch.equal, before, self.call.random.torch_states())
        ):
            raise RuntimeError(
                f"{self.call.path!r}, which is planned as one piece, draws random numbers from "
                "torch in this step and drew none when it was planned, so later branches on random "
                "numbers may differ. Draw equally many in each step, or plan by submodules "
                "(checkpoint_solver.fallback.plan_chain)"
            )
        saved_bytes, module = result.packed_bytes - self.call.outside_bytes, self.call.island.module
        if saved_bytes > self.call.saved_bytes and module not in _WARNED_MODULES:
            _WARNED_MODULES.add(module)
            logger.warning(
                "%r, which is planned as one piece, saves %d bytes for backward in this step, "
                "planned: %d. What it saves depends on values, and the step may take more than "
                "its budget: plan with a batch for which it saves the most",
                self.call.path,
                saved_bytes,
                self.call.saved_bytes,
            )
        return [*result.outs, *result.buffers, result.saved]

    def __str__(self) -> str:
        return f"opaque_forward({type(self.call.island.module).__name__})"

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class OpaqueBackward:
    """The target of a backward node: (saved, known tensors, gradients, starts) -> gradients.

    The arguments are those of `Island.backward`.

    must_be_tensor: for each gradient, whether a reader of it does not accept None, so that a
        gradient that the call does not have must be zeros.
    """

    call: OpaqueCall
    must_be_tensor: tuple[bool, ...]

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
        results: list[torch.Tensor | None] = []
        for gradient, form, must_be_tensor in zip(
            found, self.call.gradients, self.must_be_tensor, strict=True
        ):
            if gradient is not None:
                results.append(with_strides(gradient, form.strides))
            else:
                results.append(form.empty(device).zero_() if must_be_tensor else None)
        return results

    def __str__(self) -> str:
        return f"opaque_backward({type(self.call.island.module).__name__})"

    __repr__ = __str__


def bind(graph: fx.Graph, stand_ins: Sequence[StandIn]) -> None:
    """Replace the operators of stand-ins in a traced graph by the targets that run the modules.

    If a gradient of a call is added to a sum, the call takes over the addition (`_take_over_sum`).
    """
    calls = {n: c for each in stand_ins for n, c in zip(each.numbers, each.calls, strict=True)}
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is FORWARD:
            tensors, number, _ = node.args
            node.target, node.args = OpaqueForward(calls[number]), (tensors,)
        elif node.target is BACKWARD:
            saved, known, gradients, number = node.args
            call = calls[number]
            gradient_at = {n.args[1]: n for n in node.users if n.target is operator.getitem}
            starts: list[fx.Node | None] = [None] * len(call.gradients)
            for index, gradient in gradient_at.items():
                starts[index] = _take_over_sum(gradient, position, before=position[node])
            node.meta["val"] = [  # some gradients are sums now, which are other tensors
                gradient_at[i].meta["val"] if i in gradient_at else v
                for i, v in enumerate(node.meta["val"])
            ]
            forms = {
                i: Form.of(n.meta["val"]) for i, n in gradient_at.items() if starts[i] is not None
            }
            call = dataclasses.replace(
                call, gradients=tuple(forms.get(i, f) for i, f in enumerate(call.gradients))
            )
            node.target = OpaqueBackward(call, must_be_tensor=(True,) * len(call.gradients))
            node.args = (saved, known, gradients, starts)
    for node in graph.nodes:  # now that no more readers of gradients are removed
        if isinstance(node.target, OpaqueBackward):
            node.target = dataclasses.replace(
                node.target, must_be_tensor=_must_be_tensor_flags(node)
            )


def _take_over_sum(
    gradient: fx.Node, position: Mapping[fx.Node, int], *, before: int
) -> fx.Node | None:
    """The sum of gradients that this gradient is added to, or None; the addition is removed.

    The call itself adds its terms to that sum one by one, as autograd does without an island.

    before: position of the call's backward node, at which the sum must be known.
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
    gradient.meta["val"] = add.meta["val"]  # the sum has the layout that autograd gives it
    add.graph.erase_node(add)
    return others[0]


def _must_be_tensor_flags(backward: fx.Node) -> tuple[bool, ...]:
    """`OpaqueBackward.must_be_tensor`, for the gradients that this node makes."""
    n_gradients = len(backward.target.call.gradients)  # type: ignore[union-attr]
    must_be_tensor = [False] * n_gradients
    for gradient in backward.users:
        if gradient.target is not operator.getitem:
            continue
        user, *others = gradient.users or [None]
        may_be_none = False
        if user is not None and not others and isinstance(user.target, OpaqueBackward):
            # The only reader is another call's backward node, which may take it as a start.
            *read, _starts = user.args
            may_be_none = all(item is not gradient for item in pytree.tree_leaves(read))
        elif user is not None and not others and user.op == "output":
            # The only reader is the output, once, and the gradient has a storage of its own size.
            value = gradient.meta["val"]
            is_whole = value.untyped_storage().nbytes() == value.nbytes
            n_times = sum(item is gradient for item in pytree.tree_leaves(user.args))
            may_be_none = is_whole and n_times == 1
        must_be_tensor[gradient.args[1]] = not may_be_none  # type: ignore[index]
    return tuple(must_be_tensor)
