"""Cross-entropies in a traced step: where they are, and which operators around them are row-wise.

`F.cross_entropy` of N rows of V classes is traced as log-softmax, the negative log-likelihood of
the targets (`nll_loss`), and their two backward operators, each with a result of N x V elements
("wide"). Casts before and after (to float32 and back) and scaling by numbers belong to the region,
as does what label smoothing adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from graphs.rewrites.row_chunks import is_worthwhile

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.detach.default}
_SCALED = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default}
_ROW_SUM = aten.sum.dim_IntList


@dataclass(frozen=True)
class CrossEntropy:
    """One cross-entropy in a step, by its nodes.

    before: casts and scalings of `logits` whose only reader is log-softmax, in order.
    softmax, loss: log-softmax and nll_loss.
    row_sums: sums of log-softmax over the classes (label smoothing).
    backward: wide operators of the backward pass, in order; the last makes the gradient.
    others_read: whether something else reads log-softmax, so that it must be kept whole.
    """

    logits: fx.Node
    before: tuple[fx.Node, ...]
    softmax: fx.Node
    loss: fx.Node
    row_sums: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    others_read: bool

    @property
    def shape(self) -> torch.Size:
        """Rows and classes."""
        shape: torch.Size = self.softmax.meta["val"].shape
        return shape

    @property
    def target(self) -> fx.Node:
        return self.loss.args[1]  # type: ignore[return-value]

    def has_form_of_gradient(self, node: fx.Node) -> bool:
        """Whether the gradient has the dtype of this wide node."""
        return bool(node.meta["val"].dtype == self.backward[-1].meta["val"].dtype)


def cross_entropies(graph: fx.Graph) -> Iterator[CrossEntropy]:
    """Those of enough rows, whose loss has no class weights (which are read column by column)."""
    for node in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        found = _read(node)
        if found is not None:
            yield found


def without_views(node: fx.Node) -> fx.Node:
    """What the node is a view of, as long as that has the same elements."""
    while node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def readers(node: fx.Node) -> list[fx.Node]:
    """The operators that read the node, through views."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        through = readers(user) if user.target in _VIEWS else [user]
        found |= dict.fromkeys(through)
    return list(found)


def erase_unread(region: CrossEntropy) -> None:
    """Erase operators of the region, and views of them, that nothing reads any more."""
    own = {*region.before, region.softmax, *region.row_sums, *region.backward}
    for node in reversed(list(region.softmax.graph.nodes)):
        if not node.users and without_views(node) in own:
            node.graph.erase_node(node)


def _read(softmax: fx.Node) -> CrossEntropy | None:
    value = softmax.meta["val"]
    if value.dim() != 2 or softmax.args[1] not in (1, -1) or not value.is_contiguous():
        return None
    if not is_worthwhile(*value.shape):
        return None
    users = readers(softmax)
    losses = [user for user in users if user.target is aten.nll_loss_forward.default]
    backwards = [
        user
        for user in users
        if user.target is aten._log_softmax_backward_data.default
        and without_views(user.args[1]) is softmax  # type: ignore[arg-type]
    ]
    if len(losses) != 1 or len(backwards) != 1 or losses[0].args[2] is not None:
        return None
    region = _Region(softmax)
    backward = region.backward_of(backwards[0])
    made = [n for n in backward if n.target is aten.nll_loss_backward.default]
    if len(made) != 1 or made[0].args[3] is not None:
        return None
    logits, before = region.before()
    if not logits.meta["val"].is_contiguous():
        return None
    row_sums = tuple(user for user in users if _is_row_sum(user))
    if any(user.op == "output" for n in (softmax, *row_sums, backward[-1]) for user in n.users):
        return None  # handed out by the step, which knows it by its node
    others = set(users) - {losses[0], *row_sums, *backward}
    return CrossEntropy(
        logits=logits,
        before=before,
        softmax=softmax,
        loss=losses[0],
        row_sums=row_sums,
        backward=backward,
        others_read=bool(others),
    )


def _is_row_sum(node: fx.Node) -> bool:
    return node.target is _ROW_SUM and node.args[1:] in (([1],), ([-1],)) and not node.kwargs


class _Region:
    """The row-wise operators around a log-softmax."""

    def __init__(self, softmax: fx.Node) -> None:
        self.softmax = softmax
        self.shape = softmax.meta["val"].shape

    def before(self) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """The logits, and what is done to them before log-softmax only."""
        steps: list[fx.Node] = []
        node, reader = without_views(self.softmax.args[0]), self.softmax  # type: ignore[arg-type]
        while self.is_cast_or_scaled(node) and readers(node) == [reader]:
            steps.insert(0, node)
            node, reader = without_views(node.args[0]), node  # type: ignore[arg-type]
        return node, tuple(steps)

    def backward_of(self, softmax_backward: fx.Node) -> tuple[fx.Node, ...]:
        """Wide operators of the backward pass that are read by each other alone."""
        members = {softmax_backward}
        self._add_made_for(softmax_backward, members)
        node = softmax_backward
        while True:
            users = readers(node)
            if len(users) != 1 or not self.is_cast_or_scaled(users[0]):
                break
            node = users[0]
            members.add(node)
        return tuple(each for each in softmax_backward.graph.nodes if each in members)

    def _add_made_for(self, node: fx.Node, members: set[fx.Node]) -> None:
        """Add the operators that make the wide arguments of a member, if for members only."""
        for argument in node.all_input_nodes:
            maker = without_views(argument)
            if maker in members or not members.issuperset(readers(maker)):
                continue
            is_sum = maker.target is aten.add.Tensor and not maker.kwargs
            is_nll = maker.target is aten.nll_loss_backward.default
            if is_nll or self.is_cast_or_scaled(maker) or (is_sum and self.is_wide(maker)):
                members.add(maker)
                self._add_made_for(maker, members)

    def is_wide(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.numel() == self.shape.numel()
            and value.shape[-1] == self.shape[1]
            and value.is_contiguous()
        )

    def is_cast_or_scaled(self, node: fx.Node) -> bool:
        """Whether it changes the dtype of one wide tensor, or multiplies it by a number."""
        if not self.is_wide(node) or len(node.all_input_nodes) != 1:
            return False
        (source,) = node.all_input_nodes
        if not self.is_wide(source) or node.args[0] is not source:
            return False
        if node.target is aten._to_copy.default:
            return bool(source.meta["val"].device == node.meta["val"].device)
        return node.target in _SCALED and not node.kwargs
