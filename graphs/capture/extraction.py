"""Turns the joint fx graph into the nodes and tensors of a Graph, with the mapping to fx nodes.

Most fx nodes are views, `getitem` and `detach`: they allocate nothing, so they are folded into the
storage that they point at. The operators that allocate become the nodes of the Graph, and the
storages its tensors; no aliases are left. A mutated buffer becomes a `copy_` node at the end of the
forward pass, which runs once. If the model writes only a part of the buffer, the node may write
that part alone (`graphs.capture.buffer_writes`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphs.capture.buffer_writes import Write, part_writes
from graphs.capture.captured_step import Capture
from graphs.capture.gradient_copies import GradientCopy, copy_for, copy_node, is_kept
from graphs.capture.opaque import OpaqueForward
from graphs.capture.traced_calls import (
    VIEW_OF_SCATTER,
    annotations_of,
    is_backward,
    is_random,
)
from graphs.costs import Cost
from graphs.graph import RANDOM_STATE, Kind, Node, Phase, Tensor
from graphs.model_calls import TraceError, strided_like

CPU_RANDOM_STATE_BYTES = 5056
"""Size of torch.get_rng_state() on the CPU; on CUDA it is 16 bytes, on the host."""


@dataclass(frozen=True)
class Overwrite:
    """A call of an operator that writes its result into one of its arguments.

    target: the overload, or another function, that does so.
    argument: fx node of the overwritten argument.
    keyword: the name under which the argument is passed once more, such as "out" (None: the
        overload overwrites its first argument).
    """

    target: Callable[..., Any]
    argument: torch.fx.Node
    keyword: str | None


@dataclass
class Layout:
    """The step as nodes and tensors of a Graph, and what they are in the fx graph.

    nodes, tensors, outputs: as in Graph.
    calls: node name -> the fx node that it runs.
    storage: fx node -> its tensor (a multi-output call has none: its getitems have one each).
    updates: name of a node that writes a buffer -> what it writes.
    dtypes: tensor -> dtype of the value that allocated it, such as "float32".
    gradients: placeholder of a leaf -> the tensor that holds its gradient; all different.
    copies: name of a clone node -> the gradient that it copies.
    in_place: forward nodes whose operator overwrites its first argument in eager mode.
    module_calls: path of a module -> numbers of its calls in which forward nodes run.
    held_within_call: number of an eager operator's call that is traced as several operators (a
        recurrent cell or layer) -> the forward nodes of it that read tensors which eager mode holds
        until the call returns, and the last forward node of it.
    overwriting: name of a node that overwrites an input -> how it is called.
    functions: sequence number of an autograd function -> names of its backward nodes.
    sums: backward nodes that sum gradients of one tensor, between functions.
    """

    nodes: list[Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    calls: dict[str, torch.fx.Node] = field(default_factory=dict)
    storage: dict[torch.fx.Node, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    updates: dict[str, Write] = field(default_factory=dict)
    gradients: dict[torch.fx.Node, str] = field(default_factory=dict)
    copies: dict[str, GradientCopy] = field(default_factory=dict)
    in_place: list[str] = field(default_factory=list)
    module_calls: dict[str, set[int]] = field(default_factory=dict)
    held_within_call: dict[int, list[str]] = field(default_factory=dict)
    functions: dict[int, list[str]] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    overwriting: dict[str, Overwrite] = field(default_factory=dict)

    def storage_of(self, node: torch.fx.Node) -> str:
        """The tensor on which a node's value is stored; the node's own name if there is none.

        For a view with several outputs (split), that is the tensor which it is a view of.
        """
        stack = [node]
        while stack:
            each = stack.pop()
            if each in self.storage:
                return self.storage[each]
            stack.extend(each.all_input_nodes)
        return node.name


def extract(captured: Capture, *, cost: Callable[[torch.fx.Node], Cost]) -> Layout:
    """Fold views into storages, and list the nodes and tensors that remain.

    cost: fx node -> its time and workspace.
    Raises TraceError for tensors of unknown size.
    """
    return _Extraction(captured, cost).run()


class _Extraction:
    def __init__(self, captured: Capture, cost: Callable[[torch.fx.Node], Cost]) -> None:
        self.captured = captured
        self.cost = cost
        self.layout = Layout()
        self.sizes: dict[str, int] = {}
        self.kinds: dict[str, Kind] = {}
        self._names: dict[int, str] = {}  # address of a storage -> tensor name
        self._alive: list[Any] = []  # keeps the storages, so that addresses stay unique
        self._constants: set[str] = set()
        self._not_copyable: set[str] = set()
        self._n_random = 0
        self._part_writes = part_writes(captured)

    def run(self) -> Layout:
        for node in self.captured.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._add_resident(node)
        calls = [node for node in self.captured.graph.nodes if node.op == "call_function"]
        n_forward = next((i for i, node in enumerate(calls) if is_backward(node)), len(calls))
        for node in calls[:n_forward]:
            if (write := self._part_writes.writes.get(node)) is not None:
                self._name_storage(node.meta["val"], self.layout.storage[write.buffer])
                self._add_write(node.name, write)
            elif node not in self._part_writes.unneeded:
                self._add_call(node)
        # All other mutated buffers are written once, at the end of the forward pass.
        for placeholder, new_value in self.captured.mutations.items():
            if placeholder not in self._part_writes.buffers:
                self._add_write(f"copy_to_{placeholder.name}", Write(placeholder, (new_value,)))
        for node in calls[n_forward:]:
            self._add_call(node)
        self._separate_gradients()
        self._mark_outputs()
        self.layout.tensors.extend(
            Tensor(name, n_bytes, self.kinds[name], copyable=name not in self._not_copyable)
            for name, n_bytes in self.sizes.items()
        )
        return self.layout

    def _add_resident(self, node: torch.fx.Node) -> None:
        """Add the tensor of a placeholder or constant."""
        source = self.captured.sources.get(node)
        if node.op == "get_attr":
            value = getattr(self.captured.module, str(node.target))
        else:
            value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        kind: Kind = source.kind if source else "buffer"  # type: ignore[assignment]
        name = self._tensor_of(node, value, node.name, kind)
        if node.op == "get_attr":
            self._constants.add(name)

    def _tensor_of(self, node: torch.fx.Node, value: torch.Tensor, name: str, kind: Kind) -> str:
        """The tensor that holds the value; a new one called `name` if the storage is new."""
        storage = value.untyped_storage()
        known = self._names.get(storage._cdata)
        if known is None:
            known = name
            self._name_storage(value, name)
            n_bytes = storage.nbytes()
            if kind == "tangent":
                # A gradient has its output's strides but a storage of its own, while the storage of
                # the output of a CPU kernel may be larger (`as_eager.fake_kernels`).
                n_bytes = strided_like(value, "meta").untyped_storage().nbytes()
            if not isinstance(n_bytes, int):
                raise TraceError(
                    f"the size of {node.name} ({node.target}) depends on the data ({n_bytes}); "
                    "planning needs sizes that are known before the step"
                )
            self.sizes[name] = n_bytes
            self.kinds[name] = kind
            self.layout.dtypes[name] = str(value.dtype).removeprefix("torch.")
        self.layout.storage[node] = known
        return known

    def _name_storage(self, value: torch.Tensor, name: str) -> None:
        """Let views of the value count as views of the tensor called `name`."""
        storage = value.untyped_storage()
        self._names[storage._cdata] = name
        self._alive.append(storage)

    def _add_call(self, node: torch.fx.Node) -> None:
        """Add the node of an operator call, unless it allocates nothing."""
        value = node.meta.get("val")
        if node.target is operator.getitem:
            if isinstance(value, torch.Tensor):
                self._tensor_of(node, value, node.name, "activation")
            return
        values = list(value) if isinstance(value, list | tuple) else [value]
        allocated = self._allocate(node, values)
        if not allocated:
            return  # a view, or nothing at all
        storage = self.layout.storage
        read = (storage[each] for each in node.all_input_nodes if each in storage)
        inputs = tuple(dict.fromkeys(read))
        cost = self.cost(node)
        phase: Phase = "backward" if is_backward(node) else "forward"
        self.layout.calls[node.name] = node
        # Facts about eager mode that the functional graph of single operators does not show.
        annotations, number = annotations_of(node), node.meta.get("seq_nr")
        if phase == "forward":
            if annotations.get("in_place", node.target in VIEW_OF_SCATTER):
                self.layout.in_place.append(node.name)
            for path, module_call in annotations.get("module_calls", {}).items():
                self.layout.module_calls.setdefault(path, set()).add(module_call)
            if (call_number := annotations.get("runs_within")) is not None:
                self.layout.held_within_call.setdefault(call_number, []).append(node.name)
        elif node.meta.get("is_gradient_acc"):
            self.layout.sums.append(node.name)
        elif number is not None:
            self.layout.functions.setdefault(number, []).append(node.name)
        if isinstance(node.target, OpaqueForward):
            # Its autograd graph holds what it has saved, and the parameters.
            parameters = (name for name in inputs if self.kinds[name] == "parameter")
            self._not_copyable.update((allocated[-1], *parameters))
        self.layout.nodes.append(
            Node(
                name=node.name,
                op=str(node.target),
                inputs=inputs,
                outputs=tuple(allocated),
                time_s=cost.time_s,
                workspace_bytes=cost.workspace_bytes,
                phase=phase,
                recomputable=phase == "forward" and self._is_recomputable(node, inputs),
                module=str(annotations.get("module_path", "")),
            )
        )

    def _allocate(self, node: torch.fx.Node, values: list[Any]) -> list[str]:
        """Names of the storages that the call allocates; empty for a view."""
        allocated = []
        is_single = isinstance(node.meta.get("val"), torch.Tensor)
        for index, item in enumerate(values):
            if not isinstance(item, torch.Tensor):
                continue
            if item.layout != torch.strided:
                layout = str(item.layout).removeprefix("torch.")
                raise TraceError(
                    f"{node.target} makes a sparse tensor ({layout}), whose size depends on "
                    "values; planning needs dense ones: sparse=False in nn.Embedding and "
                    "nn.EmbeddingBag"
                )
            name = node.name if is_single else f"{node.name}.{index}"
            storage = item.untyped_storage()
            known = self._names.get(storage._cdata)
            if known is None and (known := self._viewed_constant(node)) is not None:
                self._name_storage(item, known)
            if known is None:
                allocated.append(self._tensor_of(node, item, name, "activation"))
            elif is_single:
                self.layout.storage[node] = known
        if not is_single:
            self.layout.storage.pop(node, None)
        return allocated

    def _viewed_constant(self, node: torch.fx.Node) -> str | None:
        """The constant that the call returns a view of, or None.

        In a trace each use of a constant has a fake tensor on a storage of its own, so the storage
        does not tell.
        """
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable:
            return None
        viewed = (
            self.layout.storage.get(value)
            for argument, value in zip(schema.arguments, node.args, strict=False)
            if argument.alias_info is not None and isinstance(value, torch.fx.Node)
        )
        return next((name for name in viewed if name in self._constants), None)

    def _is_recomputable(self, node: torch.fx.Node, inputs: tuple[str, ...]) -> bool:
        """Whether a forward node may be recomputed; counts random nodes along the way."""
        target = node.target
        if isinstance(target, OpaqueForward) and not target.recomputable:
            return False
        if is_random(node):
            if _device_of(node) not in ("cpu", "cuda"):
                return False  # its random numbers cannot be replayed
            self._n_random += 1
        mutated = {self.layout.storage[placeholder] for placeholder in self.captured.mutations}
        # Training batch norm reads the running statistics only to update them: its other outputs
        # can be recomputed after they have changed.
        aten = torch.ops.aten
        ignores_mutated = node.target is aten._batch_norm_with_update_functional.default or (
            node.target is aten._native_batch_norm_legit_functional.default and node.args[5] is True
        )
        return mutated.isdisjoint(inputs) or ignores_mutated

    def _add_write(self, name: str, write: Write) -> None:
        """Add the node of a write to a buffer, unless the new value is the buffer itself."""
        old = self.layout.storage[write.buffer]
        new = [self.layout.storage[value] for value in write.values]
        if old in new:
            return
        self.layout.updates[name] = write
        time_s = 0.0 if write.call is None else self.cost(write.call).time_s
        op = str(write.operator)
        self.layout.nodes.append(Node(name, op, (*new, old), (), time_s, recomputable=False))

    def _separate_gradients(self) -> None:
        """Give each leaf's gradient a storage of its own, as autograd does.

        A gradient that is expanded, shared, or part of a larger storage is copied by a new node,
        and so is one that does not have its parameter's strides.
        """
        layout = self.layout
        makers = {name: node.name for node in layout.nodes for name in node.outputs}
        # what eager mode copies, it copies once the function that made it has returned
        last_of = {name: names[-1] for names in layout.functions.values() for name in names}
        copies: dict[str, list[Node]] = {}
        for placeholder, gradient in self.captured.gradients.items():
            storage, n_bytes = layout.storage[gradient], int(gradient.meta["val"].nbytes)
            is_taken = storage in layout.gradients.values()
            # No copy if a node makes it, no other leaf has it, and it fills its storage.
            is_whole = storage in makers and not is_taken and self.sizes[storage] == n_bytes
            if is_whole and is_kept(self.captured, placeholder):
                layout.gradients[placeholder] = storage
                self.kinds[storage] = "gradient"
                continue
            name = f"gradient_{placeholder.name}"
            layout.gradients[placeholder] = name
            layout.copies[name] = copy_for(self.captured, placeholder)
            self.sizes[name], self.kinds[name] = n_bytes, "gradient"
            maker = makers.get(storage, "")
            after = last_of.get(maker, maker) if is_whole else maker
            copies.setdefault(after, []).append(copy_node(name, storage, gradient.meta["val"]))
        if copies:
            copies_of_inputs = copies.pop("", [])
            layout.nodes = [
                each for node in layout.nodes for each in (node, *copies.get(node.name, ()))
            ]
            layout.nodes += copies_of_inputs

    def _mark_outputs(self) -> None:
        """Mark the graph's outputs, and add a tensor for the random states that a plan keeps."""
        layout = self.layout
        maker_index = {name: i for i, node in enumerate(layout.nodes) for name in node.outputs}
        for index, value in enumerate(self.captured.outputs):
            tensor = layout.storage.get(value) if isinstance(value, torch.fx.Node) else None
            if tensor is not None and tensor in maker_index and tensor not in layout.outputs:
                layout.outputs.append(tensor)
                is_loss = index in self.captured.gradient_outputs and value.meta["val"].numel() == 1
                self.kinds[tensor] = "activation" if is_loss else "output"
                # The caller holds what the model returns: freeing it here would free no memory.
                node = layout.nodes[maker_index[tensor]]
                layout.nodes[maker_index[tensor]] = dataclasses.replace(node, recomputable=False)
        layout.outputs.extend(n for n in layout.gradients.values() if n not in layout.outputs)
        device = next((_device_of(node) for node in layout.calls.values()), "cpu")
        n_states = self._n_random + self.captured.has_checks  # one to restore if a check fails
        if n_states and device == "cpu":
            self.sizes[RANDOM_STATE] = CPU_RANDOM_STATE_BYTES * n_states
            self.kinds[RANDOM_STATE] = "buffer"


def _device_of(node: torch.fx.Node) -> str:
    values = pytree.tree_leaves(node.meta.get("val"))
    return next((item.device.type for item in values if isinstance(item, torch.Tensor)), "cpu")
