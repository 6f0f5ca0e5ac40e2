"""From the joint fx graph to a cost/memory Graph, and the way back to the fx nodes.

Most fx nodes are views, `getitem` and `detach`: they allocate nothing, so they are folded into the
storage that they point at. What remains are the operators that allocate: the nodes of the Graph.
Its tensors are storages; there are no aliases left. A mutated buffer becomes a `copy_` node at the
end of the forward pass, which runs once.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from graphs.calls import TraceError
from graphs.capture.as_eager import own_generator
from graphs.capture.joint_graph import Capture
from graphs.graph import Kind, Node, Phase, Tensor

CPU_RANDOM_STATE_BYTES = 5056
"""What torch.get_rng_state() takes on the CPU; on CUDA 16 bytes on the host."""


class NodeCost(Protocol):
    """Seconds and workspace bytes of one call (made by graphs.costs.models)."""

    @property
    def time_s(self) -> float: ...
    @property
    def workspace_bytes(self) -> int: ...


@dataclass
class Layout:
    """The step as nodes and tensors, and what each of them is in the fx graph.

    calls: node name -> the fx node that it runs. storage: fx node -> the tensor it lives on (for
    the first tensor of a multi-output call there is none: its getitems have one each).
    updates: name of a copy_ node -> (placeholder that is written, fx node of the new value).
    gradients: placeholder of a leaf -> the tensor that holds its gradient, one for each.
    copies: name of a clone node -> fx node of the gradient that it copies.
    in_place: the forward nodes whose operator overwrites its first argument in eager mode.
    functions: the names of the nodes of each function of autograd's backward pass, by its number.
    sums: the backward nodes that add up gradients of one tensor, between functions.
    """

    nodes: list[Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    calls: dict[str, torch.fx.Node] = field(default_factory=dict)
    storage: dict[torch.fx.Node, str] = field(default_factory=dict)
    updates: dict[str, tuple[torch.fx.Node, torch.fx.Node]] = field(default_factory=dict)
    gradients: dict[torch.fx.Node, str] = field(default_factory=dict)
    copies: dict[str, torch.fx.Node] = field(default_factory=dict)
    in_place: list[str] = field(default_factory=list)
    functions: dict[int, list[str]] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)


def extract(captured: Capture, *, cost: Callable[[torch.fx.Node], NodeCost]) -> Layout:
    """Fold views into storages and list what remains. Raises TraceError for what has no size."""
    return _Extraction(captured, cost).run()


class _Extraction:
    def __init__(self, captured: Capture, cost: Callable[[torch.fx.Node], NodeCost]) -> None:
        self.captured = captured
        self.cost = cost
        self.layout = Layout()
        self.sizes: dict[str, int] = {}
        self.kinds: dict[str, Kind] = {}
        self._names: dict[int, str] = {}  # storage identity -> tensor name
        self._alive: list[Any] = []  # keeps the storages, so that identities stay unique
        self._n_random = 0

    def run(self) -> Layout:
        for node in self.captured.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._resident(node)
        updates_done = False
        for node in self.captured.graph.nodes:
            if node.op != "call_function":
                continue
            if not updates_done and _is_backward(node):
                self._updates()
                updates_done = True
            self._call(node)
        if not updates_done:
            self._updates()
        self._gradients()
        self._label()
        self.layout.tensors.extend(
            Tensor(name, self.sizes[name], self.kinds[name]) for name in self.sizes
        )
        return self.layout

    def _resident(self, node: torch.fx.Node) -> None:
        source = self.captured.sources.get(node)
        value = node.meta.get("val")
        if value is None and node.op == "get_attr":
            value = getattr(self.captured.module, str(node.target))
        if not isinstance(value, torch.Tensor):
            return
        kind: Kind = source.kind if source else "buffer"  # type: ignore[assignment]
        self._place(node, value, node.name, kind)

    def _place(self, node: torch.fx.Node, value: torch.Tensor, name: str, kind: Kind) -> str:
        """The tensor that holds the value; a new one called `name` when the storage is new."""
        storage = value.untyped_storage()
        known = self._names.get(storage._cdata)
        if known is None:
            known = name
            self._names[storage._cdata] = name
            self._alive.append(storage)
            self.sizes[name] = _static_bytes(storage, node)
            self.kinds[name] = kind
        self.layout.storage[node] = known
        return known

    def _call(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            if isinstance(value, torch.Tensor):
                self._place(node, value, node.name, "activation")
            return
        values = list(value) if isinstance(value, list | tuple) else [value]
        made = self._made(node, values)
        if not made:
            return  # a view, or nothing at all
        inputs = tuple(
            dict.fromkeys(
                self.layout.storage[argument]
                for argument in _tensor_arguments(node)
                if argument in self.layout.storage
            )
        )
        if node.target is torch.ops.aten.mkldnn_rnn_layer.default:
            raise TraceError(
                "nn.LSTM runs as one opaque operator on the CPU, whose workspace exists inside "
                "autograd alone; write the cells as a loop (nn.LSTMCell), which can be scheduled"
            )
        if self._has_own_generator(node):
            raise own_generator(node.target)
        cost = self.cost(node)
        phase: Phase = "backward" if _is_backward(node) else "forward"
        self.layout.calls[node.name] = node
        self._note_eager(node, phase)
        self.layout.nodes.append(
            Node(
                name=node.name,
                op=str(node.target),
                inputs=inputs,
                outputs=tuple(made),
                time_s=cost.time_s,
                workspace_bytes=cost.workspace_bytes,
                phase=phase,
                recomputable=phase == "forward" and self._may_run_again(node, inputs),
                module=_module_path(node),
            )
        )

    def _note_eager(self, node: torch.fx.Node, phase: Phase) -> None:
        """What a functional graph of single operators does not tell of eager mode."""
        number = node.meta.get("seq_nr")
        if phase == "forward":
            if _custom(node).get("in_place"):
                self.layout.in_place.append(node.name)
        elif node.meta.get("is_gradient_acc"):
            self.layout.sums.append(node.name)
        elif number is not None:
            self.layout.functions.setdefault(number, []).append(node.name)

    def _made(self, node: torch.fx.Node, values: list[Any]) -> list[str]:
        """Names of the storages that the call allocates (none: it is a view)."""
        made = []
        single = isinstance(node.meta.get("val"), torch.Tensor)
        for index, item in enumerate(values):
            if not isinstance(item, torch.Tensor):
                continue
            if item.layout != torch.strided:
                layout = str(item.layout).removeprefix("torch.")
                raise TraceError(
                    f"{node.target} makes a tensor of layout {layout}, whose size depends on "
                    "numbers; a plan needs dense ones (nn.Embedding with sparse=False)"
                )
            name = node.name if single else f"{node.name}.{index}"
            known = self._names.get(item.untyped_storage()._cdata)
            if known is None:
                made.append(self._place(node, item, name, "activation"))
            elif single:
                self.layout.storage[node] = known
        if not single:
            self.layout.storage.pop(node, None)
        return made

    def _may_run_again(self, node: torch.fx.Node, inputs: tuple[str, ...]) -> bool:
        target = node.target
        if getattr(target, "namespace", "").startswith(("_c10d", "c10d")):
            return False  # a collective must run as often on every rank
        if is_random(node):
            device = _device_of(node)
            if device not in ("cpu", "cuda"):
                return False  # no way to replay its random numbers
            self._n_random += 1
        mutated = {self.layout.storage[placeholder] for placeholder in self.captured.mutations}
        return mutated.isdisjoint(inputs) or _ignores_running_statistics(node)

    def _has_own_generator(self, node: torch.fx.Node) -> bool:
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        constants = (
            getattr(self.captured.module, str(item.target), None)
            for item in leaves
            if isinstance(item, torch.fx.Node) and item.op == "get_attr"
        )
        return any(isinstance(item, torch.Generator) for item in (*leaves, *constants))

    def _updates(self) -> None:
        """The buffers change once, at the end of the forward pass."""
        for placeholder, new_value in self.captured.mutations.items():
            name = f"copy_to_{placeholder.name}"
            old, new = self.layout.storage[placeholder], self.layout.storage[new_value]
            if old == new:
                continue
            self.layout.updates[name] = (placeholder, new_value)
            self.layout.nodes.append(
                Node(
                    name=name,
                    op="aten.copy_.default",
                    inputs=(new, old),
                    outputs=(),
                    time_s=0.0,
                    phase="forward",
                    recomputable=False,
                )
            )

    def _gradients(self) -> None:
        """Each leaf's gradient gets a storage of its own, as in autograd.

        One that is expanded, shared with another gradient or part of something larger is copied.
        """
        layout = self.layout
        makers = {name: node.name for node in layout.nodes for name in node.outputs}
        copies: dict[str, list[Node]] = {}
        for placeholder, gradient in self.captured.gradients.items():
            storage, value = layout.storage[gradient], gradient.meta["val"]
            n_bytes = value.numel() * value.element_size()
            taken = storage in layout.gradients.values()
            if storage in makers and not taken and self.sizes[storage] == n_bytes:
                layout.gradients[placeholder] = storage
                self.kinds[storage] = "gradient"
                continue
            name = f"gradient_{placeholder.name}"
            layout.gradients[placeholder] = name
            layout.copies[name] = gradient
            self.sizes[name], self.kinds[name] = n_bytes, "gradient"
            copies.setdefault(makers.get(storage, ""), []).append(_clone(name, storage))
        if copies:
            of_inputs = copies.pop("", [])
            layout.nodes = [
                each for node in layout.nodes for each in (node, *copies.get(node.name, ()))
            ]
            layout.nodes += of_inputs

    def _label(self) -> None:
        """Name outputs for what they are, and count the random state."""
        layout = self.layout
        made = {name: i for i, node in enumerate(layout.nodes) for name in node.outputs}
        for value in self.captured.outputs:
            returned = layout.storage.get(value) if isinstance(value, torch.fx.Node) else None
            if returned is not None and returned in made and returned not in layout.outputs:
                layout.outputs.append(returned)
                self.kinds[returned] = "output"
                # The caller holds what the model returns: dropping it would free nothing.
                node = layout.nodes[made[returned]]
                layout.nodes[made[returned]] = dataclasses.replace(node, recomputable=False)
        layout.outputs.extend(n for n in layout.gradients.values() if n not in layout.outputs)
        if self._n_random and self._device() == "cpu":
            self.sizes["random_state"] = CPU_RANDOM_STATE_BYTES * self._n_random
            self.kinds["random_state"] = "buffer"

    def _device(self) -> str:
        return next((_device_of(node) for node in self.layout.calls.values()), "cpu")


def _clone(name: str, source: str) -> Node:
    return Node(
        name=name,
        op="aten.clone.default",
        inputs=(source,),
        outputs=(name,),
        time_s=0.0,
        phase="backward",
        recomputable=False,
    )


def is_random(node: torch.fx.Node) -> bool:
    """Whether the call draws from a random generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return not _is_attention_without_dropout(node)


_CUDA_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def _is_attention_without_dropout(node: torch.fx.Node) -> bool:
    """Fused attention on CUDA draws nothing then, whatever its tag says of all its calls."""
    if node.target not in _CUDA_ATTENTION:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("dropout_p", 0.0) == 0.0)


def _tensor_arguments(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    return (item for item in pytree.tree_leaves((node.args, node.kwargs)) if _is_node(item))


def _is_node(item: object) -> bool:
    return isinstance(item, torch.fx.Node)


def _ignores_running_statistics(node: torch.fx.Node) -> bool:
    """Training batch norm reads the running statistics only to write new ones, which are dropped.

    Its other outputs do not depend on them, so it may run again after they have changed.
    """
    target = node.target
    if target is torch.ops.aten._batch_norm_with_update_functional.default:
        return True
    if target is not torch.ops.aten._native_batch_norm_legit_functional.default:
        return False
    return node.args[5] is True


def _is_backward(node: torch.fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _module_path(node: torch.fx.Node) -> str:
    return str(_custom(node).get("module_path", ""))


def _custom(node: torch.fx.Node) -> dict[str, Any]:
    """What `graphs.capture.joint_graph` noted while the node was traced."""
    custom = node.meta.get("custom")
    return custom if isinstance(custom, dict) else {}


def _device_of(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    for item in pytree.tree_leaves(value):
        if isinstance(item, torch.Tensor):
            return item.device.type
    return "cpu"


def _static_bytes(storage: Any, node: torch.fx.Node) -> int:
    n_bytes = storage.nbytes()
    if not isinstance(n_bytes, int):
        raise TraceError(
            f"the size of {node.name} ({node.target}) depends on the data ({n_bytes}); a plan in "
            "bytes needs sizes that are known before the step"
        )
    return n_bytes
