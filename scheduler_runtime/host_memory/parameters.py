"""Parameters of a module whose values are in host memory while no operator reads them.

A planned forward pass begins with their values on the host. Its program copies each to the device
where the plan says so (`execute.host_values.load`), the optimizer those of a bucket at a time
(`host_memory.optimizer_state`). Between the steps they are on the host, too: a parameter reads NaN
there. `state_dict`, `load_state_dict` and a forward pass without the plan bring the values back by
themselves, and the next planned forward pass sends them away again; for everything else there is

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

from scheduler_runtime.execute import (
    CopyStreams,
    Done,
    forget,
    host_memory,
    is_stand_in,
    stand_in_for,
    streams_for,
)

_OF_MODEL: weakref.WeakKeyDictionary[nn.Module, HostParameters] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def parameters_on_device(model: nn.Module) -> Iterator[None]:
    """All parameters of the model have their values, in this context, wherever a plan puts them.

    Steps in this context take the memory of all parameters.
    """
    found = [of for module in model.modules() if (of := _OF_MODEL.get(module)) is not None]
    with contextlib.ExitStack() as stack:
        for each in found:
            stack.enter_context(each.on_device())
        yield


class HostParameters:
    """Those of one module, by name.

    Raises ValueError for a name that is no parameter, and for one whose memory is not its own.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        known = dict(model.named_parameters())
        if missing := [name for name in names if name not in known]:
            raise ValueError(
                f"the plan has the parameter {missing[0]!r} in host memory, and the model has none "
                "of this name; plan again"
            )
        self._title = {known[name]: name for name in names}
        for parameter, name in self._title.items():
            storage_bytes = parameter.untyped_storage().nbytes()
            if not parameter.is_contiguous() or storage_bytes != parameter.nbytes:
                raise ValueError(
                    f"the plan has the parameter {name!r} in host memory, and it is not contiguous "
                    'or is part of a larger tensor; plan with parameters="device"'
                )
        self._host = {parameter: host_memory(parameter.data) for parameter in self._title}
        self._stand_in = {p: stand_in_for(p, value) for p, value in self._host.items()}
        self._away: set[nn.Parameter] = set()
        self._n_held = 0
        self._streams: CopyStreams = streams_for(next(iter(self._title)).device)
        self._hooks = [*self._hooked(model)]
        for stand_in in self._stand_in.values():
            weakref.finalize(self, forget, stand_in).atexit = False
        _OF_MODEL[model] = self

    @property
    def host_bytes(self) -> int:
        return sum(value.nbytes for value in self._host.values())

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """They are there, and stay."""
        self.bring_back()
        self._n_held += 1
        try:
            yield
        finally:
            self._n_held -= 1

    @torch.no_grad()
    def leave(self) -> None:
        """Copy to the host what is on the device, and give its memory up."""
        there = [parameter for parameter in self._title if parameter not in self._away]
        if self._n_held or not there:
            return
        self._streams.begin()
        for done, _value in self.store(there, self._streams):
            done.hold_compute()
        self._streams.settle()

    @torch.no_grad()
    def bring_back(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """The values are on the device until the next planned step."""
        wanted = self._away if parameters is None else self._away.intersection(parameters)
        if not wanted:
            return
        self._streams.begin()
        for done in self.fetch([*wanted], self._streams):
            done.hold_compute()
        self._streams.settle()

    def fetch(self, parameters: Iterable[torch.Tensor], streams: CopyStreams) -> list[Done]:
        """Put those that are away in new memory of the device; the copies may still run."""
        found = []
        for parameter in parameters:
            if isinstance(parameter, nn.Parameter) and parameter in self._away:
                if not is_stand_in(parameter.data, self._stand_in[parameter]):
                    raise RuntimeError(
                        f"the parameter {self._title[parameter]!r} was replaced (by model.to or "
                        ".data) while its value was in host memory: change parameters inside of "
                        "`with checkpoint_solver.parameters_on_device(model):`"
                    )
                value = torch.empty_like(
                    self._host[parameter], device=parameter.device, pin_memory=False
                )
                found.append(streams.back(value, self._host[parameter], []))
                parameter.data = value
                self._away.discard(parameter)
        return found

    def store(
        self, parameters: Iterable[torch.Tensor], streams: CopyStreams
    ) -> list[tuple[Done, torch.Tensor]]:
        """Copy those that are there to the host. Returns each copy, which may still run, with the
        memory that is free when it has ended."""
        found = []
        for parameter in parameters:
            may = isinstance(parameter, nn.Parameter) and parameter in self._title
            if may and parameter not in self._away and not self._n_held:
                assert isinstance(parameter, nn.Parameter)
                value = parameter.data
                found.append((streams.out(self._host[parameter], value, []), value))
                parameter.data = self._stand_in[parameter]
                self._away.add(parameter)
        return found

    def close(self, model: nn.Module) -> None:
        """The values are on the device, for good."""
        self.bring_back()
        for hook in self._hooks:
            hook.remove()
        _OF_MODEL.pop(model, None)

    def _hooked(self, model: nn.Module) -> Iterator[Any]:
        """The values are back before a module that has them is saved or loaded."""
        here = weakref.ref(self)
        for module in model.modules():
            own = [p for p in module._parameters.values() if p is not None and p in self._title]
            if own:
                before = _BringBack(here, own)
                yield module.register_state_dict_pre_hook(before)
                yield module.register_load_state_dict_pre_hook(before)


class _BringBack:
    """A hook of the module that has these parameters. own: of `here`."""

    def __init__(self, here: weakref.ref[HostParameters], own: Sequence[nn.Parameter]) -> None:
        self._here, self._own = here, own

    def __call__(self, *_: Any, **__: Any) -> None:
        here = self._here()
        if here is not None:
            here.bring_back(self._own)

    def __getstate__(self) -> object:
        """Raises RuntimeError: in a copy of the module the values would be lost."""
        raise RuntimeError(
            "a model whose plan has parameters in host memory cannot be copied or pickled: save "
            "its state_dict(), or remove(model) the plan first"
        )
