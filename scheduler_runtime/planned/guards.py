"""Guards: everything besides tensor values that a program depends on, compared before each call.

A program is what `forward` did when it was traced. Before each call, `kind_of` reads what forward
can see; if no program was made for the same, the call needs a new one. It reads

- the form (shape, strides, dtype, device) of the batch, parameters and buffers; arguments that are
  not tensors; autocast;
- the places of submodules, parameters and buffers, and which of them are one (`module_tree`);
- global settings of torch that decide which operators run, and global module hooks;
- for each module its class, its `forward`, its training flag and the code of its hooks;
- plain values (numbers, strings, dtypes, ...) in attributes of modules and of their classes, also
  nested in lists, tuples, dicts, sets and deques (peft keeps its scaling in a dict), and there the
  form of tensors (`compared_values`);
- objects that hold only plain values: configs, dataclasses, namespaces. An object that holds
  anything else (a trainer, a logger) is compared by identity, since it may change in every step;
- functions, classes and modules held in other places, by identity;
- globals, closures and other values outside of the model that the code names (`read_elsewhere`).

Tensor values that forward read as numbers have guards of their own
(`graphs.capture.as_eager.known_values`). `docs/bitwise_identical.md` lists what no guard sees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from graphs.capture import HOOKS, MODULE_ATTRIBUTES, global_hooks, shared_storages
from graphs.model_calls import Call
from scheduler_runtime.planned.compared_values import (
    COMMON,
    CONTAINERS,
    argument,
    class_settings,
    form,
    hook_setting,
    setting,
)
from scheduler_runtime.planned.module_tree import ModuleTree
from scheduler_runtime.planned.read_elsewhere import NOW, ReadElsewhere


def kind_of(model: nn.Module, call: Call, *, ignored: Collection[tuple[str, str]] = ()) -> Any:
    """What a program for this call depends on: equal for calls that can share a program.

    ignored: attributes that may have any value, as pairs of a module's path and a name.
    """
    tree = ModuleTree.of(model)
    device = next((p.device.type for p in tree.parameters), "cpu")
    modes = torch.overrides._get_current_function_mode_stack()
    return (
        tuple(map(form, call.tensors)),
        shared_storages(call.tensors) if len(call.tensors) > 1 else (),
        tuple(map(argument, call.rest)),
        call.spec,
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        tuple((type(mode), getattr(mode, "device", None)) for mode in modes),
        global_hooks(),
        parametrize._cache_enabled > 0,
        torch.get_default_dtype(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cudnn_enabled(),
        (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
        tree.submodules,
        tree.parameter_places,
        tree.buffer_places,
        tuple(map(form, tree.parameters)),
        tuple(map(form, tree.buffers)),
        NOW,
        settings_of(model, tree.modules, ignored),
    )


def with_read_elsewhere(kind: Any, model: nn.Module, forward: Callable[..., Any]) -> Any:
    """The kind of calls for which what `forward` reads outside of the model is as it is now."""
    *others, _, of_modules = kind
    return (*others, ReadElsewhere([forward], model.modules()), of_modules)


_TITLES = (
    *("the shapes, types or devices of the arguments", "which arguments share memory"),
    *("an argument that is not a tensor", "the structure of the arguments"),
    *("autocast", "autocast's cache", "a function mode of torch (its default device, say)"),
    *("the hooks of all modules", "the cache of parametrizations", "torch's default dtype"),
    *("torch.backends.cuda.enable_flash_sdp", "torch.backends.cuda.enable_mem_efficient_sdp"),
    *("torch.backends.cuda.enable_math_sdp", "torch.backends.cuda.enable_cudnn_sdp"),
    *("torch.backends.mha.set_fastpath_enabled", "torch.use_deterministic_algorithms"),
    *("torch.backends.cudnn.enabled", "torch.backends.opt_einsum"),
    *("which submodules there are, and which are one", "which parameters are one, or their names"),
    "which buffers are one, or their names",
    *("the form of a parameter", "the form of a buffer"),
    "what forward reads outside of the model",
)
"""Descriptions of the items of `kind_of`, in order, except the last: the settings of modules."""
_OF_MODULE = ("its class", "its forward", "its class's attributes", "train()", "its hooks")


def changed_setting(planned: Any, here: Any, model: nn.Module) -> str | None:
    """Describe the first difference between two `kind_of` this model. None: there is none."""
    *torchs, of_planned = planned
    *torchs_here, of_here = here
    for title, old, new in zip(_TITLES, torchs, torchs_here, strict=True):
        if old != new:
            name = old.changed() if isinstance(old, ReadElsewhere) else None
            return f"{name or title} has changed"
    for (path, _), old, new in zip(model.named_modules(), of_planned, of_here, strict=False):
        owner = f"module {path!r}" if path else type(model).__name__
        for title, before, now in zip(_OF_MODULE, old, new, strict=False):
            if before != now:
                return f"{title} of {owner} has changed"
        (*_, old_own), (*_, new_own) = old, new
        before, now = dict(old_own), dict(new_own)
        for name in dict.fromkeys([*now, *before]):
            if name not in before or name not in now or before[name] != now[name]:
                how = _describe_change(before.get(name), now.get(name))
                return f"attribute {name!r} of {owner} {how}"
    return "the model has other modules" if len(of_planned) != len(of_here) else None


def changed_values(planned: Any, here: Any, model: nn.Module) -> set[tuple[str, str]]:
    """Path of the module and name of each attribute in which two `kind_of` this model differ, and
    which is a number, a string, None, a tensor or a container in both."""
    if len(planned) != len(here) or len(planned[-1]) != len(here[-1]):
        return set()
    found: set[tuple[str, str]] = set()
    for (path, _), (*_, old), (*_, new) in zip(
        model.named_modules(), planned[-1], here[-1], strict=True
    ):
        before = dict(old)
        found.update(
            (path, name)
            for name, value in new
            if name in before and before[name] != value
            if _is_value(before[name]) and _is_value(value)
        )
    return found


def _is_value(setting: Any) -> bool:
    """Of a number, a string, None, a tensor or a container, and not of an object or of code."""
    kind = setting[0] if isinstance(setting, tuple) and len(setting) == 2 else None
    if isinstance(kind, tuple):  # a tuple of plain values
        return True
    return isinstance(kind, type) and issubclass(kind, (float, torch.Tensor, *COMMON, *CONTAINERS))


def _describe_change(planned: Any, here: Any) -> str:
    """Describe how a setting has changed, numbers and strings with their values.

    planned, here: as `setting` returns them; None: the attribute does not exist.
    """
    if here is None:
        return "is gone"
    if planned is None:
        return "is new"
    values = [
        each[1] if each[0] is float else repr(each[1])  # a float is written out already
        for each in (here, planned)
        if isinstance(each, tuple) and len(each) == 2 and each[0] in (float, *COMMON)
    ]
    return f"is {values[0]}, planned for {values[1]}" if len(values) == 2 else "has changed"


def settings_of(
    model: nn.Module, modules: list[nn.Module], ignored: Collection[tuple[str, str]] = ()
) -> tuple[Any, ...]:
    """The Python state of each of these modules of the model, as described above."""
    seen: set[int] = set()  # what is in an ignored attribute counts where else it is found
    at = dict(model.named_modules()) if ignored else {}
    ignored_here = {(id(at.get(path)), name) for path, name in ignored}
    of_class = {
        kind: class_settings(kind, seen) for kind in dict.fromkeys(map(type, modules))
    }  # in a fixed order, since what two classes hold counts where it is found first
    return tuple(
        (
            type(module),
            getattr(type(module), "forward", None),  # a ScriptModule has none
            of_class[type(module)],
            module.training,
            # the model's own hooks run around the plan
            tuple(len(getattr(module, hooks)) for hooks in HOOKS)
            if module is model
            else tuple(
                tuple([hook_setting(each, seen) for each in found.values()]) if found else ()
                for found in [getattr(module, hooks) for hooks in HOOKS]
            ),
            tuple(
                (name, _ANY if (id(module), name) in ignored_here else setting(value, seen))
                for name, value in vars(module).items()
                if name not in MODULE_ATTRIBUTES and not (module is model and name in _AROUND)
            ),
        )
        for module in modules
    )


_AROUND = {"forward", "_is_torch_compile", "_compiled_call_impl", "_compile_kwargs"}
"""Attributes of the model itself that a plan does not depend on: its `forward` is the plan, and
torch.compile, `model.compile()` and Lightning's version of torch.compile, which set the others,
wrap the call."""


class _Any:
    """Equal to everything."""

    def __eq__(self, _other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_ANY = _Any()
