"""Finds cross-entropies in a traced step, and the row-wise operators around them.

`F.cross_entropy` of N rows of V classes is traced as log-softmax, the negative log-likelihood of
the targets (`nll_loss`), and their two backward operators. A result of N x V elements is called
"wide"; log-softmax and both backward operators have one. Hand-written losses read log-softmax in
other ways: they gather the log-probability of a token, or multiply it by the probabilities of a
teacher. A region also includes casts before and after (to float32 and back), arithmetic with
numbers, with wide tensors or with one number per row, and sums over the classes.

Rows are all dimensions but the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.rewrites.chunk_sizes import is_worthwhile

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.detach.default}
_SCALINGS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default}
_ARITHMETIC = {
    *_SCALINGS,
    *(aten.add.Tensor, aten.sub.Tensor, aten.sub.Scalar, aten.add.Scalar, aten.exp.default),
}
_ZEROS = {aten.new_zeros.default, aten.zeros.default}
_REDUCTIONS = {aten.sum.dim_IntList, aten.logsumexp.default}
_SCATTERS = {aten.scatter_add.default, aten.index_put.default}


@dataclass(frozen=True, kw_only=True)
class WideOperators:
    """Row-wise operators around a wide tensor, which are to run in chunks of rows.

    logits: the wide tensor that they start from.
    before: casts and scalings of `logits` that nothing else reads, in order.
    wide: the result of `before`, or log-softmax of that result.
    row_results: forward operators that reduce `wide` to a result per row.
    backward: wide operators of the backward pass, in order; the last makes the gradient.
    """

    logits: fx.Node
    before: tuple[fx.Node, ...]
    wide: fx.Node
    row_results: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]

    @property
    def shape(self) -> torch.Size:
        """Rows and classes."""
        return rows_and_classes(self.wide.meta["val"])

    def has_gradient_dtype(self, node: fx.Node) -> bool:
        """Whether the gradient has the dtype of this wide node, so that it can overwrite it."""
        return bool(node.meta["val"].dtype == self.backward[-1].meta["val"].dtype)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(WideOperators):
    """The nodes of one cross-entropy in a step; `wide` is log-softmax.

    loss: nll_loss; None if there is none.
    after: other forward operators that lead from log-softmax to results per row, in order.
        `row_results` are those of them whose result is not wide.
    others_read: whether anything else reads log-softmax, so that it must be kept whole.
    """

    loss: fx.Node | None
    after: tuple[fx.Node, ...]
    others_read: bool

    @property
    def softmax(self) -> fx.Node:
        return self.wide

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The operators that the chunks replace."""
        return (*self.before, self.softmax, *self.after, *self.backward)


def cross_entropies(graph: fx.Graph) -> Iterator[CrossEntropy]:
    """The cross-entropies of a program that can run in chunks.

    They have enough rows, a loss that reads log-softmax by rows (with class weights it reads by
    columns), and at least one wide operator in the backward pass besides that of log-softmax.
    Without one (the loss sums all elements of log-softmax), recomputing log-softmax is better than
    keeping it to overwrite it.
    """
    for node in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        found = _cross_entropy_around(node)
        if found is not None:
            yield found


def without_views(node: fx.Node) -> fx.Node:
    """The node that this node views, through any chain of views with the same elements."""
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


def erase_unread(nodes: Collection[fx.Node]) -> None:
    """Erase the operators, and views of them, that nothing reads any more.

    nodes: the operators; of those that write into zeros, the zeros are erased as well.
    """
    (graph,) = {node.graph for node in nodes}
    erased: set[Any] = {
        *nodes,
        *(node.args[0] for node in nodes if node.target in _SCATTERS),
    }  # zeros
    for node in reversed(list(graph.nodes)):
        if not node.users and without_views(node) in erased:
            graph.erase_node(node)


def _cross_entropy_around(softmax: fx.Node) -> CrossEntropy | None:
    """The cross-entropy around this log-softmax; None if it cannot run in chunks."""
    value = softmax.meta["val"]
    if value.dim() < 2 or softmax.args[1] not in (value.dim() - 1, -1):
        return None
    if not value.is_contiguous() or not is_worthwhile(*rows_and_classes(value)):
        return None
    users = readers(softmax)
    losses = [user for user in users if user.target is aten.nll_loss_forward.default]
    backwards = [
        user
        for user in users
        if user.target is aten._log_softmax_backward_data.default
        and without_views(user.args[1]) is softmax  # type: ignore[arg-type]
    ]
    if len(losses) > 1 or len(backwards) != 1:
        return None
    for loss in losses:
        _, target, weight, *_ = loss.args
        # gather takes no uint8 targets
        if weight is not None or target.meta["val"].dtype != torch.int64:  # type: ignore[union-attr]
            return None
    region = Region(softmax)
    backward = region.backward_of(backwards[0])
    loss_backwards = [n for n in backward if n.target is aten.nll_loss_backward.default]
    if len(loss_backwards) != len(losses) or any(
        node.args[3] is not None for node in loss_backwards
    ):
        return None
    after, row_results = region.after(set(backward))
    if not (losses or row_results) or backward[0] is backwards[0]:
        return None
    logits, before = region.before(without_views(softmax.args[0]), {softmax})  # type: ignore[arg-type]
    if not logits.meta["val"].is_contiguous():
        return None
    if not all(map(region.reads_rows, (*before, softmax, *after, *backward))):
        return None
    read_outside = (softmax, *row_results, backward[-1])
    if any(user.op == "output" for node in read_outside for user in node.users):
        return None  # outputs of the step are found by their node, which must stay
    return CrossEntropy(
        logits=logits,
        before=before,
        wide=softmax,
        loss=losses[0] if losses else None,
        after=after,
        row_results=row_results,
        backward=backward,
        others_read=not {*losses, *after, *backward}.issuperset(users),
    )


def rows_and_classes(value: torch.Tensor) -> torch.Size:
    """The shape of a wide tensor with all dimensions but the last flattened."""
    return torch.Size((value.shape[:-1].numel(), value.shape[-1]))


def _has_view(value: torch.Tensor, *shape: int) -> bool:
    """Whether the tensor can be viewed in this shape."""
    try:
        value.view(shape)
    except (RuntimeError, ValueError):  # expanded or transposed
        return False
    return True


class Region:
    """Finds the row-wise operators around a wide tensor, such as a log-softmax."""

    def __init__(self, wide: fx.Node) -> None:
        self.wide = wide
        self.shape = rows_and_classes(wide.meta["val"])

    def before(self, node: fx.Node, only_for: set[fx.Node]) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """The logits, and the casts and scalings that make `node` from them.

        only_for: the nodes that may read `node`; a step that others read, too, is not included.
        """
        steps: list[fx.Node] = []
        while self.is_cast_or_scaling(node) and only_for.issuperset(readers(node)):
            steps.insert(0, node)
            only_for = {node}
            node = without_views(node.args[0])  # type: ignore[arg-type]
        return node, tuple(steps)

    def after(self, backward: set[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
        """The forward operators that lead from the wide tensor to results per row, and those of
        them that have such a result. No other operators read their wide results.

        backward: nodes of the backward pass, which are not among them.
        """
        members: set[fx.Node] = set()
        found = readers(self.wide)
        for node in found:  # grows in the loop
            if node in backward or node in members:
                continue
            if self.is_row_result(node):
                members.add(node)
            elif self.is_arithmetic(node):
                members.add(node)
                found += readers(node)
        # take out nodes with a wide result that others read, until there are none
        while wide := {
            node
            for node in members
            if not self.is_row_result(node) and not members.issuperset(readers(node))
        }:
            members -= wide
        after: list[fx.Node] = []
        for node in self.wide.graph.nodes:
            sources = {without_views(source) for source in node.all_input_nodes}
            if node in members and not sources.isdisjoint((self.wide, *after)):
                after.append(node)
        return tuple(after), tuple(filter(self.is_row_result, after))

    def backward_of(self, softmax_backward: fx.Node) -> tuple[fx.Node, ...]:
        """The wide operators of the backward pass around that of log-softmax, in order. Only the
        last one's result is read by other operators."""
        members = {softmax_backward}
        self.add_argument_makers(softmax_backward, members)
        users = readers(softmax_backward)
        while len(users) == 1 and self.is_cast_or_scaling(users[0]):
            members.add(users[0])
            users = readers(users[0])
        return tuple(each for each in softmax_backward.graph.nodes if each in members)

    def add_argument_makers(self, node: fx.Node, members: set[fx.Node]) -> None:
        """Add the operators that make the wide arguments of a member, if only members read them."""
        for argument in node.all_input_nodes:
            maker = without_views(argument)
            if maker in members or not members.issuperset(readers(maker)):
                continue
            if maker.meta.get("partitioner_tag") != node.meta.get("partitioner_tag"):
                continue  # it belongs to the forward pass
            is_nll = maker.target is aten.nll_loss_backward.default
            is_copy = maker.target is aten._to_copy.default and self.is_cast_or_scaling(maker)
            if is_nll or is_copy or self.is_arithmetic(maker) or self.is_scatter(maker):
                members.add(maker)
                self.add_argument_makers(maker, members)

    def is_wide(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.numel() == self.shape.numel()
            and value.shape[-1] == self.shape[1]
            and value.is_contiguous()
        )

    def is_cast_or_scaling(self, node: fx.Node) -> bool:
        """Whether the node casts one wide tensor, or multiplies or divides it by a number."""
        if not self.is_wide(node) or len(node.all_input_nodes) != 1:
            return False
        (source,) = node.all_input_nodes
        if not self.is_wide(source) or node.args[0] is not source:
            return False
        if node.target is aten._to_copy.default:
            return bool(source.meta["val"].device == node.meta["val"].device)
        return node.target in _SCALINGS and not node.kwargs

    def is_arithmetic(self, node: fx.Node) -> bool:
        """Whether each element of the result depends only on elements at its own position, on
        numbers, and on one number per row."""
        if not self.is_wide(node) or node.target not in _ARITHMETIC or node.kwargs:
            return False
        shape = node.meta["val"].shape
        for source in node.all_input_nodes:
            value = source.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.is_complex():
                return False
            # each source is one number, or can be taken apart into rows
            has_rows = value.shape in (shape, (*shape[:-1], 1))
            if value.dim() and not (has_rows and _has_view(value, -1, value.shape[-1])):
                return False
        return True

    def reads_rows(self, node: fx.Node) -> bool:
        """Whether the wide tensors that the node reads, without views, can be viewed as rows x
        classes."""
        values = [without_views(source).meta["val"] for source in node.all_input_nodes]
        return all(v.numel() != self.shape.numel() or _has_view(v, *self.shape) for v in values)

    def is_row_result(self, node: fx.Node) -> bool:
        """Whether the node reduces a wide tensor over the classes, or picks some per row."""
        if node.target not in (*_REDUCTIONS, aten.gather.default, aten.index.Tensor) or node.kwargs:
            return False
        wide, dim, *rest = node.args
        if not isinstance(wide, fx.Node) or not self.is_wide(wide):
            return False
        if node.target is aten.index.Tensor:
            return self._picks_one_per_row(dim, wide.meta["val"])
        last = (wide.meta["val"].dim() - 1, -1)
        if node.target in _REDUCTIONS:
            return len(dim) == 1 and dim[0] in last and len(rest) <= 1  # type: ignore[arg-type, index]
        return dim in last and self._has_rows_of(rest[0], wide.meta["val"])

    def is_scatter(self, node: fx.Node) -> bool:
        """Whether the node is the gradient of picking classes: zeros, except for some classes."""
        if node.target not in _SCATTERS or not self.is_wide(node):
            return False
        args: Any = node.args
        zeros, *rest = args
        value = node.meta["val"]
        if (
            zeros.target not in _ZEROS
            or list(zeros.users) != [node]
            or value.dtype != self.wide.meta["val"].dtype
        ):
            return False
        if node.target is aten.index_put.default:
            index, source, *_ = rest
            return self._picks_one_per_row(index, value) and source.meta["val"].dim() == 1
        dim, index, source = rest
        return (
            dim in (value.dim() - 1, -1)
            and self._has_rows_of(index, value)
            and self._has_rows_of(source, value)
        )

    def _picks_one_per_row(self, index: Any, wide: torch.Tensor) -> bool:
        """Whether the index is [arange(rows), classes], for a tensor of rows x classes."""
        if len(index) != 2 or wide.dim() != 2 or None in index:
            return False
        (rows, classes), n = index, self.shape[0]
        return (
            (rows.target, rows.args) in ((aten.arange.default, (n,)), (aten.arange.start, (0, n)))
            and classes.meta["val"].dtype == torch.int64
            and classes.meta["val"].shape == (n,)
        )

    def _has_rows_of(self, index: Any, wide: torch.Tensor) -> bool:
        """Whether the index (or source) has the rows of a wide tensor, and is contiguous."""
        value = index.meta["val"]
        return bool(value.shape[:-1] == wide.shape[:-1] and value.is_contiguous())
