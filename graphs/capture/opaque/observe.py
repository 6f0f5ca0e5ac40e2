"""One real forward pass, in which the calls of some modules are observed.

Gradients are off, but for each observed call by itself, so that one call's saved tensors are held
at a time. A call is run several times, from the same random state: what it returns, what it keeps
for backward (the bytes that stay allocated once inputs and outputs are dropped), its peaks and its
time. Where sizes may depend on values, it also runs with shuffled inputs and other random numbers,
and its bytes get a margin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphs.capture.as_eager import no_cache
from graphs.capture.opaque.bench import MARGIN, Bench, Bytes
from graphs.capture.opaque.forms import Form, OpaqueCall, RandomSources
from graphs.capture.opaque.functions import holds_tensors, is_function, piece_at
from graphs.capture.opaque.island import Asked, Autocast, Island, Ran, first_places, state_of
from graphs.capture.opaque.methods import CalledMethod, no_submodule_called
from graphs.capture.opaque.nodes import called_instead
from graphs.capture.refuse import (
    HOOKS,
    SideEffectError,
    attributes_unchanged,
    no_unseen_changes,
    objects_unchanged,
)
from graphs.costs import ObservedRun, OperatorCalls, ValueReads
from graphs.model_calls import HOLE, Call, nested

N_SHUFFLED = 2
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)

AskedOf = Mapping[str, Sequence[Asked]]
"""By path: of each call, which gradients it is asked for."""


class NotOpaqueError(ValueError):
    """This module cannot be one piece: why. path: of the module."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path!r} cannot be planned as one piece: {why}")
        self.path = path


def observe(
    model: nn.Module, call: Call, paths: Sequence[str], *, device: torch.device, asked: AskedOf
) -> dict[str, list[OpaqueCall]]:
    """Run the model's forward pass on real tensors; the calls of these modules, in their order.

    asked: as an earlier trace found it; without it, all floating-point tensors need a gradient.
    Buffers and random states are restored. Raises NotOpaqueError; what the model raises.
    """
    watches = [
        _Watch(model, path, piece_at(model, path), device, asked.get(path, ())) for path in paths
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(all_put_back(model, device))
        for watch in watches:
            stack.enter_context(called_instead(watch.module, watch))
        run(model, call)
    for watch in watches:
        if not watch.found:
            raise NotOpaqueError(watch.path, "it is not called as a module")
        if len(watch.found) > 1 and watch.found[0].island.autocast.dtype is not None:
            raise NotOpaqueError(watch.path, "autocast casts its weights once for several calls")
    return {watch.path: watch.found for watch in watches}


def run(model: nn.Module, call: Call) -> None:
    """The model's forward pass on real tensors, without its hooks."""
    args, kwargs = call.arguments(call.tensors)
    model.forward(*args, **kwargs)


@contextlib.contextmanager
def all_put_back(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Without gradients inside; what the model changes is put back.

    What a first call fills is emptied again; of a part that changes more, a trace says so.
    """
    # Garbage is collected often inside; what was there before is not looked at each time.
    gc.collect()
    freeze = gc.get_freeze_count() == 0
    if freeze:
        gc.freeze()
    try:
        with (
            _buffers_restored(model),
            RandomSources.of(model, device).as_before(),
            no_cache(model),
            contextlib.suppress(SideEffectError),
            attributes_unchanged(model),
            objects_unchanged(model),
            torch.no_grad(),
        ):
            yield
    finally:
        if freeze:
            gc.unfreeze()


@contextlib.contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                if buffer.shape != values.shape:  # an observer's first call resizes it
                    buffer.resize_(values.shape)
                buffer.copy_(values)


class _Watch:
    """Called instead of a module: observes the call and returns the module's output."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        module: nn.Module,
        device: torch.device,
        asked: Sequence[Asked],
    ) -> None:
        self.model, self.path, self.module = model, path, module
        self.found: list[OpaqueCall] = []
        self._device, self._asked = device, asked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        del vars(self.module)["_compiled_call_impl"]
        given = Call.of(args, kwargs)
        try:
            island, tensors = self._island(given)
            random = RandomSources.of(self._where, self._device)
            with no_unseen_changes(self._where), self._of_its_own():
                if isinstance(self.module, CalledMethod):
                    overwritten = self._overwritten(island, tensors, random)
                    island = dataclasses.replace(island, overwritten=overwritten)
                Bench(island, tensors, random).forward()  # fills what a first call fills
                # a function may change what it is given of the model
                where = self.model if is_function(self.path) else self._where
                with attributes_unchanged(where), objects_unchanged(where):
                    call, outs = self._observed(island, tensors, random)
        except SideEffectError as error:
            raise self._refuse(str(error)) from error
        finally:
            vars(self.module)["_compiled_call_impl"] = self
        self.found.append(call)
        for i, index in island.overwritten.items():
            outs[index] = given.tensors[i].copy_(outs[index])
        return call.output(outs)

    @property
    def _where(self) -> nn.Module:
        """What its code calls `self`."""
        return self.module.owner if isinstance(self.module, CalledMethod) else self.module

    @contextlib.contextmanager
    def _of_its_own(self) -> Iterator[None]:
        """Refuse a method that calls submodules, or writes their tensors: it is not their node."""
        if not isinstance(self.module, CalledMethod):
            yield
            return
        own = {*map(id, state_of(self.module)[0])}
        owner = self.module.owner
        others = [t for t in (*owner.parameters(), *owner.buffers()) if id(t) not in own]
        versions = [t._version for t in others]
        with no_submodule_called(owner, self._refuse):
            yield
        if [t._version for t in others] != versions:
            raise self._refuse("it changes a parameter or buffer of a submodule")

    def _overwritten(
        self, island: Island, tensors: Sequence[torch.Tensor], random: RandomSources
    ) -> dict[int, int]:
        """As in `Island`."""
        n = island.n_inputs
        copies = [tensor.clone() for tensor in tensors[:n]]
        with random.as_before(), _buffers_restored(self.module):
            args, kwargs = island.call.arguments([copies[i] for i in island.first])
            output = self.module(*args, **kwargs)
        returned = [id(tensor) for tensor in nested.tensors(output)]
        written = [i for i, copy in enumerate(copies) if copy._version]
        if any(returned.count(id(copies[i])) != 1 for i in written):
            raise self._refuse(
                "it changes an argument in place, and does not return it exactly once"
            )
        if any(list(island.first).count(i) != 1 for i in written):
            raise self._refuse("it changes an argument in place that is passed more than once")
        return {i: returned.index(id(copies[i])) for i in written}

    def _refuse(self, why: str) -> NotOpaqueError:
        return NotOpaqueError(self.path, why)

    def _observed(
        self, island: Island, tensors: list[torch.Tensor], random: RandomSources
    ) -> tuple[OpaqueCall, list[torch.Tensor]]:
        with random.as_before():
            before, of_torch = random.of_others(), random.of_torch()
            with OperatorCalls() as forward, ValueReads() as values:
                ran = island.forward(tensors)
            draws = before != random.of_others()
            draws_torchs = not all(map(torch.equal, of_torch, random.of_torch()))
        self._check(ran, tensors)
        written = self._write(island, ran, tensors)
        state = {*range(island.n_inputs, len(tensors))}
        given = frozenset((state - written) | ran.read)
        island = dataclasses.replace(island, changed=tuple(sorted(written)), given=given)
        with OperatorCalls() as backward, values:
            gradients = Bench(island, tensors, random).backward(ran)
        if any(g is not None and g.layout != torch.strided for g in gradients):
            raise self._refuse("the gradient of a parameter is sparse")
        if forward.communicates or backward.communicates:
            raise self._refuse("it communicates with other processes")
        varies = draws or values.seen or forward.reads_values or backward.reads_values
        bench = Bench(island, tensors, random)
        benches = [bench]
        for _ in range(N_SHUFFLED if varies else 0):
            if (other := self._shuffled(benches[-1], ran)) is not None:
                benches.append(other)
        island = benches[-1].island
        taken = [dataclasses.replace(each, island=island).bytes_taken() for each in benches]
        takes = functools.reduce(Bytes.at_least, taken)
        if takes.leaked_bytes:
            raise self._refuse("tensors that it makes are held elsewhere after its call")
        least_bytes = takes.saved_bytes
        if varies:
            takes = Bytes(*(int(MARGIN * n_bytes) for n_bytes in dataclasses.astuple(takes)))
        forward_s, backward_s = dataclasses.replace(bench, island=island).seconds()
        wanted = [t for t, needed in zip(tensors, island.needs, strict=True) if needed]
        edges = zip(ran.outs, ran.saved.outputs, strict=True)
        return OpaqueCall(
            path=self.path,
            island=island,
            random=random,
            inputs=tuple(map(Form.of, tensors[: island.n_inputs])),
            outs=tuple(map(Form.of, ran.outs)),
            differentiable=tuple(
                edge is not None or (varies and bool(wanted) and tensor.is_floating_point())
                for tensor, edge in edges
            ),
            spec=ran.spec,
            positions=tuple(i for i, item in enumerate(ran.rest) if item is HOLE),
            gradients=tuple(
                Form.of(torch.empty_like(t, device="meta") if g is None else g)
                for t, g in zip(wanted, gradients, strict=True)
            ),
            saved_bytes=takes.saved_bytes,
            least_bytes=least_bytes,
            outside_bytes=max(0, ran.packed_bytes - taken[0].saved_bytes),
            forward=ObservedRun(tuple(forward.calls), forward_s, takes.forward_bytes),
            backward=ObservedRun(tuple(backward.calls), backward_s, takes.backward_bytes),
            recomputable=not any(
                getattr(module, hooks) for module in self.module.modules() for hooks in HOOKS
            ),
            draws=draws_torchs,
        ), ran.outs

    def _island(self, call: Call) -> tuple[Island, list[torch.Tensor]]:
        """The call before anything is known of it, and its tensors."""
        for item in call.rest:
            is_object = item is not HOLE and not isinstance(item, _CONSTANTS)
            if is_object and (not is_function(self.path) or holds_tensors(item)):
                raise self._refuse(f"an argument is an object of type {type(item).__name__}")
        state, names = state_of(self.module)
        tensors = [t.detach() for t in (*call.tensors, *state)]
        if any(not _is_plain(t, self._device) for t in tensors):
            raise self._refuse("a tensor that it reads is sparse, nested or on another device")
        n_inputs, n_parameters = len(call.tensors), len({*map(id, self.module.parameters())})
        if torch.is_autocast_enabled(self._device.type):
            # It casts a weight once for all that use it, which an island cannot.
            inside = {*map(id, self.module.modules())}
            own = {id(p) for p in state[:n_parameters] if p.requires_grad}
            for other in self.model.modules():
                if id(other) not in inside and own & {*map(id, other._parameters.values())}:
                    raise self._refuse("autocast casts a weight once that others use as well")
        first = first_places(call.tensors)
        index = len(self.found)
        if index < len(self._asked):
            asked = self._asked[index]
        else:
            given = enumerate(call.tensors)
            wanted = (first[i] == i and (t.is_floating_point() or t.is_complex()) for i, t in given)
            asked = Asked(True, (*wanted, *(t.requires_grad for t in state)))
        return Island(
            module=self.module,
            call=dataclasses.replace(call, tensors=[]),
            first=first,
            names=names,
            asked=asked,
            n_parameters=n_parameters,
            device=self._device,
            autocast=Autocast.now(self._device),
            changed=tuple(range(n_inputs + n_parameters, len(tensors))),
        ), tensors

    def _check(self, ran: Ran, tensors: Sequence[torch.Tensor]) -> None:
        if any(item is not HOLE and item is not None for item in ran.rest):
            raise self._refuse("it returns something other than tensors and None")
        if any(not _is_plain(t, self._device) for t in ran.outs):
            raise self._refuse("it returns a sparse or nested tensor, or one on another device")
        if not ran.outs:
            raise self._refuse("it returns no tensor")
        given = {t.untyped_storage()._cdata for t in tensors}
        made = {t.untyped_storage()._cdata for t in ran.outs}
        if given & made or len(made) < len(ran.outs):
            raise self._refuse("a tensor that it returns shares memory with another, or an input")
        n_uses, reaches_others = _uses(ran)
        if reaches_others:
            raise self._refuse("a tensor that requires a gradient is not one of its parameters")
        if torch.is_autocast_enabled(self._device.type) and n_uses > 1:
            raise self._refuse("autocast casts a weight once that is used several times")

    def _write(self, island: Island, ran: Ran, tensors: list[torch.Tensor]) -> set[int]:
        """Which buffers the call changes; their new values are written, as the call does."""
        state, _ = state_of(self.module)
        written = set()
        for i, new in zip(island.changed, ran.buffers, strict=True):
            # batch norm's kernels write without a new version
            if new._version or not new.equal(tensors[i]):
                written.add(i)
                tensors[i] = tensors[i].clone()  # the old values, for further runs
                state[i - island.n_inputs].copy_(new)
        return written

    def _shuffled(self, bench: Bench, ran: Ran) -> Bench | None:
        """None: the call does not allow these values."""
        try:
            other = bench.shuffled()
            again = other.forward()
        except SideEffectError:
            raise
        except (RuntimeError, IndexError, ValueError, AssertionError):
            return None
        if [t.shape for t in again.outs] != [t.shape for t in ran.outs]:
            raise self._refuse("the size of what it returns depends on values")
        given = (bench.island.given or frozenset()) | again.read
        return dataclasses.replace(other, island=dataclasses.replace(bench.island, given=given))


def _is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.device == device


def _uses(ran: Ran) -> tuple[int, bool]:
    """The most uses of one parameter, and whether gradients would go to another leaf."""
    ends = {edge.node for edge in ran.saved.inputs if edge is not None}
    stack = [edge.node for edge in ran.saved.outputs if edge is not None]
    seen = {*ends, *stack}
    n_uses: Counter[Any] = Counter()
    while stack:
        node = stack.pop()
        following = () if node in ends else [each for each, _ in node.next_functions if each]
        n_uses.update(each for each in following if each in ends and hasattr(each, "variable"))
        if node not in ends and hasattr(node, "variable"):
            return 0, True
        stack += {*following} - seen
        seen.update(following)
    return max(n_uses.values(), default=0), False
