"""Observes the calls of some modules in one real forward pass.

Gradients are off, except within each observed call, so that the saved tensors of only one call are
held at a time. Each call is run several times from the same random state, to find what it returns,
what it keeps for backward (the bytes that stay allocated after inputs and outputs have been freed),
its peaks and its time. If sizes may depend on values, it is also run with shuffled inputs and other
random numbers, and its bytes get a margin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from graphs.capture.opaque.bench import MARGIN, Bench, Bytes
from graphs.capture.opaque.forms import Form, OpaqueCall, RandomSources
from graphs.capture.opaque.functions import holds_tensors, is_function, piece_at
from graphs.capture.opaque.island import (
    Autocast,
    CallResult,
    GradientRequest,
    Island,
    first_positions,
    state_of,
)
from graphs.capture.opaque.methods import CalledMethod, no_submodule_called
from graphs.capture.opaque.nodes import called_instead
from graphs.capture.opaque.real_forward import buffers_restored, model_restored, run_forward
from graphs.capture.refuse import (
    HOOKS,
    SideEffectError,
    attributes_unchanged,
    no_generators_made,
    no_unseen_changes,
    objects_unchanged,
    system_numbers_noted,
)
from graphs.costs import ObservedRun, OperatorCalls, ValueReads
from graphs.model_calls import HOLE, PLAIN_TYPES, Call, nested, storage_key

N_SHUFFLED = 2
"""How many shuffled inputs to measure."""

Requests = Mapping[str, Sequence[GradientRequest]]
"""Path of an opaque part -> for each of its calls, which gradients it is asked for."""


class NotOpaqueError(ValueError):
    """A module cannot be planned as one piece; says why.

    path: of the module.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path!r} cannot be planned as one piece: {why}")
        self.path = path


def observe(
    model: nn.Module, call: Call, paths: Sequence[str], *, device: torch.device, requests: Requests
) -> dict[str, list[OpaqueCall]]:
    """Run the model's forward pass on real tensors and observe the calls of some modules.

    Returns path -> calls in order. Buffers and random states are restored.

    paths: the modules, methods and functions to observe.
    requests: which gradients the calls are asked for, as an earlier trace has found. For calls not
        in it, all floating-point and complex inputs are assumed to need a gradient.
    Raises NotOpaqueError if one of them cannot be planned as one piece, and what the model raises.
    """
    watches = [
        _Watch(model, path, piece_at(model, path), device, requests.get(path, ())) for path in paths
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(model_restored(model, device))
        for watch in watches:
            stack.enter_context(called_instead(watch.module, watch))
        run_forward(model, call)
    for watch in watches:
        if not watch.found:
            raise NotOpaqueError(watch.path, "it is not called as a module")
        if len(watch.found) > 1 and watch.found[0].island.autocast.dtype is not None:
            raise NotOpaqueError(watch.path, "autocast casts its weights once for several calls")
    return {watch.path: watch.found for watch in watches}


class _Watch:
    """Called instead of a module: observes the call and returns the module's output.

    found: the calls observed so far.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        module: nn.Module,
        device: torch.device,
        requests: Sequence[GradientRequest],
    ) -> None:
        self.model, self.path, self.module = model, path, module
        self.found: list[OpaqueCall] = []
        self._device, self._requests = device, requests

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        del vars(self.module)["_compiled_call_impl"]
        given = Call.of(args, kwargs)
        try:
            island, tensors = self._island(given)
            random = RandomSources.of(self._self_module, self._device)
            with no_unseen_changes(self._self_module), self._no_submodules_used():
                if isinstance(self.module, CalledMethod):
                    overwritten = self._overwritten(island, tensors, random)
                    island = dataclasses.replace(island, overwritten=overwritten)
                # A first call may fill attributes, which is no reason to refuse the module.
                with no_generators_made(self._self_module):
                    Bench(island, tensors, random).forward()
                # A function may change objects of the model that it is given.
                where = self.model if is_function(self.path) else self._self_module
                with (
                    attributes_unchanged(where),
                    objects_unchanged(where),
                    # some operators take other memory while a mode is active
                    _disable_current_modes(),
                ):
                    call, outs = self._measured_call(island, tensors, random)
        except SideEffectError as error:
            raise self._error(str(error)) from error
        finally:
            vars(self.module)["_compiled_call_impl"] = self
        self.found.append(call)
        for i, index in island.overwritten.items():
            outs[index] = given.tensors[i].copy_(outs[index])
        return call.output(outs)

    @property
    def _self_module(self) -> nn.Module:
        """The module that the observed code calls `self`."""
        return self.module.owner if isinstance(self.module, CalledMethod) else self.module

    @contextlib.contextmanager
    def _no_submodules_used(self) -> Iterator[None]:
        """Refuse a method that calls submodules or writes their tensors, which its node lacks."""
        if not isinstance(self.module, CalledMethod):
            yield
            return
        own = {*map(id, state_of(self.module)[0])}
        owner = self.module.owner
        others = [t for t in (*owner.parameters(), *owner.buffers()) if id(t) not in own]
        versions = [t._version for t in others]
        with no_submodule_called(owner, self._error):
            yield
        if [t._version for t in others] != versions:
            raise self._error("it changes a parameter or buffer of a submodule")

    def _overwritten(
        self, island: Island, tensors: Sequence[torch.Tensor], random: RandomSources
    ) -> dict[int, int]:
        """Run a method once to find the arguments that it overwrites; see `Island.overwritten`."""
        n = island.n_inputs
        copies = [tensor.clone() for tensor in tensors[:n]]
        with random.states_restored(), buffers_restored(self.module):
            args, kwargs = island.call.arguments([copies[i] for i in island.first])
            output = self.module(*args, **kwargs)
        returned = [id(tensor) for tensor in nested.tensors(output)]
        written = [i for i, copy in enumerate(copies) if copy._version]
        if any(returned.count(id(copies[i])) != 1 for i in written):
            raise self._error(
                "it changes an argument in place, and does not return it exactly once"
            )
        if any(list(island.first).count(i) != 1 for i in written):
            raise self._error("it changes an argument in place that is passed more than once")
        return {i: returned.index(id(copies[i])) for i in written}

    def _error(self, why: str) -> NotOpaqueError:
        return NotOpaqueError(self.path, why)

    def _measured_call(
        self, island: Island, tensors: list[torch.Tensor], random: RandomSources
    ) -> tuple[OpaqueCall, list[torch.Tensor]]:
        """Run and measure a call; returns what is known about it, and its outputs."""
        with random.states_restored():
            before, torch_states = random.other_states(), random.torch_states()
            system_draws: list[None] = []
            noted = system_numbers_noted(lambda: system_draws.append(None))
            with OperatorCalls() as forward, ValueReads() as values, noted:
                result = island.forward(tensors)
            draws_others = bool(system_draws) or before != random.other_states()
            draws_torchs = not all(map(torch.equal, torch_states, random.torch_states()))
        again = Bench(island, tensors, random).forward()
        self._check_supported(result, tensors, again)
        is_repeatable = not system_draws and all(map(_have_same_bits, result.outs, again.outs))
        del again
        written = self._write_changed_buffers(island, result, tensors)
        # All parameters and unchanged buffers, and the inputs and outputs that backward reads.
        state = {*range(island.n_inputs, len(tensors))}
        reads = frozenset((state - written) | result.saved_positions)
        island = dataclasses.replace(island, changed_buffers=tuple(sorted(written)), reads=reads)
        with OperatorCalls() as backward, values:
            gradients = Bench(island, tensors, random).backward(result)
        if any(g is not None and g.layout != torch.strided for g in gradients):
            raise self._error("the gradient of a parameter is sparse")
        if forward.communicates or backward.communicates:
            raise self._error("it communicates with other processes")
        reads_values = forward.reads_values or backward.reads_values or values.seen
        may_vary = draws_others or reads_values
        benches = [bench := Bench(island, tensors, random)]
        for _ in range(N_SHUFFLED if may_vary else 0):
            if (other := self._shuffled_bench(benches[-1], result)) is not None:
                benches.append(other)
        island = benches[-1].island  # is given what any of the runs has read
        measured = [dataclasses.replace(each, island=island).bytes_taken() for each in benches]
        largest = functools.reduce(Bytes.at_least, measured)
        if largest.leaked_bytes:
            raise self._error("tensors that it makes are held elsewhere after its call")
        least_bytes = largest.saved_bytes
        if may_vary:
            largest = Bytes(*(int(MARGIN * n_bytes) for n_bytes in dataclasses.astuple(largest)))
        forward_s, backward_s = dataclasses.replace(bench, island=island).seconds()
        wanted = [t for t, needed in zip(tensors, island.needs, strict=True) if needed]
        edges = zip(result.outs, result.saved.outputs, strict=True)
        return OpaqueCall(
            path=self.path,
            island=island,
            random=random,
            inputs=tuple(map(Form.of, tensors[: island.n_inputs])),
            outs=tuple(map(Form.of, result.outs)),
            differentiable=tuple(
                edge is not None or (may_vary and bool(wanted) and tensor.is_floating_point())
                for tensor, edge in edges
            ),
            spec=result.spec,
            positions=tuple(i for i, item in enumerate(result.rest) if item is HOLE),
            gradients=tuple(
                Form.of(torch.empty_like(t, device="meta") if g is None else g)
                for t, g in zip(wanted, gradients, strict=True)
            ),
            saved_bytes=largest.saved_bytes,
            least_bytes=least_bytes,
            outside_bytes=max(0, result.packed_bytes - measured[0].saved_bytes),
            forward=ObservedRun(tuple(forward.calls), forward_s, largest.forward_bytes),
            backward=ObservedRun(tuple(backward.calls), backward_s, largest.backward_bytes),
            recomputable=is_repeatable
            and not any(
                getattr(module, hooks) for module in self.module.modules() for hooks in HOOKS
            ),
            draws=draws_torchs,
        ), result.outs

    def _island(self, call: Call) -> tuple[Island, list[torch.Tensor]]:
        """The island of a call that has not been run yet, and its tensors.

        All its buffers count as changed, and all tensors as given to the backward pass.
        """
        for item in call.rest:
            is_object = item is not HOLE and not isinstance(item, PLAIN_TYPES)
            if is_object and (not is_function(self.path) or holds_tensors(item)):
                raise self._error(f"an argument is an object of type {type(item).__name__}")
        state, names = state_of(self.module)
        tensors = [t.detach() for t in (*call.tensors, *state)]
        if any(not _is_plain(t, self._device) for t in tensors):
            raise self._error("a tensor that it reads is sparse, nested or on another device")
        n_inputs, n_parameters = len(call.tensors), len({*map(id, self.module.parameters())})
        if torch.is_autocast_enabled(self._device.type):
            # Autocast casts a weight once for all its users, which an island cannot do.
            inner_ids = {*map(id, self.module.modules())}
            own = {id(p) for p in state[:n_parameters] if p.requires_grad}
            for other in self.model.modules():
                if id(other) not in inner_ids and own & {*map(id, other._parameters.values())}:
                    raise self._error("autocast casts a weight once that others use as well")
        first = first_positions(call.tensors)
        index = len(self.found)
        if index < len(self._requests):
            request = self._requests[index]
        else:
            given = enumerate(call.tensors)
            wanted = (first[i] == i and (t.is_floating_point() or t.is_complex()) for i, t in given)
            request = GradientRequest(True, (*wanted, *(t.requires_grad for t in state)))
        return Island(
            module=self.module,
            call=dataclasses.replace(call, tensors=[]),
            first=first,
            names=names,
            request=request,
            n_parameters=n_parameters,
            device=self._device,
            autocast=Autocast.current(self._device),
            changed_buffers=tuple(range(n_inputs + n_parameters, len(tensors))),
        ), tensors

    def _check_supported(
        self,
        result: CallResult,
        tensors: Sequence[torch.Tensor],
        again: CallResult,
    ) -> None:
        """Raise NotOpaqueError if the call's outputs or saved tensors cannot be handled.

        again: the result of another run of the same call.
        """
        if any(item is not HOLE and item is not None for item in result.rest):
            raise self._error("it returns something other than tensors and None")
        if any(not _is_plain(t, self._device) for t in result.outs):
            raise self._error("it returns a sparse or nested tensor, or one on another device")
        if not result.outs:
            raise self._error("it returns no tensor")
        given = {storage_key(t) for t in tensors}
        made = {storage_key(t) for t in result.outs}
        if given & made or len(made) < len(result.outs):
            raise self._error("a tensor that it returns shares memory with another, or an input")
        n_uses, others = _parameter_uses(result)
        # a leaf that the call itself makes (a loss that begins as a zero) is another one each time
        if others and any(a is b for a in others for b in _parameter_uses(again)[1]):
            raise self._error("a tensor that requires a gradient is not one of its parameters")
        if torch.is_autocast_enabled(self._device.type) and n_uses > 1:
            raise self._error("autocast casts a weight once that is used several times")

    def _write_changed_buffers(
        self, island: Island, result: CallResult, tensors: list[torch.Tensor]
    ) -> set[int]:
        """Find the positions of the buffers that the call changes, and write their new values."""
        state, _ = state_of(self.module)
        written = set()
        for i, new in zip(island.changed_buffers, result.buffers, strict=True):
            # Values are compared too, since batch norm's kernels do not increase the version.
            if new._version or not new.equal(tensors[i]):
                written.add(i)
                tensors[i] = tensors[i].clone()  # further runs need the old values
                state[i - island.n_inputs].copy_(new)
        return written

    def _shuffled_bench(self, bench: Bench, result: CallResult) -> Bench | None:
        """A bench with shuffled inputs; None if the call fails with these values.

        Its backward pass is given all tensors that have been saved in either run.
        """
        try:
            other = bench.with_shuffled_inputs()
            again = other.forward()
        except SideEffectError:
            raise
        except (RuntimeError, IndexError, ValueError, AssertionError):
            return None
        if [t.shape for t in again.outs] != [t.shape for t in result.outs]:
            raise self._error("the size of what it returns depends on values")
        reads = (bench.island.reads or frozenset()) | again.saved_positions
        return dataclasses.replace(other, island=dataclasses.replace(bench.island, reads=reads))


def _is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.device == device


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also of values that are not equal to themselves (NaN)."""
    if one.shape != other.shape:
        return False
    bits, other_bits = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(bits, other_bits)


def _parameter_uses(result: CallResult) -> tuple[int, list[torch.Tensor]]:
    """(largest number of uses of one parameter, other leaves that gradients would reach)."""
    ends = {edge.node for edge in result.saved.inputs if edge is not None}
    stack = [edge.node for edge in result.saved.outputs if edge is not None]
    seen = {*ends, *stack}
    n_uses: Counter[Any] = Counter()
    others = []
    while stack:
        node = stack.pop()
        following = () if node in ends else [each for each, _ in node.next_functions if each]
        n_uses.update(each for each in following if each in ends and hasattr(each, "variable"))
        if node not in ends and hasattr(node, "variable"):
            others.append(node.variable)
        stack += {*following} - seen
        seen.update(following)
    return max(n_uses.values(), default=0), others
