"""Parameters of a module whose values are in host memory while no operator reads them.

A planned forward pass begins with these values on the host. Its program copies each one to the
device where the plan says so (`execute.host_values.load`); the optimizer copies those of one bucket
at a time (`host_memory.optimizer_state`). Between steps the values are on the host too, and reading
such a parameter gives NaN. `state_dict`, `load_state_dict` and a forward pass without the plan
bring the values back by themselves; the next planned forward pass moves them to the host again. For
everything else, use

    with parameters_on_device(model):
        ...
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphs.model_calls import fills_its_storage
from scheduler_runtime.execute import (
    CopyEvent,
    CopyStreams,
    forget_value,
    host_memory,
    is_stand_in,
    stand_in_for,
    streams_for,
)

_HOST_PARAMETERS: weakref.WeakKeyDictionary[nn.Module, HostParameters] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def parameters_on_device(model: nn.Module) -> Iterator[None]:
    """In this context, all parameters of the model have their values on the device, whatever a plan
    says.

    A step in this context needs device memory for all of them.
    """
    found = [of for module in model.modules() if (of := _HOST_PARAMETERS.get(module)) is not None]
    with contextlib.ExitStack() as stack:
        for each in found:
            stack.enter_context(each.on_device())
        yield


class HostParameters:
    """The parameters of one module that are kept in host memory.

    names: of these parameters, as in `named_parameters`.

    Raises ValueError for a name that is not a parameter's, and for a parameter that is not
    contiguous or shares its memory.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        known = dict(model.named_parameters())
        if missing := [name for name in names if name not in known]:
            raise ValueError(
                f"the plan has the parameter {missing[0]!r} in host memory, and the model has none "
                "of this name; plan again"
            )
        self._names = {known[name]: name for name in names}
        for parameter, name in self._names.items():
            if not fills_its_storage(parameter):
                raise ValueError(
                    f"the plan has the parameter {name!r} in host memory, and it is not contiguous "
                    'or is part of a larger tensor; plan with parameters="device"'
                )
        self._host = {parameter: host_memory(parameter.data) for parameter in self._names}
        self._stand_ins = {p: stand_in_for(p, value) for p, value in self._host.items()}
        self._on_host: set[nn.Parameter] = set()
        self._n_on_device_contexts = 0
        self._streams: CopyStreams = streams_for(next(iter(self._names)).device)
        self._hooks = [*self._add_hooks(model)]
        for stand_in in self._stand_ins.values():
            weakref.finalize(self, forget_value, stand_in).atexit = False
        _HOST_PARAMETERS[model] = self

    @property
    def host_bytes(self) -> int:
        return sum(value.nbytes for value in self._host.values())

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """In this context, the values are on the device and stay there."""
        self.bring_back()
        self._n_on_device_contexts += 1
        try:
            yield
        finally:
            self._n_on_device_contexts -= 1

    @torch.no_grad()
    def move_to_host(self) -> None:
        """Copy the values that are on the device to the host, and free their device memory."""
        on_device = [parameter for parameter in self._names if parameter not in self._on_host]
        if self._n_on_device_contexts or not on_device:
            return
        self._streams.begin()
        for done, _value in self.store(on_device, self._streams):
            done.hold_compute()
        self._streams.settle()

    @torch.no_grad()
    def bring_back(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Copy the values to the device, until the next planned step (None: of all parameters)."""
        wanted = self._on_host if parameters is None else self._on_host.intersection(parameters)
        if not wanted:
            return
        self._streams.begin()
        for done in self.fetch([*wanted], self._streams):
            done.hold_compute()
        self._streams.settle()

    def fetch(self, parameters: Iterable[torch.Tensor], streams: CopyStreams) -> list[CopyEvent]:
        """Start to copy those of these parameters that are on the host to new device memory.

        Returns the copies, which may still run.
        """
        found = []
        for parameter in parameters:
            if isinstance(parameter, nn.Parameter) and parameter in self._on_host:
                if not is_stand_in(parameter.data, self._stand_ins[parameter]):
                    raise RuntimeError(
                        f"the parameter {self._names[parameter]!r} was replaced (by model.to or "
                        ".data) while its value was in host memory: change parameters inside of "
                        "`with checkpoint_solver.parameters_on_device(model):`"
                    )
                value = torch.empty_like(
                    self._host[parameter], device=parameter.device, pin_memory=False
                )
                found.append(streams.to_device(value, self._host[parameter], []))
                parameter.data = value
                self._on_host.discard(parameter)
        return found

    def store(
        self, parameters: Iterable[torch.Tensor], streams: CopyStreams
    ) -> list[tuple[CopyEvent, torch.Tensor]]:
        """Start to copy those of these parameters that are on the device to the host.

        Returns each copy, which may still run, with the device memory that is free once it has
        ended."""
        found = []
        for parameter in parameters:
            is_hosted = isinstance(parameter, nn.Parameter) and parameter in self._names
            if is_hosted and parameter not in self._on_host and not self._n_on_device_contexts:
                assert isinstance(parameter, nn.Parameter)
                value = parameter.data
                found.append((streams.to_host(self._host[parameter], value, []), value))
                parameter.data = self._stand_ins[parameter]
                self._on_host.add(parameter)
        return found

    def close(self, model: nn.Module) -> None:
        """Bring the values back to the device for good, and remove the hooks."""
        self.bring_back()
        for hook in self._hooks:
            hook.remove()
        _HOST_PARAMETERS.pop(model, None)

    def _add_hooks(self, model: nn.Module) -> Iterator[Any]:
        """Add hooks that bring values back before the module that owns them is saved or loaded."""
        reference = weakref.ref(self)
        for module in model.modules():
            own = [p for p in module._parameters.values() if p is not None and p in self._names]
            if own:
                before = _BringBackHook(reference, own)
                yield module.register_state_dict_pre_hook(before)
                yield module.register_load_state_dict_pre_hook(before)


class _BringBackHook:
    """A hook on a module that owns `parameters`, which are some of `host_parameters`."""

    def __init__(
        self, host_parameters: weakref.ref[HostParameters], parameters: Sequence[nn.Parameter]
    ) -> None:
        self._host_parameters, self._parameters = host_parameters, parameters

    def __call__(self, *_: Any, **__: Any) -> None:
        host_parameters = self._host_parameters()
        if host_parameters is not None:
            host_parameters.bring_back(self._parameters)

    def __getstate__(self) -> object:
        """Raises RuntimeError: in a copy of the module the values would be lost."""
        raise RuntimeError(
            "a model whose plan has parameters in host memory cannot be copied or pickled: save "
            "its state_dict(), or remove(model) the plan first"
        )
