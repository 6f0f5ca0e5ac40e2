"""Tensors that forward leaves in attributes: the state of a spiking neuron, attention maps.

A step may have such tensors as further outputs: each planned call sets the attributes to what it
has computed, attached to the graph of the step, as eager mode does. They are held until the next
call, as in eager mode. This needs that the step reads no tensor that an earlier call has left:

- an attribute that forward sets before it reads it is freed at the beginning of a step;
- an attribute that held no tensor when the step was traced (None, 0.0) has a guard. A program is
  found again once the training loop has reset it, which it has to do in eager mode too: see
  `graphs.capture.set_attributes`;
- the former value of a buffer is an input of the step, which may have no graph of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
from torch import fx, nn

from graphs.capture.eager_calls import operator_name
from graphs.capture.refuse import MODULE_ATTRIBUTES, is_bookkeeping
from graphs.model_calls import PLAIN_TYPES, TraceError, nested, title_of


@dataclass(frozen=True)
class LeftAttribute:
    """An attribute of a module in which forward leaves tensors.

    module: path of the module.
    attribute: name of the attribute.
    kind: whether forward sets the attribute, assigns a buffer, or changes the items of the dict
        that the attribute holds.
    is_unread: whether forward is known to set the attribute before it reads it.
    """

    module: str
    attribute: str
    kind: Literal["attribute", "buffer", "items"]
    is_unread: bool = False

    @property
    def place(self) -> tuple[str, str]:
        return self.module, self.attribute

    @property
    def path(self) -> str:
        return f"{self.module}.{self.attribute}".lstrip(".")

    def free_on(self, model: nn.Module) -> None:
        """Before a step: free what the last one has left, if the step does not read it."""
        if self.is_unread:
            vars(model.get_submodule(self.module))[self.attribute] = None

    def set_on(self, model: nn.Module, value: Any) -> None:
        """After a step: set the attribute to what the step has computed."""
        module = model.get_submodule(self.module)
        if self.kind == "buffer":
            module._buffers[self.attribute] = value
        elif self.kind == "attribute":
            vars(module)[self.attribute] = value
        else:
            items = vars(module)[self.attribute]
            items.clear()
            items.update(value)


class LeftBehind:
    """Takes what a call of forward leaves in attributes, and restores them.

    left: the attributes in which the last call has left tensors.
    values: what it has left in each of them: tensors and plain values, possibly nested.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.left: tuple[LeftAttribute, ...] = ()
        self.values: list[Any] = []
        self._modules: dict[str, nn.Module] = {}

    def begin(self) -> None:
        """Called before forward."""
        self._modules = dict(self._model.named_modules())
        self._before = {path: dict(vars(module)) for path, module in self._modules.items()}
        # not `module._buffers`, which is something else for a module of TorchScript
        self._buffers = {p: dict(vars(module)["_buffers"]) for p, module in self._modules.items()}
        self._items = {
            (path, name): dict(value)
            for path, attributes in self._before.items()
            for name, value in attributes.items()
            if type(value) is dict and name not in MODULE_ATTRIBUTES
        }

    def take(self) -> None:
        """Called after forward: take the tensors that it has left, and restore their attributes."""
        found: list[tuple[LeftAttribute, Any]] = []
        for path, module in self._modules.items():
            found += self._taken_attributes(path, module)
            before = self._buffers[path]
            buffers = vars(module)["_buffers"]
            for name, value in buffers.items():
                if name in before and value is not before[name] and _is_left(value):
                    found.append((LeftAttribute(path, name, "buffer"), value))
                    buffers[name] = before[name]
        self.left = tuple(left for left, _ in found)
        self.values = [value for _, value in found]

    def _taken_attributes(self, path: str, module: nn.Module) -> list[tuple[LeftAttribute, Any]]:
        """What one module is left with in plain attributes, which are restored."""
        found: list[tuple[LeftAttribute, Any]] = []
        attributes, before = vars(module), self._before[path]
        for name, value in list(attributes.items()):
            if name in MODULE_ATTRIBUTES or is_bookkeeping(module, name):
                continue
            if name not in before or value is not before[name]:
                if _is_left(value):
                    found.append((LeftAttribute(path, name, "attribute"), value))
                    if name in before:
                        attributes[name] = before[name]
                    else:
                        del attributes[name]
                continue
            old = self._items.get((path, name))
            if old is not None and _is_changed(old, value) and _is_left(value):
                found.append((LeftAttribute(path, name, "items"), dict(value)))
                value.clear()
                value.update(old)
        return found


def _is_changed(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    return [*old] != [*new] or any(new[key] is not old[key] for key in old)


def _is_left(value: object) -> bool:
    """Whether a value holds tensors that the call has computed, and else plain values only.

    They get no gradients, so that forward must not call `retain_grad()` on them.
    """
    leaves = nested.leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # in a trace, a tensor without a class of its own is a real one, which the call has not computed
    are_computed = all(type(t) not in (torch.Tensor, nn.Parameter) for t in tensors)
    are_computed = are_computed and not any(t.retains_grad for t in tensors)
    others = (leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))
    return bool(tensors) and are_computed and all(isinstance(o, PLAIN_TYPES) for o in others)


def with_is_unread(
    left: Collection[LeftAttribute], unread: Collection[tuple[str, str]]
) -> tuple[LeftAttribute, ...]:
    """The attributes with `is_unread` set. unread: as `SetBeforeRead.unread` returns them."""
    return tuple(
        replace(each, is_unread=each.kind == "attribute" and each.place in unread) for each in left
    )


@contextlib.contextmanager
def left_set(model: nn.Module, left: Collection[tuple[LeftAttribute, Any]]) -> Iterator[None]:
    """While inside, plain attributes hold what a call has left in them. left: pairs with values."""
    with contextlib.ExitStack() as stack:
        for each, value in left:
            attributes = vars(model.get_submodule(each.module))
            if each.kind == "attribute":
                stack.enter_context(mock.patch.dict(attributes, {each.attribute: value}))
            elif each.kind == "items":
                items = attributes[each.attribute]
                stack.enter_context(mock.patch.dict(items, value, clear=True))
        yield


def refuse_read_state(
    model: nn.Module,
    left: Collection[LeftAttribute],
    buffer_inputs: dict[str, fx.Node],
) -> None:
    """Raise TraceError if the step may read a tensor that an earlier call has left.

    buffer_inputs: path of a buffer -> its placeholder in the traced graph.
    """
    for each in left:
        module = model.get_submodule(each.module)
        if each.kind == "buffer":
            value: Any = module._buffers[each.attribute]
            node = buffer_inputs.get(each.path)
            is_read = node is not None and any(not _reads_form_only(user) for user in node.users)
            is_read = is_read and value.requires_grad
        else:
            value = vars(module).get(each.attribute)
            is_read = not each.is_unread and bool(nested.tensors(value))
        if is_read:
            raise TraceError(
                f"forward may read the tensor that an earlier call has left in the attribute "
                f"{each.attribute!r} of {each.module or title_of(model)!r}; a planned step begins "
                "without it. Reset the state before each step (utils.reset of snntorch, "
                "functional.reset_net of spikingjelly), or return it, and pass it in with the next "
                "batch. What the first call alone computes (a cache) is there if the model is "
                "called once before it is planned",
                runs_in_eager=True,
            )


def _reads_form_only(node: fx.Node) -> bool:
    """Whether a node reads only the shape, dtype and device of its first argument."""
    name = operator_name(str(node.target)).removeprefix("aten.")
    return name.endswith("_like") or name.startswith("new_")
