"""Load a model file and call what it defines.

A model file defines `get_model()` and `get_batch()`, each of which may accept batch_size and
seq_length, and optionally `get_loss(output, batch)`, `get_inputs(batch)` (the part of the batch
that the model is called with), `get_optimizer(model)` and `parallelize(model, mesh)` (which
distributes the model over ranks of tensor parallelism). Errors in it are reported in one line with
file, line and reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from checkpoint_solver.cli import hf_config
from checkpoint_solver.cli.model_source import LoadError, ModelSource, error_text
from solver.sizes_deadlines_progress import describe_type

EXAMPLE_OF_SIZE = {"batch_size": 8, "seq_length": 1024}
SIZE_NAMES = tuple(EXAMPLE_OF_SIZE)
SEED = 0
"""The random seed of every batch, so that `--verify` runs the batch that was planned for."""
PARALLELIZE = "parallelize"
"""The function of a model file that distributes a model: `parallelize(model, mesh)`."""


class SizeError(ValueError):
    """A batch size or sequence length that the file does not accept, or that is missing."""


@dataclass(frozen=True)
class ModelFile:
    """A loaded model file.

    sizes: the batch_size and seq_length that were given; either may be absent.
    varied: which of them get_batch will be called with many values of ("": neither).
    title: the name of the model ("": that of its class).
    notes: sentences for the report.
    mesh: the mesh over which models are distributed (None: they are not).
    """

    source: ModelSource
    module: ModuleType
    sizes: Mapping[str, int]
    varied: str = ""
    title: str = ""
    notes: tuple[str, ...] = ()
    mesh: Any = None

    @property
    def functions(self) -> dict[str, Any]:
        """The file's functions as keyword arguments of `run_both_steps`."""
        names = ("model", "batch", "loss", "inputs", "optimizer")
        return {name: getattr(self, name) for name in names}

    def model(self) -> Any:
        """Call the factory, and distribute its model over the mesh. Raises LoadError, SizeError."""
        from torch import nn

        name = self.source.factory
        model = self._call(name, self._sizes_for(name))
        if not isinstance(model, nn.Module):
            raise self._bad_result(f"{name}()", model, "a torch.nn.Module")
        return model if self.mesh is None else self._distribute(model)

    def _distribute(self, model: Any) -> Any:
        """Distribute a model by `parallelize(model, mesh)`, which changes it or returns another."""
        from torch import nn
        from torch.distributed.tensor import DTensor

        returned = self._call(PARALLELIZE, {}, model, self.mesh)
        model = model if returned is None else returned
        if not isinstance(model, nn.Module):
            raise self._bad_result(
                f"{PARALLELIZE}(model, mesh)", model, "a torch.nn.Module or None"
            )
        if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise LoadError(
                f"{self._place(PARALLELIZE)}: {PARALLELIZE}(model, mesh) has distributed no "
                "parameter; it calls torch.distributed.tensor.parallel.parallelize_module(model, "
                "mesh, {...}) with a style for each submodule that is split"
            )
        return model

    def batch(self) -> Any:
        """Call get_batch, with the same random numbers each time. Raises LoadError, SizeError."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            batch = self._call("get_batch", self._sizes_for("get_batch"))
        if batch is None:
            what = "a tensor, or a tuple or dict, that the model is called with"
            raise self._bad_result("get_batch()", None, what)
        return batch

    @property
    def loss(self) -> Callable[[Any, Any], Any] | None:
        """The file's get_loss(output, batch); None: the model returns its loss."""
        return self._function("get_loss") if hasattr(self.module, "get_loss") else None

    @property
    def inputs(self) -> Callable[[Any], Any] | None:
        """The file's get_inputs(batch), raising LoadError; None: the whole batch is the input."""
        return self._inputs if hasattr(self.module, "get_inputs") else None

    def _inputs(self, batch: Any) -> Any:
        inputs = self._call("get_inputs", {}, batch)
        if inputs is None:
            what = (
                "the part of the batch that the model is called with: a tensor, a tuple or a dict"
            )
            raise self._bad_result("get_inputs(batch)", None, what)
        return inputs

    def optimizer(self, model: Any) -> Any:
        """The optimizer of the file for `model`, by default AdamW. Raises LoadError."""
        import torch

        if not hasattr(self.module, "get_optimizer"):
            parameters = [p for p in model.parameters() if p.requires_grad]
            if not parameters:
                raise LoadError(f"{self.source}: no parameter of the model requires a gradient")
            return torch.optim.AdamW(parameters)
        try:
            optimizer = self._call("get_optimizer", {}, model)
        except LoadError as error:
            if not isinstance(error.__cause__, TypeError | AttributeError):
                raise
            what = "it is called with the model, whose parameters are model.parameters()"
            raise LoadError(f"{error}; {what}") from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self._bad_result("get_optimizer(model)", optimizer, "a torch.optim.Optimizer")
        return optimizer

    def _bad_result(self, call: str, value: object, expected: str) -> LoadError:
        place = self._place(call.partition("(")[0])
        return LoadError(
            f"{place}: {call} returned {describe_type(value)}; it must return {expected}"
        )

    def checked(self) -> ModelFile:
        """Check functions and sizes without calling the functions; returns the file itself.

        Raises LoadError, SizeError.
        """
        for_model, for_batch = self._sizes_for(self.source.factory), self._sizes_for("get_batch")
        if self.varied and self.varied not in for_batch:
            raise SizeError(
                f"{self._place('get_batch')}: get_batch does not accept {self.varied}; define it "
                f"as get_batch({self.varied}={EXAMPLE_OF_SIZE[self.varied]}) and create tensors of "
                "that size"
            )
        for name, size in self.sizes.items():
            if name not in for_model | for_batch:
                raise SizeError(
                    f"--{name.replace('_', '-')} {size} has no effect: neither "
                    f"{self.source.factory} nor get_batch of {self.source} accepts {name}"
                )
        for name in ("get_loss", "get_inputs", "get_optimizer"):
            if hasattr(self.module, name):
                self._function(name)
        return self

    def on_mesh(self, mesh: Any) -> ModelFile:
        """The same file with its models distributed over `mesh`. Raises LoadError if it defines no
        `parallelize`."""
        self._function(PARALLELIZE)
        return dataclasses.replace(self, mesh=mesh)

    def resized(self, name: str, size: int) -> ModelFile:
        """The same file with another size."""
        return dataclasses.replace(self, sizes={**self.sizes, name: size})

    def default_of(self, name: str) -> int | None:
        """The default of get_batch's parameter `name`; None: it has none."""
        try:
            parameter = inspect.signature(self._function("get_batch")).parameters.get(name)
        except (TypeError, ValueError):  # builtins have no signature
            return None
        return parameter.default if parameter and isinstance(parameter.default, int) else None

    def _function(self, name: str) -> Callable[..., Any]:
        function = getattr(self.module, name, None)
        if function is None:
            rule = "a model file defines get_model() and get_batch()"
            if name == PARALLELIZE:
                rule = f"for --tensor it defines {PARALLELIZE}(model, mesh)"
            if name == self.source.factory and isinstance(self.source.place, str):
                rule = f"add the function that creates the model: {self.source}:factory"
            raise LoadError(
                f"{self.source} defines no {name}(); {rule}; it defines: {_functions(self.module)}"
            )
        if not callable(function):
            raise LoadError(
                f"{self.source}: {name} is {describe_type(function)}; it must be a function"
            )
        return function  # type: ignore[no-any-return]

    def _sizes_for(self, name: str) -> dict[str, int]:
        """The given sizes that the function of that name accepts, as keyword arguments.

        Raises SizeError if it requires a size that was not given, LoadError if it requires anything
        else.
        """
        function = self._function(name)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # builtins have no signature
            return {}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return dict(self.sizes)
        for parameter in parameters:
            optional = parameter.kind is parameter.VAR_POSITIONAL or (
                parameter.default is not parameter.empty
            )
            if optional or parameter.name in self.sizes:
                continue
            if parameter.name in SIZE_NAMES:
                option = parameter.name.replace("_", "-")
                raise SizeError(f"{name} of {self.source} needs {parameter.name}: give --{option}")
            raise LoadError(
                f"{self._place(name)}: {name} requires an argument {parameter.name!r}, which solve "
                "does not pass; give it a default"
            )
        accepted = {parameter.name for parameter in parameters}
        return {key: size for key, size in self.sizes.items() if key in accepted}

    def _call(self, name: str, sizes: Mapping[str, int], *args: Any) -> Any:
        function = self._function(name)
        try:
            return function(*args, **sizes)
        except hf_config.ConfigurationError as error:
            # A size that is too large ends only a search for the largest size, not the command.
            raise (LoadError if self.varied else SizeError)(str(error)) from error
        except (Exception, SystemExit) as error:
            raise LoadError(f"{error_text(error, self.source)} (in {name})") from error

    def _place(self, name: str) -> str:
        code = getattr(getattr(self.module, name), "__code__", None)
        return str(self.source) if code is None else f"{self.source}, line {code.co_firstlineno}"


@contextlib.contextmanager
def open_model_file(
    source: ModelSource, *, sizes: Mapping[str, int], varied: str = ""
) -> Iterator[ModelFile]:
    """Load a model file; inside the context its directory is on sys.path.

    Raises LoadError (missing file, invalid Python, missing function, error in it) and SizeError.
    """
    if source.is_configuration:
        assert isinstance(source.place, Path)
        try:
            module, title, notes = hf_config.load(source.place)
        except hf_config.ConfigurationError as error:
            raise LoadError(str(error)) from error
        yield ModelFile(source, module, sizes, varied, title, notes).checked()
        return
    path = source.place if isinstance(source.place, Path) else None
    directory = str(Path.cwd() if path is None else path.resolve().parent)
    sys.path.insert(0, directory)
    try:
        module = _import(source) if path is None else _load_file(path, source)
        yield ModelFile(source, module, sizes, varied).checked()
    finally:
        if directory in sys.path:
            sys.path.remove(directory)


def _load_file(path: Path, source: ModelSource) -> ModuleType:
    # A distinct name, so that a file called torch.py does not become the module torch.
    name = f"model_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{path}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise LoadError(error_text(error, source)) from error
    return module


def _import(source: ModelSource) -> ModuleType:
    name = str(source.place)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise LoadError(
                f"{name}: no module {missing!r} in the working directory or among the installed "
                "packages; a model file ends in .py, a graph file in .json"
            ) from error
        raise LoadError(error_text(error, source)) from error


def _functions(module: ModuleType) -> str:
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    own = [n for n, f in functions.items() if getattr(f, "__module__", None) == module.__name__]
    names = [name for name in own if not name.startswith("_")]
    return ", ".join(names[:8]) or "no function"
