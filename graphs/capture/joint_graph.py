"""Traces a module and a batch to one fx graph of forward and backward, on fake tensors.

AOTAutograd's joint export records every operator that the forward pass and autograd run, with
mutations turned into outputs (functionalised). No weight, batch or activation is allocated, and the
module is unchanged afterwards.

What makes this work for modules as people write them:

- Parameters and buffers are passed in deduplicated (tied weights would count twice), through
  `torch.func.functional_call` on a shell that owns the fake ones.
- The module may read values that depend only on the batch and on buffers
  (`graphs.capture.as_eager.known_values`). So it takes the branches of eager mode, and the values
  that it reads are kept as guards of the program.
- Outputs that get no gradient are detached; otherwise the traced backward pass would take gradients
  for them, which would have to be zeros.
- Ambient autocast covers the forward pass only: the backward pass runs outside of the autocast
  block, as PyTorch recommends.
- While tracing, global module hooks record which module each operator belongs to.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.traceback import annotate

from graphs.capture.as_eager import caching_configs, eager_kernels, refuse_caches
from graphs.capture.captured_step import Capture, read_joint
from graphs.capture.checkpoints import call_checkpoints_directly
from graphs.capture.dispatch_keys import dispatch_keys_kept
from graphs.capture.eager_calls import EagerCalls
from graphs.capture.extraction import Layout
from graphs.capture.filled_once import attributes_filled
from graphs.capture.held_in_forward import EagerForward, held_with_dead
from graphs.capture.leaves_in_forward import DeadBackward, WholeStep, dead_backward, makes_leaves
from graphs.capture.left_behind import LeftBehind, refuse_read_state
from graphs.capture.opaque import Planned, StandIn, bind, refuse_dominant_part, with_opaque_parts
from graphs.capture.refuse import (
    around_module_calls,
    attributes_unchanged,
    refuse_gradient_dtypes,
    refuse_parametrization_cache,
)
from graphs.capture.rehearsal import (
    Rehearsed,
    backward_seen,
    compare_backward,
    gradients_of,
    matched_functions,
    saved_by_functions,
    saved_tensors,
)
from graphs.capture.same_program import StepDescription, describe
from graphs.capture.set_attributes import forward_shell, trace_context, with_attributes
from graphs.capture.shell import Shell
from graphs.capture.tensor_parallel import forget_placements, has_distributed, meshes_on
from graphs.capture.threads import one_at_a_time
from graphs.capture.traced_calls import is_backward
from graphs.model_calls import Call, LayoutForShapes, TraceError

_R = TypeVar("_R")


@one_at_a_time
def capture(
    model: nn.Module,
    call: Call,
    *,
    device: torch.device | None,
    choose: Callable[[Any], tuple[int, ...]],
    planned: Planned = (),
    gradient_layouts: Mapping[int, LayoutForShapes] | None = None,
) -> Capture:
    """Trace the forward and backward pass of `model` called with `call`.

    Modules that cannot be traced become opaque parts (`graphs.capture.opaque`). Raises TraceError
    with the reason if the step cannot be captured.

    device: device of the fake tensors (None: that of the real ones).
    choose: the model's output -> indices of the flat outputs that get a gradient.
    planned: the opaque parts of a plan for this step (`OpaquePart.described`), tried first.
    gradient_layouts: index of an output -> layout of its gradient, if not the output's own.
    """

    def trace(stand_ins: Sequence[StandIn]) -> Capture:
        def run(left: LeftBehind | None) -> Capture:
            shell = Shell(
                model,
                call,
                choose=choose,
                device=device,
                stand_ins=stand_ins,
                gradient_layouts=gradient_layouts,
                left=left,
            )
            # PyTorch's cache of fake results ignores storage offsets: if it were not cleared, sizes
            # would depend on what this process has traced before.
            FakeTensorMode.cache_clear()
            with dispatch_keys_kept(), contextlib.ExitStack() as stack:
                if has_distributed(model):
                    forget_placements()
                    stack.enter_context(meshes_on(device))
                stack.enter_context(eager_kernels(device or torch.device("cpu")))
                stack.enter_context(_annotate_module_paths(model))
                # `backward()` is called after the autocast context has ended.
                stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
                stack.enter_context(trace_context(model, stand_ins))
                refuse_parametrization_cache(model)
                with attributes_unchanged(model):
                    joint = aot_export_joint_with_descriptors(stack, shell, tuple(shell.batch))
                bind(joint.graph_module.graph, stand_ins)
                shell.mode.read_tensors.refuse_hidden(call.rest)
                captured = read_joint(joint, shell)
                _name_modules_of_copying_functions(captured.graph)
                shell.mode.leaves = {}  # the program's fake tensors refer to the mode
                return captured

        captured, filled, left = with_attributes(model, call, device, run, stand_ins)
        refuse_read_state(model, left, captured.buffer_inputs)
        return replace(captured, filled=filled, left=left)

    refuse_gradient_dtypes(model, call.tensors)
    with call_checkpoints_directly():  # also when the model is run to observe opaque parts
        captured, opaque = with_opaque_parts(model, call, device, trace, planned=planned)
    refuse_dominant_part(captured.graph, opaque)
    return replace(captured, opaque=opaque)


@one_at_a_time
def fake_output(model: nn.Module, call: Call, *, device: torch.device | None) -> Any:
    """The model's output for this call, on fake tensors; no graph is recorded.

    Raises TraceError.
    """

    def trace(stand_ins: Sequence[StandIn]) -> Any:
        def run(left: LeftBehind | None) -> Any:
            shell = forward_shell(model, call, device, stand_ins, left=left)
            with trace_context(model, stand_ins), attributes_unchanged(model), shell.mode:
                return shell.call(shell.batch)

        return with_attributes(model, call, device, run, stand_ins)[0]

    with call_checkpoints_directly():
        output, _ = with_opaque_parts(model, call, device, trace)
    return output


@one_at_a_time
def describe_step(
    model: nn.Module, call: Call, *, gradient_outputs: tuple[int, ...], device: torch.device | None
) -> StepDescription:
    """Describe a step: equal descriptions mean that `capture` would make the same program.

    For models without opaque parts and without attributes that a first call fills. See
    `graphs.capture.same_program`. Raises TraceError.

    gradient_outputs: indices of the outputs that get a gradient.
    """
    refuse_gradient_dtypes(model, call.tensors)
    shell = Shell(model, call, choose=lambda _output: gradient_outputs, device=device)
    with trace_context(model, ()), attributes_unchanged(model):
        return describe(shell, call)


@one_at_a_time
def rehearse(
    model: nn.Module, call: Call, captured: Capture, layout: Layout, *, device: torch.device | None
) -> Rehearsed:
    """Run the captured step in eager mode on fake tensors, to see what it overwrites and holds.

    See `graphs.capture.rehearsal`. Returns an empty `Rehearsed` if the step cannot be run like
    that: with opaque parts, with DTensors (whose operators run within other operators), or if it
    raises a TraceError.

    layout: the nodes and tensors of the captured step.
    """
    if captured.opaque or has_distributed(model):
        return Rehearsed()
    try:
        with _in_eager_mode(model, call, captured, device=device) as shell:
            leaves = [leaf for leaf in (*shell.parameters(), *shell.batch) if leaf.requires_grad]
            with _running_module(model) as running, EagerCalls(running) as forward:
                returned = shell(*shell.batch)
            returned_storages = forward.numbers_of(returned)
            outputs = [item for item in returned if item.requires_grad]
            del returned
            saved = saved_by_functions(outputs)
            saved_storages = forward.numbers_of(saved_tensors(outputs))
            has_own_leaves = bool(leaves) and makes_leaves(outputs, leaves)
            gradients, asked = gradients_of(outputs, captured), leaves if has_own_leaves else None
            with backward_seen(), EagerCalls() as backward:
                torch.autograd.backward(outputs, gradients, inputs=asked)
    except TraceError:
        return Rehearsed()
    found = compare_backward(layout, backward, saved)
    found = replace(found, unfilled_caches=_unfilled_caches(model, call, captured, device=device))
    eager = EagerForward(layout, forward, returned=returned_storages, saved=saved_storages)
    if not eager.is_known:
        return replace(found, dead_calls=eager.dead_calls())
    dead = eager.dead()
    saved_unread = {**found.saved, **held_with_dead(eager.held(), dead)}
    for_leaves = DeadBackward()
    if has_own_leaves:
        nodes = (pair for _, pairs in matched_functions(layout, backward) for pair in pairs)
        with contextlib.suppress(TraceError):
            short = _whole_step(model, call, captured, device=device, to_all=False)
            full = _whole_step(model, call, captured, device=device, to_all=True)
            node_at = {short.n_forward + each.index: name for name, each in nodes}
            for_leaves = dead_backward(layout, short, full, node_at={**eager.node_at, **node_at})
    for until, names in for_leaves.held.items():
        saved_unread[until] = (*saved_unread.get(until, ()), *names)
    return replace(
        found,
        saved=saved_unread,
        in_calls=_held_by_checkpointed_calls(
            model, call, captured, layout, device=device, saved=saved_storages
        ),
        dead=dead,
        dead_calls=eager.dead_calls(),
        dead_gradients=for_leaves.gradients,
    )


def _whole_step(
    model: nn.Module, call: Call, captured: Capture, *, device: torch.device | None, to_all: bool
) -> WholeStep:
    """The calls of the step. to_all: whether its backward pass goes to all leaves, also to those
    that forward makes."""
    with _in_eager_mode(model, call, captured, device=device) as shell, EagerCalls() as eager:
        leaves = [leaf for leaf in (*shell.parameters(), *shell.batch) if leaf.requires_grad]
        outputs = [item for item in shell(*shell.batch) if item.requires_grad]
        gradients = gradients_of(outputs, captured)
        n_forward = len(eager.calls)
        function = outputs[0].grad_fn
        first_number = 0 if function is None else function._sequence_nr()
        del function
        with backward_seen():
            torch.autograd.backward(outputs, gradients, inputs=None if to_all else leaves)
    return WholeStep(eager, n_forward, first_number)


def _held_by_checkpointed_calls(
    model: nn.Module,
    call: Call,
    captured: Capture,
    layout: Layout,
    *,
    device: torch.device | None,
    saved: Set[int],
) -> Mapping[str, tuple[str, ...]] | None:
    """What variables of `forward` hold if autograd saves nothing, as in a checkpointed call.

    saved: numbers of the storages that autograd saves otherwise; this run makes the same calls.

    Returns forward node -> tensors, as `EagerForward.held` does; None: not known.
    """
    try:
        with (
            _in_eager_mode(model, call, captured, device=device) as shell,
            EagerCalls() as forward,
            torch.autograd.graph.saved_tensors_hooks(lambda _saved: None, lambda none: none),
        ):
            returned = forward.numbers_of(shell(*shell.batch))
    except TraceError:
        return None  # such as a gradient that forward itself asks for
    eager = EagerForward(layout, forward, returned=returned, saved=saved)
    return held_with_dead(eager.held(forward_only=True), eager.dead())


def _unfilled_caches(
    model: nn.Module, call: Call, captured: Capture, *, device: torch.device | None
) -> tuple[str, ...]:
    """As in `Rehearsed`."""
    configs = caching_configs(model)
    if not configs:
        return ()
    try:
        with (
            _in_eager_mode(model, call, captured, device=device) as shell,
            refuse_caches(configs.values()),
        ):
            shell(*shell.batch)
    except TraceError:
        return ()
    return tuple(configs) if shell.spec == captured.output_spec else ()


@contextlib.contextmanager
def _in_eager_mode(
    model: nn.Module, call: Call, captured: Capture, *, device: torch.device | None
) -> Iterator[Shell]:
    """While inside, the captured step can be called in eager mode; yields its shell."""
    left = LeftBehind(model) if captured.left else None
    gradient_outputs = captured.gradient_outputs
    shell = Shell(
        model,
        call,
        choose=lambda _output: gradient_outputs,
        device=device,
        left=left,
        as_read=captured.reads,
    )
    with (
        trace_context(model, ()),
        attributes_filled(model, captured.filled),
        attributes_unchanged(model),
        eager_kernels(device or torch.device("cpu")),
        shell.mode,
        torch.enable_grad(),
    ):
        yield shell


@contextlib.contextmanager
def _running_module(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Yields a function that gives the path of the module of `model` that is running."""
    paths = {module: name for name, module in model.named_modules()}
    running = [""]

    def end() -> None:
        running.pop()

    with around_module_calls(lambda module: running.append(paths.get(module, running[-1])), end):
        yield lambda: running[-1]


@contextlib.contextmanager
def _annotate_module_paths(model: nn.Module) -> Iterator[None]:
    """While inside, annotate each fx node with the module of `model` that is running.

    "module_path" is the module's path; "module_calls" gives the number of the running call of this
    module and of each module around it, by path.
    """
    paths = {module: name for name, module in model.named_modules()}
    entered: list[contextlib.ExitStack] = []
    running: list[dict[str, int]] = [{}]  # path -> number of the call
    numbers = itertools.count()

    def before(module: nn.Module) -> None:
        stack = contextlib.ExitStack()
        if module in paths:
            running.append(running[-1] | {paths[module]: next(numbers)})
            stack.callback(running.pop)
            annotation = {"module_path": paths[module], "module_calls": running[-1]}
            stack.enter_context(annotate(annotation))
        entered.append(stack)

    def after() -> None:
        if entered:
            entered.pop().close()

    try:
        with around_module_calls(before, after):
            yield
    finally:
        while entered:
            entered.pop().close()


def _name_modules_of_copying_functions(graph: torch.fx.Graph) -> None:
    """Annotate backward nodes of some in-place operators with their module, where PyTorch does not.

    PyTorch matches backward to forward nodes by the sequence number of the autograd function. If
    autograd first copies the tensor that an operator overwrites (`silu_`, `pow_`), the copy and the
    operator have the number after the function's.
    """
    calls = [node for node in graph.nodes if "seq_nr" in node.meta]
    forward = {n.meta["seq_nr"]: n.meta.get("custom") for n in calls if not is_backward(n)}
    for node in calls:
        number = node.meta["seq_nr"]
        if is_backward(node) and number not in forward and not node.meta.get("custom"):
            path = (forward.get(number + 1) or {}).get("module_path")
            if path is not None:
                node.meta["custom"] = {"module_path": path}
