"""The blocks of a model, which are the default groups of FSDP2: the members of its outermost module
lists and sequentials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphs.fsdp.spec import Sharding, ShardingError
from graphs.graph import is_under

if TYPE_CHECKING:
    from torch import nn


def is_container(module: nn.Module) -> bool:
    """Whether the module only holds others, which are called instead of it: it has no forward
    (ModuleList, ModuleDict, an nn.Module that others are assigned to)."""
    from torch import nn  # here: this package is importable without torch

    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def listed_blocks(model: nn.Module, path: str = "") -> Iterator[str]:
    """The paths of the members of the outermost ModuleLists and Sequentials with several members.
    In place of members that are never called, the submodules that are.

    path: look only inside the module at this path.
    """
    from torch import nn

    module = model.get_submodule(path)
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
        yield from called_children(model, path)
        return
    for name, _ in module.named_children():
        yield from listed_blocks(model, f"{path}.{name}" if path else name)


def called_children(model: nn.Module, path: str = "") -> Iterator[str]:
    """The paths of the outermost submodules of the module at `path` whose forward is called."""
    for name, child in model.get_submodule(path).named_children():
        inside = f"{path}.{name}" if path else name
        if is_container(child):
            yield from called_children(model, inside)
        else:
            yield inside


def default_groups(model: nn.Module) -> tuple[str, ...]:
    """The modules that FSDP2 is usually applied to before the model itself: its blocks, or its
    children if it has none.

    Modules without parameters are left out, and those that share a parameter with other parts of
    the model: FSDP2 assigns a parameter to one group only.
    """
    paths = list(listed_blocks(model)) or list(called_children(model))
    shared = [names for names in _names_of_parameters(model) if len(names) > 1]
    return tuple(
        path
        for path in dict.fromkeys(paths)
        if any(True for _ in model.get_submodule(path).parameters())
        and not any(len({is_under(name, path) for name in names}) > 1 for names in shared)
    )


def groups_of(model: nn.Module, sharding: Sharding) -> tuple[str, ...]:
    """The paths of the sharding's groups in the model's order, or of the default groups if it names
    none.

    Raises ShardingError if a module that it names cannot be a group.
    """
    if sharding.groups is None:
        return default_groups(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in sharding.groups:
        if path not in modules:
            raise ShardingError(f"groups names {path!r}, which is not a module of the model")
        if is_container(modules[path]):
            raise ShardingError(
                f"groups names {path!r}, a {type(modules[path]).__name__} that is never called, so "
                "FSDP2 would not gather its parameters; name its members instead"
            )
        for names in _names_of_parameters(model):
            if len({is_under(name, path) for name in names}) > 1:
                raise ShardingError(
                    f"group {path!r} shares a parameter with other modules "
                    f"({', '.join(sorted(names))}), and FSDP2 assigns a parameter to one group "
                    "only; leave the group out, so that it belongs to the root group"
                )
    return tuple(path for path in modules if path and path in sharding.groups)


def _names_of_parameters(model: nn.Module) -> list[list[str]]:
    """For each parameter, all names that it has in the model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())
