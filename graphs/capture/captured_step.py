"""The result of tracing one step: the joint graph, and the meaning of its inputs and outputs.

AOTAutograd describes each input and output of the graph that it exports (this is parameter 3, this
is the gradient of input 0). `read_joint` translates these descriptions into a `Capture`. It refuses
steps that cannot be planned: outputs with a gradient that are inputs, inputs that the backward pass
writes, and written inputs that overlap with others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch.utils import _pytree as pytree

from graphs.capture.as_eager import Guard, Recipe
from graphs.capture.filled_once import FilledAttribute
from graphs.capture.left_behind import LeftAttribute
from graphs.capture.opaque import OpaquePart
from graphs.capture.refuse import HeldTensor, refuse_overlapping
from graphs.capture.shared_outputs import remove_markers, title
from graphs.capture.shell import Shell
from graphs.capture.tensor_parallel import has_distributed, rewrite_for_local_parts
from graphs.model_calls import HOLE, TraceError, local_part, nested, storage_key


@dataclass(frozen=True)
class Source:
    """Where an input of the joint graph comes from.

    kind: "parameter", "buffer", "input" or "tangent".
    name: the parameter's or buffer's path, or "input.3", "tangent.0".
    index: position among the inputs of its kind.
    """

    kind: str
    name: str
    index: int

    @property
    def title(self) -> str:
        """The name for messages: "buffer 'norm.running_mean'"."""
        if self.kind in ("parameter", "buffer"):
            return f"{self.kind} {self.name!r}"
        return f"tensor {self.index} of the batch" if self.kind == "input" else self.name


@dataclass(frozen=True)
class Capture:
    """The joint fx graph and the meaning of its inputs and outputs.

    graph: forward and backward, functionalised.
    module: the GraphModule of AOTAutograd, which holds the graph's constants.
    sources: placeholder -> where it comes from.
    outputs: fx nodes (or constants) of the model's flat outputs, in the order of `output_spec`;
        after them the checks of computed values (`graphs.capture.as_eager.checked_values`).
    output_spec: structure of the model's output.
    gradient_outputs: indices of the outputs that get a gradient.
    differentiable: indices of the outputs that require a gradient, whether or not they get one.
    tangents: index of an output -> placeholder of its gradient.
    gradients: placeholder of a parameter or batch tensor -> fx node of its gradient.
    mutations: placeholder -> fx node of its new value.
    guards: values that the module read; a call with other values needs another program.
    held: tensors in plain attributes of the module, which are constants of the program.
    filled: attributes that each of the module's calls sets to the same value.
    left: attributes in which forward leaves tensors. If there are any, the outputs are those of the
        pair (the model's output, a list of what is left in each of them).
    opaque: modules that cannot be traced; each call is one forward and one backward node.
    gradient_specs: placeholder of a distributed parameter -> how DTensor places its gradient.
    reads: what the module read, in order; some of it is the same in every call.
    differentiated: paths of modules that take part in gradients that forward takes itself
        (`graphs.capture.differentiated`).
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
    filled: tuple[FilledAttribute, ...] = ()
    left: tuple[LeftAttribute, ...] = ()
    opaque: tuple[OpaquePart, ...] = ()
    gradient_specs: Mapping[torch.fx.Node, Any] = field(default_factory=dict)
    reads: tuple[Recipe, ...] = ()
    differentiated: tuple[str, ...] = ()

    @property
    def buffer_inputs(self) -> dict[str, torch.fx.Node]:
        """Path of a buffer -> its placeholder."""
        return {s.name: node for node, s in self.sources.items() if s.kind == "buffer"}

    @property
    def has_checks(self) -> bool:
        """Whether the program checks values that it computes."""
        return len(self.outputs) > self.output_spec.num_leaves

    def copy(self) -> Capture:
        """The same capture with its own copy of the graph, whose nodes have the same names."""
        graph = torch.fx.Graph()
        new: dict[torch.fx.Node, torch.fx.Node] = {}
        graph.output(graph.graph_copy(self.graph, new))

        def new_node(item: Any) -> Any:
            return new[item] if isinstance(item, torch.fx.Node) else item

        def map_nodes(nodes: Mapping[Any, Any]) -> dict[Any, Any]:
            return {new_node(key): new_node(value) for key, value in nodes.items()}

        return replace(
            self,
            graph=graph,
            sources=map_nodes(self.sources),
            outputs=tuple(map(new_node, self.outputs)),
            tangents=map_nodes(self.tangents),
            gradients=map_nodes(self.gradients),
            mutations=map_nodes(self.mutations),
            gradient_specs=map_nodes(self.gradient_specs),
        )


def read_joint(joint: Any, shell: Shell) -> Capture:
    """Translate AOTAutograd's exported graph and its descriptors into a `Capture`.

    joint: what `aot_export_joint_with_descriptors` returned.
    shell: the module that was exported.
    Raises TraceError for steps that cannot be planned.
    """
    module: torch.fx.GraphModule = joint.graph_module
    if has_distributed(shell.model):
        rewrite_for_local_parts(module.graph)
    sources: dict[torch.fx.Node, Source] = {}
    by_desc: dict[Any, torch.fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        by_desc[desc] = node
        sources[node] = _source(desc, shell.paths)
    output_node = module.graph.output_node()
    remove_markers(module.graph, [n for n, source in sources.items() if source.kind == "tangent"])
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
    # AOTAutograd numbers only the tensors among the outputs, and after them the checks of values.
    positions = [index for index, item in enumerate(shell.flat_outputs) if item is HOLE]
    outputs = list(shell.flat_outputs)
    n_tensors = len(positions)
    for index, value in flat.items():
        if index < n_tensors:
            outputs[positions[index]] = value
    outputs += [value for index, value in sorted(flat.items()) if index >= n_tensors]
    tangents = {
        positions[sources[node].index]: node for node in sources if sources[node].kind == "tangent"
    }
    if shell.spec is None:
        raise TraceError("the model was never called while it was traced")
    captured = Capture(
        graph=module.graph,
        module=module,
        sources=sources,
        outputs=tuple(outputs),
        output_spec=shell.spec,
        gradient_outputs=shell.gradient_outputs,
        differentiable=shell.differentiable,
        tangents=tangents,
        gradients=gradients,
        mutations=mutations,
        guards=tuple(shell.mode.guards),
        held=shell.mode.read_tensors.held_by(shell.model),
        gradient_specs={
            node: shell.gradient_specs[source.name]
            for node, source in sources.items()
            if source.kind == "parameter" and source.name in shell.gradient_specs
        },
        reads=tuple(shell.mode.reads),
        differentiated=shell.differentiated,
    )
    _refuse_unplannable(captured, shell)
    return captured


def _refuse_unplannable(captured: Capture, shell: Shell) -> None:
    """Raise TraceError for outputs and changes of inputs that a planned step cannot have."""
    sources = captured.sources
    inputs = {node: source for node, source in sources.items() if source.kind != "tangent"}
    input_storages = {storage_key(node.meta["val"]) for node in inputs}
    nodes = {i: item for i, item in enumerate(captured.outputs) if isinstance(item, torch.fx.Node)}
    n_sharing = Counter(storage_key(node.meta["val"]) for node in nodes.values())
    for index in captured.gradient_outputs:
        node, storage = nodes[index], storage_key(nodes[index].meta["val"])
        if node.op == "placeholder" or (storage in input_storages and n_sharing[storage] > 1):
            raise TraceError(
                f"{title(index, captured.output_spec)}, which gets a gradient, is one of the "
                "model's inputs or parameters, or a view of one; return a clone of it"
            )
    # All changes of inputs are outputs, except those by the backward pass: a `copy_` in the graph.
    copies = captured.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    for node in copies:
        if (source := sources.get(node.args[0])) is not None:
            raise TraceError(
                f"the backward pass of an autograd.Function or a hook changes {source.title} in "
                "place, which a planned step would not do; change it in forward, or after "
                "backward()",
                runs_in_eager=True,
            )
    state = shell.state
    tensors: dict[Any, torch.Tensor] = {
        node: local_part(
            shell.real_batch[source.index] if source.kind == "input" else state[source.name]
        )
        for node, source in inputs.items()
    }
    titles: dict[Any, str] = {node: source.title for node, source in inputs.items()}
    for index, tensor in enumerate(shell.mode.read_tensors.tensors):
        tensors[index], titles[index] = tensor, "a tensor that forward reads besides its arguments"
    refuse_overlapping(tensors, captured.mutations, titles)


def _source(desc: Any, paths: Mapping[str, str]) -> Source:
    """Translate AOTAutograd's descriptor of an input.

    paths: the shell's name of a parameter or buffer -> the model's.
    """
    if isinstance(desc, descriptors.ParamAOTInput):
        return Source("parameter", paths[desc.target], int(desc.target[1:]))
    if isinstance(desc, descriptors.BufferAOTInput):
        return Source("buffer", paths[desc.target], int(desc.target[1:]))
    if isinstance(desc, descriptors.PlainAOTInput):
        return Source("input", f"input.{desc.idx}", desc.idx)
    if isinstance(desc, descriptors.TangentAOTInput):
        if isinstance(desc.output, descriptors.PlainAOTOutput):
            return Source("tangent", f"tangent.{desc.output.idx}", desc.output.idx)
        # The gradient would be that of a written input, or of a tensor that outputs are views of.
        written = getattr(desc.output, "mutated_input", None)
        if isinstance(written, descriptors.ParamAOTInput):
            raise TraceError(
                f"forward changes parameter {paths[written.target]!r} in place (clamp_, copy_, "
                ".data, max_norm of nn.Embedding); change it outside of forward, before the step. "
                "If only the first call does it (an initialization from data), call the model once "
                "before planning"
            )
        raise TraceError("outputs of the model share memory; return clones of them")
    raise TraceError(f"an input of kind {type(desc).__name__} is not supported")
