"""An optimizer whose state is in host memory between its steps.

    keep_on_host(optimizer, n_parameters, owner=plan)   # n_parameters of each bucket, as planned
    bring_back(optimizer, owner=plan)                   # if no other plan wants it on the host

`optimizer.step` is replaced on this instance. It steps one bucket of parameters after the other
with the optimizer's own code: a bucket's state is copied to the device, used there and copied back.
On CUDA, copies run while other buckets are stepped (`graphs.host_state` describes the order).
Hooks, schedulers, closures and gradient scalers see a single step. `state_dict` returns tensors on
the host; `load_state_dict` accepts tensors on the host or the device.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from graphs.training_step import aligned, movable_state, trained_parameters, why_state_stays
from scheduler_runtime.execute import CopyEvent, CopyStreams, storage_bytes, streams_for
from scheduler_runtime.host_memory.parameters import HostParameters

_STATES: weakref.WeakKeyDictionary[torch.optim.Optimizer, HostState] = weakref.WeakKeyDictionary()


def keep_on_host(
    optimizer: torch.optim.Optimizer,
    n_parameters: Sequence[int],
    *,
    parameters: HostParameters | None = None,
    owner: object = None,
) -> None:
    """Move the optimizer's existing state to the host; from now on it is on the device only while
    the optimizer steps. If the state is on the host already, only the owner is added.

    n_parameters: how many parameters each bucket has, counting the trained ones in order.
    parameters: the parameters that are on the host too; each is copied with its bucket's state.
    owner: the object that wants the state on the host. With several owners, the state returns to
        the device when the last of them calls `bring_back`.

    Raises ValueError for an optimizer whose state cannot be moved, or that trains another number of
    parameters than planned.
    """
    if (kept := _STATES.get(optimizer)) is not None:
        if parameters is not None and kept.host_parameters is not parameters:
            raise ValueError(
                "the plan has parameters on the host, and another plan has the state of this "
                "optimizer there: remove that plan first, or train each model with an optimizer "
                "of its own"
            )
        if owner is not None:
            kept.owners.add(owner)
        return
    if reason := why_state_stays(optimizer):
        raise ValueError(f"the plan has the optimizer's state on the host, and {reason}")
    found = [parameter for _, parameter in trained_parameters(optimizer)]
    if len(found) != sum(n_parameters):
        raise ValueError(
            f"the plan is for an optimizer that trains {sum(n_parameters)} tensors, and this "
            f"{type(optimizer).__name__} trains {len(found)}; plan again with this optimizer"
        )
    if len({parameter.device for parameter in found}) > 1:
        raise ValueError(
            "the plan has the optimizer's state on the host, but the optimizer's parameters are on "
            'several devices; plan with optimizer_state="device"'
        )
    state = HostState(found, n_parameters, parameters)
    if owner is not None:
        state.owners.add(owner)
    state.attach(optimizer)
    _STATES[optimizer] = state


def bring_back(optimizer: torch.optim.Optimizer, *, owner: object = None) -> None:
    """Bring the state back to the device and restore the optimizer's own step.

    owner: the owner that gives the state up. Nothing happens while there are other owners, or if
        this one is not an owner. None: the state comes back whoever owns it.

    If the device has no room for all of the state, the error says so; then all of it stays on the
    host, and the optimizer steps as before.
    """
    state = _STATES.get(optimizer)
    if state is None or (owner is not None and not state.remove_owner(owner)):
        return
    try:
        state.detach(optimizer)
    except Exception as error:
        if owner is not None:
            state.owners.add(owner)
        error.add_note(
            "all of the optimizer's state is still in host memory, and its steps continue as "
            "planned: free memory on the device, then remove the plan again"
        )
        raise
    del _STATES[optimizer]


@contextlib.contextmanager
def on_device(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In this context, the optimizer has its own step, and all state and parameters are on the
    device."""
    state = _STATES.get(optimizer)
    owners = [] if state is None else list(state.owners)
    bring_back(optimizer)
    parameters = None if state is None else state.host_parameters
    try:
        with contextlib.nullcontext() if parameters is None else parameters.on_device():
            yield
    finally:
        if state is not None:
            keep_on_host(optimizer, state.n_parameters, parameters=parameters)
            _STATES[optimizer].owners.update(owners)
        if parameters is not None:
            parameters.move_to_host()


def host_blocks(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The blocks of host memory that hold the optimizer's state, at most one for each bucket."""
    state = _STATES.get(optimizer)
    return [] if state is None else [b.host for b in state.buckets if b.host is not None]


_Tensors: TypeAlias = dict[tuple[torch.Tensor, str], torch.Tensor]
"""Tensors of optimizer state, by parameter and name of the state entry."""


@dataclass(frozen=True)
class _Piece:
    """Where a tensor of optimizer state is in the block of its bucket. start: in bytes."""

    parameter: torch.Tensor
    name: str
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    start: int

    def tensor_in(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of this block."""
        empty = torch.empty(0, dtype=self.dtype, device=block.device)
        at = self.start // empty.element_size()
        return empty.set_(block.untyped_storage(), at, self.shape, self.strides)


@dataclass(eq=False)
class _Bucket:
    """Parameters that are stepped together, and their optimizer state in one block of memory.

    host: the state in host memory (None: there is no state yet).
    pieces: where each tensor is in the block.
    copies_in: copies to the device, which `wait_for_copies_in` waits for.
    host_tensors: the tensors in `optimizer.state` while the state is on the host.
    device_tensors: the tensors in `optimizer.state` while it is on the device.
    copies_out: copies to the host that may still run, each with the device memory that it reads.
    """

    parameters: list[torch.Tensor]
    host: torch.Tensor | None = None
    pieces: list[_Piece] = field(default_factory=list)
    copies_in: list[CopyEvent] = field(default_factory=list)
    host_tensors: _Tensors = field(default_factory=dict)
    device_tensors: _Tensors = field(default_factory=dict)
    copies_out: list[tuple[CopyEvent, torch.Tensor]] = field(default_factory=list)

    def fetch(self, state: Any, streams: CopyStreams, device: torch.device) -> None:
        """Start to copy the state to new device memory; `wait_for_copies_in` waits for the copy."""
        if not self.is_on_host(state):  # the user has replaced tensors of the state
            for (parameter, name), tensor in self._tensors_in(state).items():
                state[parameter][name] = tensor.to(device)
            self.host, self.pieces = None, []
        if self.host is None:
            return
        block = torch.empty(self.host.numel(), dtype=torch.uint8, device=device)
        self.copies_in.append(streams.to_device(block, self.host, []))
        for piece in self.pieces:
            tensor = state[piece.parameter][piece.name] = piece.tensor_in(block)
            self.device_tensors[piece.parameter, piece.name] = tensor

    def wait_for_copies_in(self) -> None:
        for done in self.copies_in:
            done.hold_compute()
        self.copies_in.clear()

    def store(self, state: Any, streams: CopyStreams) -> None:
        """Copy the state to the host as the step has left it, with any tensors it has created."""
        tensors = self._tensors_in(state)
        if not tensors:
            return
        if self.host is not None and _are_same(tensors, self.device_tensors):
            source = storage_bytes(next(iter(tensors.values())))
            self.copies_out.append((streams.to_host(self.host, source, []), source))
        else:
            self._store_in_new_block(tensors, streams)
        assert self.host is not None
        self.device_tensors, self.host_tensors = {}, {}
        for piece in self.pieces:
            tensor = state[piece.parameter][piece.name] = piece.tensor_in(self.host)
            self.host_tensors[piece.parameter, piece.name] = tensor

    def is_on_host(self, state: Any) -> bool:
        """Whether the state still consists of the tensors that `store` has put there."""
        return _are_same(self._tensors_in(state), self.host_tensors)

    def _tensors_in(self, state: Any) -> _Tensors:
        """The bucket's tensors of state that are moved, wherever they are now."""
        return {
            (parameter, name): tensor
            for parameter in self.parameters
            if parameter in state
            for name, tensor in movable_state(state[parameter])
        }

    def _store_in_new_block(self, tensors: _Tensors, streams: CopyStreams) -> None:
        """Copy tensor by tensor into a new block of host memory."""
        self.pieces, at = [], 0
        for (parameter, name), tensor in tensors.items():
            strides = torch.empty_like(tensor, device="meta").stride()
            piece = _Piece(parameter, name, tensor.dtype, tensor.shape, strides, at)
            self.pieces.append(piece)
            at += aligned(tensor.nbytes)
        pinned = self.parameters[0].device.type == "cuda"
        self.host = torch.empty(at, dtype=torch.uint8, pin_memory=pinned)
        for piece, tensor in zip(self.pieces, tensors.values(), strict=True):
            self.copies_out.append(
                (streams.to_host(piece.tensor_in(self.host), tensor, []), tensor)
            )

    def wait_for_copies_out(self) -> None:
        """Wait for the copies to the host, so that their device memory can be used again."""
        for done, _ in self.copies_out:
            done.hold_compute()
        self.copies_out.clear()


class HostState:
    """The state of one optimizer, in buckets of its parameters."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        n_parameters: Sequence[int],
        host_parameters: HostParameters | None = None,
    ) -> None:
        self.n_parameters = tuple(n_parameters)
        self.host_parameters = host_parameters
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        rest = iter(parameters)
        self.buckets = [_Bucket([next(rest) for _ in range(n)]) for n in n_parameters]
        self._bucket_of = {
            parameter: index
            for index, bucket in enumerate(self.buckets)
            for parameter in bucket.parameters
        }
        self._device = parameters[0].device
        self._streams = streams_for(self._device)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's step, and move its state to the host."""
        own_step: Any = type(optimizer).step
        # without PyTorch's profiling and hooks, which would run once for each bucket
        unhooked: Any = own_step.__wrapped__ if getattr(own_step, "hooked", False) else own_step

        @functools.wraps(unhooked)
        def step(optimizer: Any, closure: Any = None) -> Any:
            optimizer._opt_called = True  # what a scheduler's wrapper would have set
            return self.step(optimizer, unhooked, closure)

        hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
        hooked._wrapped_by_lr_sched = True
        self._hooked = hooked
        self._step_before = optimizer.__dict__.get("step")
        optimizer.step = types.MethodType(self._hooked, optimizer)  # type: ignore[method-assign]
        self._hook = optimizer.register_load_state_dict_post_hook(self._move_to_host)
        self._move_to_host(optimizer)

    def remove_owner(self, owner: object) -> bool:
        """Remove an owner; whether it was the last one."""
        if owner not in self.owners:
            return False
        self.owners.discard(owner)
        return not self.owners

    def detach(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the state back, and restore the optimizer's step.

        A wrapper that something else has put around our step since then goes on calling our step;
        without buckets, ours does the same as the optimizer's own. After an error everything is as
        before."""
        try:
            for bucket in self.buckets:
                self._fetch([bucket], optimizer.state)
                bucket.wait_for_copies_in()
        except BaseException:
            self._move_to_host(optimizer)
            raise
        self._hook.remove()
        if getattr(optimizer.__dict__.get("step"), "__func__", None) is self._hooked:
            if self._step_before is None:
                del optimizer.step
            else:
                optimizer.step = self._step_before  # type: ignore[method-assign]
        self.buckets, self._bucket_of = [], {}

    @torch.no_grad()
    def _move_to_host(self, optimizer: torch.optim.Optimizer) -> None:
        """Move all existing state to the host, wherever it is now."""
        self._streams.begin()
        for bucket in self.buckets:
            bucket.store(optimizer.state, self._streams)
            bucket.wait_for_copies_out()
        self._streams.settle()

    def step(self, optimizer: Any, own_step: Callable[..., Any], closure: Any) -> Any:
        """Run one step of the optimizer, bucket by bucket.

        own_step: the optimizer's step function; it steps the parameters in `param_groups`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, state = optimizer.param_groups, optimizer.state
        stepped = [(bucket, chosen) for bucket, chosen in self._groups_by_bucket(groups) if chosen]
        buckets = [bucket for bucket, _ in stepped]
        self._streams.begin()
        try:
            self._fetch_all(buckets[:1], state)
            for n, (bucket, chosen) in enumerate(stepped):
                # at most three buckets are on the device: the last one, this one, the next one
                for other in buckets[max(0, n - 2) : max(0, n - 1)]:
                    other.wait_for_copies_out()
                self._fetch_all(buckets[n + 1 : n + 2], state)
                bucket.wait_for_copies_in()
                optimizer.param_groups = chosen
                own_step(optimizer)
                self._store([bucket], state)
                self._store_parameters(bucket)
        finally:
            optimizer.param_groups = groups
            # after an error: the buckets that are still on the device
            self._store([bucket for bucket in buckets if not bucket.is_on_host(state)], state)
            for bucket in buckets:
                self._store_parameters(bucket)
                bucket.wait_for_copies_out()
            self._streams.settle()
        return loss

    @torch.no_grad()
    def _fetch(self, buckets: Sequence[_Bucket], state: Any) -> None:
        for bucket in buckets:
            bucket.fetch(state, self._streams, self._device)

    @torch.no_grad()
    def _fetch_all(self, buckets: Sequence[_Bucket], state: Any) -> None:
        """Fetch the buckets' state, and those of their parameters that are on the host."""
        self._fetch(buckets, state)
        if self.host_parameters is not None:
            for bucket in buckets:
                bucket.copies_in += self.host_parameters.fetch(bucket.parameters, self._streams)

    @torch.no_grad()
    def _store_parameters(self, bucket: _Bucket) -> None:
        if self.host_parameters is not None:
            bucket.wait_for_copies_in()
            bucket.copies_out += self.host_parameters.store(bucket.parameters, self._streams)

    @torch.no_grad()
    def _store(self, buckets: Sequence[_Bucket], state: Any) -> None:
        for bucket in buckets:
            bucket.wait_for_copies_in()
            bucket.store(state, self._streams)

    def _groups_by_bucket(self, groups: Sequence[dict[str, Any]]) -> Iterator[tuple[_Bucket, Any]]:
        """For each bucket, the parameter groups with those of its parameters that have gradients.

        The last pair has an empty bucket, and the parameters that were added to the optimizer
        after `keep_on_host`; their state stays on the device."""
        last = len(self.buckets)
        parts: list[dict[int, list[Any]]] = [{} for _ in range(last + 1)]
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = parts[self._bucket_of.get(parameter, last)]
                    part.setdefault(index, []).append(parameter)
        for bucket, part in zip([*self.buckets, _Bucket([])], parts, strict=True):
            yield bucket, [{**groups[i], "params": found} for i, found in part.items()]


def _are_same(one: _Tensors, other: _Tensors) -> bool:
    """Whether both have the same tensor objects under the same keys."""
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
