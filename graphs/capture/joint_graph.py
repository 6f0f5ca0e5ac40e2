"""From a module and a batch to one fx graph of the whole step, forward and backward, on paper.

AOTAutograd's joint export records every operator that the forward pass and autograd run, with
mutations turned into outputs (functionalised). Everything happens on fake tensors: no weights, no
batch and no activation is ever allocated, and the module is left as it was.

What is done to make that true for modules as people write them:

- Parameters and buffers are handed in deduplicated (tied weights otherwise count twice), through
  `torch.func.functional_call` on a shell that owns the fake ones.
- What depends on the batch and on buffers alone may be looked at
  (`graphs.capture.as_eager.known_values`): the branches are those of eager mode, and what was seen
  is kept beside the program.
- Outputs that get no gradient are detached inside, so that the backward pass does not expect
  zeros as large as they are.
- Ambient autocast is on for the forward pass alone: the backward pass runs after its block, as
  PyTorch asks, where operators take the types that they get.
- Modules call global hooks, for the time of the trace only, that note the path of the module which
  an operator belongs to.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.traceback import annotate
from torch.utils import _pytree as pytree

from graphs.calls import HOLE, Call, TraceError, nested
from graphs.capture.as_eager import Guard, eager_branches, eager_kernels
from graphs.capture.refuse import (
    HeldTensor,
    SideEffectError,
    attributes_unchanged,
    refuse_hooks,
    refuse_overlapping,
    refuse_parametrization_cache,
)
from graphs.capture.shell import Shell

TRACING = threading.RLock()
"""Held while something is traced. What is patched for that time (operators' kernels, branches of
libraries, hooks of all modules, settings of AOTAutograd) is the whole process's: two threads that
trace take turns."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function with `TRACING` held."""

    @functools.wraps(function)
    def locked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with TRACING:
            return function(*args, **kwargs)

    return locked


@dataclass(frozen=True)
class Source:
    """Where an input of the joint graph comes from.

    kind: "parameter", "buffer", "input" or "tangent". name: the parameter's or buffer's path, or
    "input.3", "tangent.0". index: among its kind.
    """

    kind: str
    name: str
    index: int

    @property
    def title(self) -> str:
        """What people call it: "buffer 'norm.running_mean'"."""
        if self.kind in ("parameter", "buffer"):
            return f"{self.kind} {self.name!r}"
        return f"tensor {self.index} of the batch" if self.kind == "input" else self.name


@dataclass(frozen=True)
class Capture:
    """The joint fx graph and the meaning of what goes in and comes out.

    sources: per placeholder. outputs: fx nodes (or constants) of the model's flat outputs, in the
    order of `output_spec`. gradient_outputs: indices of those that get a gradient. differentiable:
    of those that require one, wanted or not. tangents: index -> its placeholder. gradients:
    placeholder of a parameter or batch tensor -> fx node of its gradient. mutations: placeholder ->
    fx node of the new value. guards: what the module looked at; another call that would see
    something else is another program. held: the tensors in plain attributes of the module that the
    program has as constants.
    """

    graph: torch.fx.Graph
    module: torch.fx.GraphModule
    sources: Mapping[torch.fx.Node, Source]
    outputs: tuple[Any, ...]
    output_spec: nested.Spec
    gradient_outputs: tuple[int, ...]
    differentiable: tuple[int, ...]
    tangents: Mapping[int, torch.fx.Node]
    gradients: Mapping[torch.fx.Node, torch.fx.Node]
    mutations: Mapping[torch.fx.Node, torch.fx.Node]
    guards: tuple[Guard, ...]
    held: tuple[HeldTensor, ...]


@one_at_a_time
def capture(
    model: nn.Module,
    call: Call,
    *,
    device: torch.device | None,
    choose: Callable[[Any], tuple[int, ...]],
) -> Capture:
    """Capture forward and backward of `model` called with `call`.

    device: where the fake tensors stand (None: where the real ones are).
    choose: flat model output -> indices of the outputs that get a gradient.
    Raises TraceError with the reason.
    """
    shell = Shell(model, call, choose=choose, device=device)
    # What PyTorch remembers of an operator on fake tensors leaves gaps before its result out: sizes
    # would depend on what this process has traced before.
    FakeTensorMode.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(eager_kernels(device or torch.device("cpu")))
        stack.enter_context(eager_branches())
        stack.enter_context(_module_paths(model))
        # Autocast is for the forward pass: `backward()` is called after its context has ended.
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        try:
            refuse_hooks(model)
            refuse_parametrization_cache(model)
            with attributes_unchanged(model):
                joint = aot_export_joint_with_descriptors(stack, shell, tuple(shell.batch))
            shell.mode.read.refuse_hidden(call.rest)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(_reason(model, error), runs_in_eager=True) from error
        return _read(joint, shell)


@one_at_a_time
def fake_output(model: nn.Module, call: Call, *, device: torch.device | None) -> Any:
    """What the model returns for this call, on fake tensors, without recording anything."""
    shell = Shell(model, call, choose=lambda _output: (), device=device)
    with eager_branches():
        try:
            refuse_hooks(model)
            with attributes_unchanged(model), shell.mode:
                return shell.call(shell.batch)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(_reason(model, error), runs_in_eager=True) from error


def _read(joint: Any, shell: Shell) -> Capture:
    """Translate AOT's descriptors into the words of `Capture`."""
    module: torch.fx.GraphModule = joint.graph_module
    sources: dict[torch.fx.Node, Source] = {}
    by_desc: dict[Any, torch.fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        by_desc[desc] = node
        sources[node] = _source(desc, shell)
    output_node = module.graph.output_node()
    values = list(pytree.tree_leaves(output_node.args[0], is_leaf=lambda item: item is None))
    flat: dict[int, Any] = {}
    gradients: dict[torch.fx.Node, torch.fx.Node] = {}
    mutations: dict[torch.fx.Node, torch.fx.Node] = {}
    for value, desc in zip(values, output_node.meta["desc"], strict=True):
        if isinstance(desc, descriptors.PlainAOTOutput):
            flat[desc.idx] = value
        elif isinstance(desc, descriptors.InputMutationAOTOutput):
            mutations[by_desc[desc.mutated_input]] = value
        elif isinstance(desc, descriptors.GradAOTOutput):
            if value is not None:
                gradients[by_desc[desc.grad_of]] = value
        elif value is not None and not isinstance(desc, descriptors.IntermediateBaseAOTOutput):
            raise TraceError(f"an output of kind {type(desc).__name__} cannot be planned for yet")
    positions = [index for index, item in enumerate(shell.flat_outputs) if item is HOLE]
    outputs = list(shell.flat_outputs)
    for index, value in flat.items():
        outputs[positions[index]] = value
    tangents = {
        positions[sources[node].index]: node for node in sources if sources[node].kind == "tangent"
    }
    _refuse_shared(outputs, shell.chosen)
    _refuse_overlapping(sources, mutations, shell)
    if shell.spec is None:
        raise TraceError("the model was never called while it was traced")
    return Capture(
        graph=module.graph,
        module=module,
        sources=sources,
        outputs=tuple(outputs),
        output_spec=shell.spec,
        gradient_outputs=shell.chosen,
        differentiable=shell.differentiable,
        tangents=tangents,
        gradients=gradients,
        mutations=mutations,
        guards=tuple(shell.mode.known.guards),
        held=shell.mode.read.held_by(shell.model),
    )


def _refuse_shared(outputs: list[Any], chosen: tuple[int, ...]) -> None:
    """Outputs that get a gradient must be tensors of their own."""
    storages: dict[Any, int] = {}
    for index, item in enumerate(outputs):
        if not isinstance(item, torch.fx.Node):
            continue
        storage = item.meta["val"].untyped_storage()._cdata
        other = storages.setdefault(storage, index)
        if index in chosen and item.op == "placeholder":
            raise TraceError(
                f"output {index} of the model, which gets a gradient, is one of its inputs or "
                "parameters; return a clone of it"
            )
        if other != index and (index in chosen or other in chosen):
            raise TraceError(
                f"outputs {other} and {index} of the model share memory, and one of them gets a "
                "gradient; return a clone of it"
            )


def _refuse_overlapping(
    sources: Mapping[torch.fx.Node, Source], mutations: Iterable[torch.fx.Node], shell: Shell
) -> None:
    """What is written must share memory with nothing else that the step reads."""
    state = shell.state
    tensors: dict[Any, torch.Tensor] = {}
    titles: dict[Any, str] = {}
    for node, source in sources.items():
        if source.kind != "tangent":
            is_input = source.kind == "input"
            tensors[node] = shell.batch_given[source.index] if is_input else state[source.name]
            titles[node] = source.title
    for index, tensor in enumerate(shell.mode.read.tensors):
        tensors[index], titles[index] = tensor, "a tensor that forward reads beside its arguments"
    refuse_overlapping(tensors, mutations, titles)


def _source(desc: Any, shell: Shell) -> Source:
    if isinstance(desc, descriptors.ParamAOTInput):
        return Source("parameter", shell.path(desc.target), int(desc.target[1:]))
    if isinstance(desc, descriptors.BufferAOTInput):
        return Source("buffer", shell.path(desc.target), int(desc.target[1:]))
    if isinstance(desc, descriptors.PlainAOTInput):
        return Source("input", f"input.{desc.idx}", desc.idx)
    if isinstance(desc, descriptors.TangentAOTInput):
        if not isinstance(desc.output, descriptors.PlainAOTOutput):
            raise TraceError(_shares_memory(desc.output, shell))
        return Source("tangent", f"tangent.{desc.output.idx}", desc.output.idx)
    raise TraceError(f"an input of kind {type(desc).__name__} cannot be planned for yet")


def _shares_memory(output: Any, shell: Shell) -> str:
    """Why a gradient would arrive for what is no output of its own."""
    if isinstance(output, descriptors.InputMutationAOTOutput):
        written = output.mutated_input
        if isinstance(written, descriptors.ParamAOTInput):
            return (
                f"forward changes parameter {shell.path(written.target)!r} in place (clamp_, "
                "copy_, .data, max_norm of nn.Embedding); change it outside of forward, before "
                "the step"
            )
    return "outputs of the model share memory; return clones of them"


@contextlib.contextmanager
def _module_paths(model: nn.Module) -> Iterator[None]:
    """Write the path of the running module of `model` into each fx node's meta."""
    paths = {module: name for name, module in model.named_modules()}
    entered: list[contextlib.ExitStack] = []
    tracing = threading.get_ident()

    def before(module: nn.Module, _args: Any) -> None:
        if threading.get_ident() != tracing:  # a step that another thread runs meanwhile
            return
        stack = contextlib.ExitStack()
        if module in paths:
            stack.enter_context(annotate({"module_path": paths[module]}))
        entered.append(stack)

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        if entered and threading.get_ident() == tracing:
            entered.pop().close()

    hooks: tuple[Any, ...] = (before, after)
    for hook in hooks:
        hook.is_of_trace = True
    handles = [
        nn.modules.module.register_module_forward_pre_hook(before),
        nn.modules.module.register_module_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while entered:
            entered.pop().close()


_LOOKED_AT = (DataDependentOutputException, DynamicOutputShapeException)
_LOOKS = (
    "forward looks at numbers that the step computes (an `if` on a tensor, .item(), int(), a "
    "selection by a computed mask), so that each step could be another one; a plan is for one. "
    "Select with torch.where or by multiplying with a mask, or decide by what comes with the batch "
    "(the batch and the buffers may be looked at)"
)


def _reason(model: nn.Module, error: Exception) -> str:
    """One line: what failed and where in the user's code."""
    if isinstance(error, SideEffectError):
        return f"{type(model).__name__} cannot be planned: {error}"
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    what = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if isinstance(error, _LOOKED_AT):
        what = _LOOKS
    place = ""
    frame = error.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        ours = Path(path).is_relative_to(Path(__file__).parents[1])
        if "/torch/" not in path and not ours and not path.startswith("<"):
            place = f" ({path}, line {frame.tb_lineno})"
        frame = frame.tb_next
    return f"{type(model).__name__} cannot be traced{place}: {what}"
