"""Methods that are planned as one piece, such as Wav2Vec2's, which draws time masks with NumPy.

A module that holds most of a model should not be one piece, but a method that its forward calls may
be one. It is identified by the path of the module and its name
("wav2vec2._mask_hidden_states()"). It may use the parameters and buffers of this very module, and
may not call submodules.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from graphs.capture.own_failure import frames_of
from graphs.capture.refuse import around_module_calls, generators_of, state_of_generator

_CALL = "()"


class CalledMethod(nn.Module):
    """A module that calls a method of another module, its owner.

    Its parameters and buffers are the owner's, without those of submodules.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        self._unregistered = (owner,)  # in a tuple: not registered as a submodule
        self.training = owner.training
        self._parameters, self._buffers = owner._parameters, owner._buffers

    @property
    def owner(self) -> nn.Module:
        return self._unregistered[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.owner), self.name)(self.owner, *args, **kwargs)

    @contextlib.contextmanager
    def called_instead(self) -> Iterator[None]:
        """While inside, calls of the owner's method call this module instead."""
        with attribute_set(self.owner, self.name, self):
            yield


def is_method(path: str) -> bool:
    """Whether the path of an opaque part is that of a method."""
    return path.endswith(_CALL)


def called_method(model: nn.Module, path: str) -> CalledMethod:
    """A module that calls the method at this path. Raises AttributeError if there is none."""
    where, _, name = path.removesuffix(_CALL).rpartition(".")
    owner = model.get_submodule(where)
    if name not in _plain_methods_of(owner):
        raise AttributeError(f"{type(owner).__name__} has no method {name!r} of its own")
    return CalledMethod(owner, name)


def method_paths(model: nn.Module, owner: nn.Module, name: str) -> list[str]:
    """The paths of this method in all modules of the owner's class."""
    same_class = [path for path, module in model.named_modules() if type(module) is type(owner)]
    return [f"{path}.{name}{_CALL}".lstrip(".") for path in same_class]


def failing_method(owner: nn.Module, error: BaseException) -> str | None:
    """The name of the first method that the owner's forward has called on the way to the error."""
    methods, is_inside = _plain_methods_of(owner), False
    for frame in frames_of(error):
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if first is not owner:
            continue
        is_inside |= code.co_name == "forward"
        method = methods.get(code.co_name)
        if is_inside and method is not None and inspect.unwrap(method).__code__ is code:
            return str(code.co_name)
    return None


def method_that_draws(owner: nn.Module, run: Callable[[], object]) -> str | None:
    """The name of the owner's first method that draws from generators other than torch's.

    run: calls the model, and so the owner's forward.
    """
    generators = list(generators_of(owner).values())
    found: list[str] = []
    running: list[str] = []

    def states() -> list[Any]:
        return [state_of_generator(each) for each in generators]

    def watched_method(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = None if running else states()
            running.append(name)
            try:
                return getattr(type(owner), name)(owner, *args, **kwargs)
            finally:
                running.pop()
                if before is not None and before != states():
                    found.append(name)

        return call

    with contextlib.ExitStack() as stack:
        for name in _plain_methods_of(owner):
            stack.enter_context(attribute_set(owner, name, watched_method(name)))
        run()
    return found[0] if found else None


@contextlib.contextmanager
def no_submodule_called(owner: nn.Module, make_error: Callable[[str], Exception]) -> Iterator[None]:
    """While inside, raise an error if one of the owner's submodules is called.

    make_error: makes the error from the reason.
    """
    inner = {*owner.modules()} - {owner}

    def check(module: nn.Module) -> None:
        if module in inner:
            raise make_error(f"it calls a submodule, {type(module).__name__}")

    with around_module_calls(check):
        yield


def _plain_methods_of(owner: nn.Module) -> dict[str, types.FunctionType]:
    """The plain methods that the owner's class and its bases define, except `forward`.

    Methods of torch's classes, of special names (`__`), and those replaced on the owner itself are
    left out.
    """
    found: dict[str, types.FunctionType] = {}
    for kind in type(owner).__mro__:
        if kind is nn.Module or kind.__module__.partition(".")[0] == "torch":
            continue
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType) and not name.startswith("__"):
                found.setdefault(name, value)
    found.pop("forward", None)
    return {name: each for name, each in found.items() if name not in vars(owner)}


@contextlib.contextmanager
def attribute_set(owner: nn.Module, name: str, value: object) -> Iterator[None]:
    """While inside, the module has this attribute of its own, which nn.Module does not register."""
    vars(owner)[name] = value
    try:
        yield
    finally:
        vars(owner).pop(name, None)
