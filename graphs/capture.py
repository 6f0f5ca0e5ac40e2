"""From a module and a batch to one fx graph of the whole step, forward and backward, on paper.

AOTAutograd's joint export records every operator that the forward pass and autograd run, with
mutations turned into outputs (functionalised). Everything happens on fake tensors: no weights, no
batch and no activation is ever allocated, and the module is left as it was.

What is done to make that true for modules as people write them:

- Parameters and buffers are handed in deduplicated (tied weights otherwise count twice), through
  `torch.func.functional_call` on a shell that owns the fake ones.
- What depends on the batch and on buffers alone may be looked at (`graphs.known_values`): the
  branches are those of eager mode, and what was seen is kept beside the program.
- Outputs that get no gradient are detached inside, so that the backward pass does not expect
  zeros as large as they are.
- Ambient autocast is on for the forward pass alone: the backward pass runs after its block, as
  PyTorch asks, where operators take the types that they get.
- Modules call global hooks, for the time of the trace only, that note the path of the module which
  an operator belongs to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.traceback import annotate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.autocast_casts import casts_once
from graphs.call import HOLE, Call, TraceError
from graphs.eager_kernels import eager_kernels
from graphs.held_tensors import HeldTensor
from graphs.known_values import Guard, KnowingMode, Leaf
from graphs.library_branches import eager_branches
from graphs.side_effects import (
    SideEffectError,
    attributes_unchanged,
    buffers_of,
    random_states_untouched,
    refuse_hooks,
    refuse_replaced_buffers,
)


@dataclass(frozen=True)
class Source:
    """Where an input of the joint graph comes from.

    kind: "parameter", "buffer", "input" or "tangent". name: the parameter's or buffer's path, or
    "input.3", "tangent.0". index: among its kind.
    """

    kind: str
    name: str
    index: int


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
    output_spec: pytree.TreeSpec
    gradient_outputs: tuple[int, ...]
    differentiable: tuple[int, ...]
    tangents: Mapping[int, torch.fx.Node]
    gradients: Mapping[torch.fx.Node, torch.fx.Node]
    mutations: Mapping[torch.fx.Node, torch.fx.Node]
    guards: tuple[Guard, ...]
    held: tuple[HeldTensor, ...]


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
    shell = _Shell(model, call, choose=choose, device=device)
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
            with attributes_unchanged(model):
                joint = aot_export_joint_with_descriptors(stack, shell, tuple(shell.batch))
        except TraceError:
            raise
        except SideEffectError as error:
            raise _has_side_effect(model, error) from error
        except Exception as error:
            raise TraceError(_reason(model, error)) from error
        return _read(joint, shell)


def fake_output(model: nn.Module, call: Call, *, device: torch.device | None) -> Any:
    """What the model returns for this call, on fake tensors, without recording anything."""
    shell = _Shell(model, call, choose=lambda _output: (), device=device)
    with eager_branches(), shell.mode:
        try:
            return shell.call(shell.batch)
        except SideEffectError as error:
            raise _has_side_effect(model, error) from error
        except Exception as error:
            raise TraceError(_reason(model, error)) from error


class _Forward(nn.Module):
    """Calls the model's forward and not the model: its own hooks run around the planned step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = buffers_of(self.inner)
        with random_states_untouched(), _InPlaceNoted():
            output = self.inner.forward(*args, **kwargs)
        refuse_replaced_buffers(before, self.inner)
        return output


class _Shell(nn.Module):
    """Owns fake copies of a module's tensors and calls the module with them."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        *,
        choose: Callable[[Any], tuple[int, ...]],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self._outside = (model, call, choose)  # in a tuple: not registered as a submodule
        self._parameter_names: list[str] = []
        self._buffer_names: list[str] = []
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self.spec: pytree.TreeSpec | None = None
        self.chosen: tuple[int, ...] = ()
        self.flat_outputs: list[Any] = []
        self.differentiable: tuple[int, ...] = ()
        self.mode = KnowingMode(_leaves(model, call))
        with self.mode:
            for name, parameter in model.named_parameters():
                fake = nn.Parameter(_fake(parameter, device), requires_grad=parameter.requires_grad)
                self.register_parameter(f"p{len(self._parameter_names)}", fake)
                self._parameter_names.append(name)
            for name, buffer in model.named_buffers():
                fake_buffer = self.mode.set_leaf(_fake(buffer, device), Leaf("buffer", name))
                self.register_buffer(f"b{len(self._buffer_names)}", fake_buffer)
                self._buffer_names.append(name)
            self.batch = [
                self.mode.set_leaf(_fake(tensor, device), Leaf("input", index)).requires_grad_(
                    tensor.requires_grad
                )
                for index, tensor in enumerate(call.tensors)
            ]

    @property
    def model(self) -> nn.Module:
        return self._outside[0]

    def path(self, target: str) -> str:
        """The model's name of the shell's parameter or buffer."""
        names = self._parameter_names if target[0] == "p" else self._buffer_names
        return names[int(target[1:])]

    def call(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The model's output for the shell's parameters and these tensors."""
        model, call, _ = self._outside
        own: dict[torch.Tensor, torch.Tensor]
        own = {p: getattr(self, f"p{i}") for i, p in enumerate(model.parameters())}
        own |= {b: getattr(self, f"b{i}") for i, b in enumerate(model.buffers())}
        # Every place of every module once. `tie_weights=True` names a place once for each name of
        # its module, and what it puts back there at the end is the stand-in of the time before.
        state = {
            f"inner.{path}.{name}" if path else f"inner.{name}": own[tensor]
            for path, module in model.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        args, kwargs = call.arguments(tensors)
        forward = _Forward(model)
        return torch.func.functional_call(forward, state, args, kwargs, tie_weights=False)

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        leaves = [*self.parameters(), *tensors]
        with casts_once(leaves, cache_enabled=self._cache_enabled):
            output = self.call(tensors)
        flat, self.spec = pytree.tree_flatten(output)
        for item in flat:
            if not isinstance(item, torch.Tensor | int | float | bool | str | None):
                raise TraceError(
                    f"the model returns an object of type {type(item).__name__}, which hides its "
                    "tensors; return tensors, tuples, lists or dicts (a model of transformers: set "
                    "model.config.use_cache = False for training)"
                )
        self.chosen = self._outside[2](output)
        self.flat_outputs = [HOLE if isinstance(item, torch.Tensor) else item for item in flat]
        self.differentiable = tuple(
            index
            for index, item in enumerate(flat)
            if isinstance(item, torch.Tensor) and item.requires_grad
        )
        return [
            item if not isinstance(item, torch.Tensor) or i in self.chosen else item.detach()
            for i, item in enumerate(flat)
            if isinstance(item, torch.Tensor)
        ]


def leaves_of(model: nn.Module, call: Call) -> dict[Leaf, torch.Tensor]:
    """The tensors of a call whose values a module may look at; not parameters."""
    leaves: dict[Leaf, torch.Tensor]
    leaves = {Leaf("buffer", name): buffer for name, buffer in model.named_buffers()}
    return leaves | {Leaf("input", i): tensor for i, tensor in enumerate(call.tensors)}


def _leaves(model: nn.Module, call: Call) -> dict[Leaf, torch.Tensor]:
    """Those that have values: neither fake nor on the meta device."""
    return {
        leaf: tensor
        for leaf, tensor in leaves_of(model, call).items()
        if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
    }


def _fake(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """An empty tensor of the same size, strides and type (called under a fake mode)."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) and not isinstance(tensor, nn.Parameter):
        name = type(tensor).__name__
        if name != "FakeTensor":
            raise TraceError(f"tensors of type {name} cannot be planned for yet")
    if tensor.layout != torch.strided:
        raise TraceError(f"a tensor of layout {tensor.layout} cannot be planned for; use strided")
    target = device if device is not None else tensor.device
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=target, requires_grad=False
    )


def _read(joint: Any, shell: _Shell) -> Capture:
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


def _source(desc: Any, shell: _Shell) -> Source:
    if isinstance(desc, descriptors.ParamAOTInput):
        return Source("parameter", shell.path(desc.target), int(desc.target[1:]))
    if isinstance(desc, descriptors.BufferAOTInput):
        return Source("buffer", shell.path(desc.target), int(desc.target[1:]))
    if isinstance(desc, descriptors.PlainAOTInput):
        return Source("input", f"input.{desc.idx}", desc.idx)
    if isinstance(desc, descriptors.TangentAOTInput):
        if not isinstance(desc.output, descriptors.PlainAOTOutput):
            raise TraceError("outputs of the model share memory; return clones of them")
        return Source("tangent", f"tangent.{desc.output.idx}", desc.output.idx)
    raise TraceError(f"an input of kind {type(desc).__name__} cannot be planned for yet")


class _InPlaceNoted(TorchDispatchMode):
    """Write into an fx node's meta that the module's operator overwrites its first argument.

    The graph itself has lost that: it is functional.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = next(iter(func._schema.arguments), None)
        alias = None if first is None else first.alias_info
        if alias is None or not alias.is_write:
            return func(*args, **(kwargs or {}))
        with annotate({"in_place": True}):
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _module_paths(model: nn.Module) -> Iterator[None]:
    """Write the path of the running module of `model` into each fx node's meta."""
    paths = {module: name for name, module in model.named_modules()}
    entered: list[contextlib.ExitStack] = []

    def before(module: nn.Module, _args: Any) -> None:
        stack = contextlib.ExitStack()
        if module in paths:
            stack.enter_context(annotate({"module_path": paths[module]}))
        entered.append(stack)

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        if entered:
            entered.pop().close()

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


_WAY_OUT = (
    ". What cannot be traced can be planned by submodules: scheduler_runtime.fallback.plan_chain"
)


def _has_side_effect(model: nn.Module, error: SideEffectError) -> TraceError:
    return TraceError(f"{type(model).__name__} cannot be planned: {error}{_WAY_OUT}")


_LOOKED_AT = (DataDependentOutputException, DynamicOutputShapeException)
_LOOKS = (
    "forward looks at numbers that the step computes (an `if` on a tensor, .item(), int(), a "
    "selection by a computed mask), so that each step could be another one; a plan is for one. "
    "Select with torch.where or by multiplying with a mask, or decide by what comes with the batch "
    "(the batch and the buffers may be looked at)"
)


def _reason(model: nn.Module, error: Exception) -> str:
    """One line: what failed and where in the user's code."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    what = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if isinstance(error, _LOOKED_AT):
        what = _LOOKS
    place = ""
    frame = error.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        ours = Path(path).parent == Path(__file__).parent
        if "/torch/" not in path and not ours and not path.startswith("<"):
            place = f" ({path}, line {frame.tb_lineno})"
        frame = frame.tb_next
    return f"{type(model).__name__} cannot be traced{place}: {what}{_WAY_OUT}"
