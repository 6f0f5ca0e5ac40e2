"""From a module and a batch to one fx graph of forward and backward, on fake tensors.

AOTAutograd's joint export records every operator that the forward pass and autograd run, with
mutations turned into outputs (functionalised). No weight, batch or activation is allocated, and the
module is unchanged afterwards.

What makes this work for modules as people write them:

- Parameters and buffers are passed in deduplicated (tied weights would count twice), through
  `torch.func.functional_call` on a shell that owns the fake ones.
- The module may read values that depend only on the batch and on buffers
  (`graphs.capture.as_eager.known_values`): it takes the branches of eager mode, and what it read is
  kept as guards of the program.
- Outputs that get no gradient are detached inside; otherwise the backward pass would expect
  gradients of zeros for them.
- Ambient autocast covers the forward pass only: the backward pass runs outside of the autocast
  block, as PyTorch asks.
- While tracing, global module hooks record which module each operator belongs to.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from graphs.capture.as_eager import Guard, eager_branches, eager_kernels, refuse_fast_path
from graphs.capture.filled_once import filled_once, put_meanwhile
from graphs.capture.generation_cache import no_cache
from graphs.capture.opaque import OpaquePart, Planned, StandIn, bind, refuse_most, with_opaque_parts
from graphs.capture.refuse import (
    HeldTensor,
    SideEffectError,
    attributes_unchanged,
    refuse_hooks,
    refuse_overlapping,
    refuse_parametrization_cache,
)
from graphs.capture.same_steps import Recorded, same_steps
from graphs.capture.shell import Shell

TRACING = threading.RLock()
"""Held while tracing: what a trace patches (operators' kernels, branches of libraries, hooks of all
modules, AOTAutograd's settings) is process-wide, so threads take turns."""

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

    kind: "parameter", "buffer", "input" or "tangent".
    name: the parameter's or buffer's path, or "input.3", "tangent.0".
    index: among its kind.
    """

    kind: str
    name: str
    index: int

    @property
    def title(self) -> str:
        """For messages: "buffer 'norm.running_mean'"."""
        if self.kind in ("parameter", "buffer"):
            return f"{self.kind} {self.name!r}"
        return f"tensor {self.index} of the batch" if self.kind == "input" else self.name


@dataclass(frozen=True)
class Capture:
    """The joint fx graph and the meaning of its inputs and outputs.

    sources: placeholder -> where it comes from.
    outputs: fx nodes (or constants) of the model's flat outputs, in the order of `output_spec`.
    gradient_outputs: indices of the outputs that get a gradient.
    differentiable: indices of the outputs that require one, whether or not they get it.
    tangents: index of an output -> placeholder of its gradient.
    gradients: placeholder of a parameter or batch tensor -> fx node of its gradient.
    mutations: placeholder -> fx node of its new value.
    guards: values that the module read; a call with other values needs another program.
    held: tensors in plain attributes of the module, which are constants of the program.
    filled: those that the module's first call puts there.
    opaque: modules that cannot be traced; each call is one forward and one backward node.
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
    filled: tuple[HeldTensor, ...] = ()
    opaque: tuple[OpaquePart, ...] = ()

    def copy(self) -> Capture:
        """The same with a graph of its own, which may be changed; nodes have the same names."""
        graph = torch.fx.Graph()
        new: dict[torch.fx.Node, torch.fx.Node] = {}
        graph.output(graph.graph_copy(self.graph, new))

        def of(item: Any) -> Any:
            return new[item] if isinstance(item, torch.fx.Node) else item

        def both(nodes: Mapping[Any, Any]) -> dict[Any, Any]:
            return {of(key): of(value) for key, value in nodes.items()}

        return replace(
            self,
            graph=graph,
            sources=both(self.sources),
            outputs=tuple(map(of, self.outputs)),
            tangents=both(self.tangents),
            gradients=both(self.gradients),
            mutations=both(self.mutations),
        )


@one_at_a_time
def capture(
    model: nn.Module,
    call: Call,
    *,
    device: torch.device | None,
    choose: Callable[[Any], tuple[int, ...]],
    planned: Planned = (),
) -> Capture:
    """Capture forward and backward of `model` called with `call`.

    device: of the fake tensors (None: that of the real ones).
    choose: flat model output -> indices of the outputs that get a gradient.
    planned: the opaque parts of a plan for this step.
    Raises TraceError with the reason.
    """

    def traced(standing: Sequence[StandIn]) -> Capture:
        def run() -> Capture:
            return _captured(model, call, standing, device=device, choose=choose)

        captured, filled = _with_filled(model, call, device, run, standing)
        return replace(captured, filled=filled)

    captured, opaque = with_opaque_parts(model, call, device, traced, planned=planned)
    refuse_most(captured.graph, opaque)
    return replace(captured, opaque=opaque)


def _captured(
    model: nn.Module,
    call: Call,
    standing: Sequence[StandIn],
    *,
    device: torch.device | None,
    choose: Callable[[Any], tuple[int, ...]],
) -> Capture:
    shell = Shell(model, call, choose=choose, device=device, standing=standing)
    # The cache of results on fake tensors ignores storage offsets: without this, sizes would depend
    # on what this process has traced before.
    FakeTensorMode.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(eager_kernels(device or torch.device("cpu")))
        stack.enter_context(_module_paths(model))
        # `backward()` is called after the autocast context has ended.
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        stack.enter_context(_tracing(model, standing))
        refuse_parametrization_cache(model)
        with attributes_unchanged(model):
            joint = aot_export_joint_with_descriptors(stack, shell, tuple(shell.batch))
        bind(joint.graph_module.graph, standing)
        shell.mode.read.refuse_hidden(call.rest)
        return _read(joint, shell)


@one_at_a_time
def fake_output(model: nn.Module, call: Call, *, device: torch.device | None) -> Any:
    """What the model returns for this call, on fake tensors; nothing is recorded."""

    def traced(standing: Sequence[StandIn]) -> Any:
        def run() -> Any:
            shell = _shell(model, call, device, standing)
            with _tracing(model, standing), attributes_unchanged(model), shell.mode:
                return shell.call(shell.batch)

        return _with_filled(model, call, device, run, standing)[0]

    output, _ = with_opaque_parts(model, call, device, traced)
    return output


def _with_filled(
    model: nn.Module,
    call: Call,
    device: torch.device | None,
    run: Callable[[], _R],
    standing: Sequence[StandIn],
) -> tuple[_R, tuple[HeldTensor, ...]]:
    """What `run` returns; where it fails, once more with the attributes that a call fills."""
    try:
        return run(), ()
    except TraceError:
        shell = _shell(model, call, device, standing)
        first = Recorded(shell)
        filled: tuple[HeldTensor, ...] = ()
        with contextlib.suppress(TraceError), _tracing(model, standing):
            filled = filled_once(model, shell.mode, first.run)
        if not filled:
            raise
    with put_meanwhile(model, filled):
        result = run()
        later = Recorded(_shell(model, call, device, standing))
        with _tracing(model, standing), attributes_unchanged(model), later.shell.mode:
            later.run()
    if not same_steps(first.steps, later.steps):
        where, attribute = filled[0].module or type(model).__name__, filled[0].attribute
        raise TraceError(
            f"the first call of {type(model).__name__}, which fills the attribute {attribute!r} of "
            f"{where!r}, computes something else than later calls do; a plan is for one sequence "
            "of operators. Call the model once before it is planned, or fill the attribute in "
            "__init__"
        )
    return result, filled


def _shell(
    model: nn.Module, call: Call, device: torch.device | None, standing: Sequence[StandIn]
) -> Shell:
    """For a forward pass alone."""
    return Shell(model, call, choose=lambda _output: (), device=device, standing=standing)


@contextlib.contextmanager
def _tracing(model: nn.Module, standing: Sequence[StandIn]) -> Iterator[None]:
    """Every error inside becomes a TraceError that says where in the user's code it arose.

    standing: for modules that are not traced.
    """
    with eager_branches(), refuse_fast_path(), no_cache(model):
        try:
            refuse_hooks(model, but=[each.module for each in standing])
            yield
        except TraceError:
            raise
        except Exception as error:
            raise _refused(model, error) from error


def _read(joint: Any, shell: Shell) -> Capture:
    """Translate AOTAutograd's descriptors into a `Capture`."""
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
            raise TraceError(f"an output of kind {type(desc).__name__} is not supported")
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
        guards=tuple(shell.mode.guards),
        held=shell.mode.read.held_by(shell.model),
    )


def _refuse_shared(outputs: list[Any], chosen: tuple[int, ...]) -> None:
    """Raise TraceError where an output that gets a gradient shares its storage."""
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
    """Raise TraceError where a written tensor shares memory with another that the step reads."""
    state = shell.state
    tensors: dict[Any, torch.Tensor] = {}
    titles: dict[Any, str] = {}
    for node, source in sources.items():
        if source.kind != "tangent":
            is_input = source.kind == "input"
            tensors[node] = shell.batch_given[source.index] if is_input else state[source.name]
            titles[node] = source.title
    for index, tensor in enumerate(shell.mode.read.tensors):
        tensors[index], titles[index] = tensor, "a tensor that forward reads besides its arguments"
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
            # a gradient would arrive for something that is not an output of its own
            written = getattr(desc.output, "mutated_input", None)
            if isinstance(written, descriptors.ParamAOTInput):
                raise TraceError(
                    f"forward changes parameter {shell.path(written.target)!r} in place (clamp_, "
                    "copy_, .data, max_norm of nn.Embedding); change it outside of forward, before "
                    "the step"
                )
            raise TraceError("outputs of the model share memory; return clones of them")
        return Source("tangent", f"tangent.{desc.output.idx}", desc.output.idx)
    raise TraceError(f"an input of kind {type(desc).__name__} is not supported")


@contextlib.contextmanager
def _module_paths(model: nn.Module) -> Iterator[None]:
    """Record the path of the running module of `model` in each fx node's meta."""
    paths = {module: name for name, module in model.named_modules()}
    entered: list[contextlib.ExitStack] = []
    tracing = threading.get_ident()

    def before(module: nn.Module, _args: Any) -> None:
        if threading.get_ident() != tracing:  # another thread runs a step meanwhile
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


_READS_VALUES = "forward reads values that the step computes"
_READS_VALUES_ADVICE = (
    " (an `if` on a tensor, .item(), int(), indexing by a computed mask), so that each step could "
    "run other operators; a plan is for one sequence. Use torch.where or multiply by a mask, or "
    "decide by values of the batch or of buffers, which may be read"
)


def _refused(model: nn.Module, error: Exception) -> TraceError:
    """In one line: what failed, and where in the user's code."""
    name = type(model).__name__
    if isinstance(error, SideEffectError):
        why = f"{name} cannot be planned: {error}"
        return TraceError(why, runs_in_eager=True, short=str(error))
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    what, advice = f"{type(error).__name__}: {lines[0] if lines else 'no message'}", ""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        what, advice = _READS_VALUES, _READS_VALUES_ADVICE
    place = ""
    frame = error.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        ours = Path(path).is_relative_to(Path(__file__).parents[1])
        if "/torch/" not in path and not ours and not path.startswith("<"):
            place = f" ({path}, line {frame.tb_lineno})"
        frame = frame.tb_next
    why = f"{name} cannot be traced{place}: {what}{advice}"
    return TraceError(why, runs_in_eager=True, short=f"{what}{place}")
