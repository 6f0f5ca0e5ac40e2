"""One stage of a pipeline: how many micro-batches it has in flight, and what else it holds.

    pipeline = Pipeline(stage=0, n_stages=4, n_microbatches=8)
    solve(stage, micro_batch, budget="16GB", pipeline=pipeline)

A micro-batch is in flight from the beginning of its forward pass to the end of its backward pass.
Besides the one that runs, each holds what its forward pass saved; the plan decides how much that is
(`Graph.n_in_flight`). The plan has no influence on the following, which become resident tensors of
the graph. They are what `torch.distributed.pipelining` (torch 2.13) holds when it runs a step with
`return_outputs=False`:

- buffers for the inputs and targets of all micro-batches, and for the gradients of their outputs;
- sent tensors, for as long as the schedule holds on to them: under 1F1B the gradient of the last
  input, and one output of the warm-up; under GPipe and interleaved the gradients of all inputs and
  all outputs;
- the parameters' gradients, from the first backward pass on. Not under GPipe, where all forward
  passes have run by then: the first backward pass, before any gradients exist, has more
  micro-batches in flight (`Graph.in_turn`);
- the losses of all micro-batches; for those in flight also the random states, and what a loss
  outside of the stage saves for its backward pass (cross-entropy: as much as its logits);
- under interleaved, the parameters, gradients and optimizer state of the rank's other stages, which
  are assumed to be like this one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphs.graph import RANDOM_STATE, Graph, Kind, Tensor

SCHEDULES = ("1f1b", "gpipe", "interleaved")
_PREFIX = "pipeline."
"""Prefix of the names of the tensors that are added to the step of one micro-batch."""
_OTHER_STAGES = "other_stages."
STAGE_KINDS: tuple[Kind, ...] = ("parameter", "buffer", "gradient", "optimizer_state")
"""The kinds of tensors that every stage of a rank holds for the whole step."""


class PipelineError(ValueError):
    """The given stage cannot be planned; the message says what would be right."""


@dataclass(frozen=True)
class Pipeline:
    """A stage's place in a pipeline, and the pipeline's schedule.

    stage: index of the stage, from 0.
    n_stages: stages of the whole pipeline.
    n_microbatches: micro-batches per optimizer step.
    schedule: "1f1b", "gpipe" or "interleaved": the order in which Schedule1F1B, ScheduleGPipe or
        ScheduleInterleaved1F1B of `torch.distributed.pipelining` runs the passes.
    stages_per_rank: stages on one rank, more than one only for "interleaved": stage i is on rank
        i % (n_stages / stages_per_rank).

    Raises PipelineError if these do not describe a possible stage.
    """

    stage: int
    n_stages: int
    n_microbatches: int
    schedule: str = "1f1b"
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        for name in ("n_stages", "n_microbatches", "stages_per_rank", "stage"):
            value, least = getattr(self, name), 0 if name == "stage" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PipelineError(
                    f"{name} is {value!r}; expected a whole number of at least {least}"
                )
        if self.stage >= self.n_stages:
            raise PipelineError(
                f"stage is {self.stage} of {self.n_stages} stages; give 0 to {self.n_stages - 1}"
            )
        if self.schedule not in SCHEDULES:
            raise PipelineError(f"schedule is {self.schedule!r}; one of {', '.join(SCHEDULES)}")
        if self.schedule != "interleaved" and self.stages_per_rank != 1:
            raise PipelineError(
                f"stages_per_rank is {self.stages_per_rank}; only schedule='interleaved' has more "
                "than one stage on a rank"
            )
        if self.n_stages % self.stages_per_rank:
            raise PipelineError(
                f"{self.n_stages} stages cannot be divided into {self.stages_per_rank} per rank"
            )
        if self.schedule == "interleaved" and self.n_microbatches % self._n_rounds:
            raise PipelineError(
                f"n_microbatches is {self.n_microbatches}; interleaved schedules run them in "
                f"{self._n_rounds} rounds of equal size: give a multiple of {self._n_rounds}"
            )

    def check_runs(self) -> None:
        """Raise PipelineError if PyTorch's schedule would refuse to run this pipeline."""
        if self.schedule == "1f1b" and self.n_microbatches < self.n_stages:
            raise PipelineError(
                f"n_microbatches is {self.n_microbatches}; Schedule1F1B runs at least as many "
                f"micro-batches as stages: give {self.n_stages} or more, or schedule='gpipe'"
            )

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.n_stages - 1

    @property
    def n_ranks(self) -> int:
        return self.n_stages // self.stages_per_rank

    @property
    def _n_rounds(self) -> int:
        return max(1, self.n_microbatches // self.n_ranks)

    @property
    def n_in_flight(self) -> int:
        """The most micro-batches in flight on this rank, counted for each of its stages."""
        if self.schedule == "gpipe":
            return self.n_microbatches
        return min(self._n_warm_up + 1, self.n_microbatches * self.stages_per_rank)

    @property
    def _n_warm_up(self) -> int:
        """Forward passes that the rank runs before it alternates them with backward passes."""
        from_last = self.n_ranks - 1 - self.stage % self.n_ranks
        if self.schedule == "1f1b":
            return from_last
        before_last_rank = (self.stages_per_rank - 1) * (self.n_microbatches // self._n_rounds)
        return before_last_rank + 2 * from_last

    @property
    def passes(self) -> frozenset[tuple[int, tuple[int, ...]]]:
        """The distinct situations in which the rank runs a forward or backward pass.

        Each is (which of the rank's stages runs, counted from 0; for each of these stages, how many
        other micro-batches it has in flight then).
        """
        n_local, n_passes = self.stages_per_rank, self.n_microbatches * self.stages_per_rank
        n_warm_up = n_passes if self.schedule == "gpipe" else min(self._n_warm_up, n_passes)
        per_round = self.n_microbatches // self._n_rounds
        in_flight, found = [0] * n_local, set()  # in_flight: by stage of the rank
        # n_warm_up forward passes, then forward and backward in turn, then backward passes only
        for step in range(n_warm_up + n_passes):
            if step < n_passes:
                local = step // per_round % n_local
                found.add((local, tuple(in_flight)))
                in_flight[local] += 1
            if step >= n_warm_up:
                local = n_local - 1 - (step - n_warm_up) // per_round % n_local
                in_flight[local] -= 1
                found.add((local, tuple(in_flight)))
        return frozenset(found)

    @property
    def words(self) -> str:
        """For reports: "stage 0 of 4, 1f1b, 8 micro-batches"."""
        counted = f"{self.n_microbatches} micro-batch{'es' if self.n_microbatches > 1 else ''}"
        return f"stage {self.stage} of {self.n_stages}, {self.schedule}, {counted}"


def pipeline_of(environment: Mapping[str, Any]) -> Pipeline | None:
    """The pipeline recorded in the environment of a graph or plan; None if the step is not a stage
    of one.

    Raises PipelineError for a malformed record.
    """
    found = environment.get("pipeline")
    if not isinstance(found, Mapping):
        return None
    names = {field.name for field in dataclasses.fields(Pipeline)}
    if not {"stage", "n_stages", "n_microbatches"} <= found.keys() <= names:
        raise PipelineError(f"pipeline is {dict(found)!r:.80}; expected the fields of Pipeline")
    return Pipeline(**found)


def with_pipeline(graph: Graph, pipeline: Pipeline | None) -> Graph:
    """The step of one micro-batch, plus the other micro-batches in flight and the memory that the
    pipeline takes.

    pipeline: None: the graph is returned unchanged.
    """
    if pipeline is None:
        return graph
    added = tuple(
        Tensor(f"{_PREFIX}{name}", size_bytes, kind)
        for name, size_bytes, kind in _added_tensors(graph, pipeline)
        if size_bytes
    )
    # If all outputs of the stage have the same dtype, so have those of other micro-batches and
    # their gradients.
    dtype_of = graph.meta.dtype_of
    output_dtypes = {
        dtype_of[t.name]
        for t in graph.tensors
        if t.kind in ("output", "tangent") and t.name in dtype_of
    }
    dtypes = {
        dtype: [name for name in names if not name.startswith(_PREFIX)]
        for dtype, names in graph.meta.dtypes.items()
    }
    if len(output_dtypes) == 1:
        added_outputs = [each.name for each in added if each.kind in ("output", "tangent")]
        dtypes[output_dtypes.pop()] += added_outputs
    meta = graph.meta.with_environment(pipeline=dataclasses.asdict(pipeline))
    return dataclasses.replace(
        graph,
        tensors=(*graph.tensors, *added),
        meta=dataclasses.replace(meta, dtypes=dtypes),
        n_in_flight=pipeline.n_in_flight,
        others_bytes=_sent_bytes(graph, pipeline) if _runs_in_turn(graph, pipeline) else 0,
        in_turn=_runs_in_turn(graph, pipeline),
    )


def _runs_in_turn(graph: Graph, pipeline: Pipeline) -> bool:
    """Whether all forward passes run first, and gradients accumulate only over the backward passes
    of this step (GPipe). What a micro-batch has sent then takes the place of what it saved."""
    return pipeline.schedule == "gpipe" and bool(graph.accumulated)


def _output_bytes_by_phase_and_kind(graph: Graph) -> Counter[tuple[str, str]]:
    """Bytes of the outputs that nodes make for a micro-batch, except accumulated gradients of
    parameters: (phase of the node, kind of the tensor) -> bytes."""
    output_bytes: Counter[tuple[str, str]] = Counter()
    for name in graph.outputs:
        if name in graph.producer and name not in graph.accumulated:
            tensor = graph.tensor_by_name[name]
            output_bytes[graph.producer[name].phase, tensor.kind] += tensor.size_bytes
    return output_bytes


def _sent_bytes(graph: Graph, pipeline: Pipeline) -> int:
    """Bytes that the stage sends for a micro-batch: the gradients of its inputs, and its outputs
    unless it is the last stage."""
    output_bytes = _output_bytes_by_phase_and_kind(graph)
    outputs_bytes = 0 if pipeline.is_last else output_bytes["forward", "output"]
    return output_bytes["backward", "gradient"] + outputs_bytes


def _saved_by_loss_bytes(graph: Graph) -> int:
    """Bytes that a loss outside of the stage saves for its backward pass: tensors made before its
    value is computed and read again afterwards.

    No schedule touches these. The stage's own tensors that the loss reads are not among them; they
    are counted with what the stage saves.
    """
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    values = [
        name
        for name in graph.outputs
        if name in graph.producer
        and graph.producer[name].phase == "outside"
        and graph.tensor_by_name[name].kind not in ("gradient", "tangent")
    ]
    if not values:
        return 0
    # the loss's forward part ends at the node that makes its value; what follows is its backward
    end = 1 + max(position[graph.producer[name].name] for name in values)
    made = {
        graph.root(name)
        for node in graph.nodes[:end]
        if node.phase == "outside"
        for name in node.outputs
    }
    made = {name for name in made if graph.producer[name].phase == "outside"}
    read = {graph.root(name) for node in graph.nodes[end:] for name in node.inputs}
    return sum(graph.tensor_by_name[name].size_bytes for name in made & read - {*values})


def is_of_other_stages(name: str) -> bool:
    """Whether a tensor of this name stands for what the rank's other stages hold."""
    return name.startswith(f"{_PREFIX}{_OTHER_STAGES}")


def moved_to_stage(graph: Graph, pipeline: Pipeline) -> Graph:
    """The step of a stage (`with_pipeline`) moved to another place of the pipeline, without tracing
    again.

    pipeline: the other place. It must be the first (last) stage exactly if the graph was traced as
        the first (last) one, and have as many micro-batches.
    """
    own_tensors = tuple(tensor for tensor in graph.tensors if not tensor.name.startswith(_PREFIX))
    return with_pipeline(dataclasses.replace(graph, tensors=own_tensors, n_in_flight=1), pipeline)


def _added_tensors(graph: Graph, pipeline: Pipeline) -> Iterator[tuple[str, int, Kind]]:
    """Name, bytes and kind of each resident tensor that is added to the step of one micro-batch."""
    resident_bytes: Counter[str] = Counter()
    for tensor in graph.resident:
        if tensor.alias_of is None and tensor.name not in graph.meta.device_bytes:
            resident_bytes[tensor.kind] += tensor.size_bytes
    output_bytes = _output_bytes_by_phase_and_kind(graph)
    n_runs = pipeline.n_microbatches * pipeline.stages_per_rank
    yield "inputs", (n_runs - 1) * resident_bytes["input"], "input"
    if not pipeline.is_last:
        yield "output_gradients", (n_runs - 1) * resident_bytes["tangent"], "tangent"
    gradient_kinds = ("gradient", "tangent")
    loss_bytes = sum(
        n
        for (phase, kind), n in output_bytes.items()
        if phase == "outside" and kind not in gradient_kinds
    )
    yield "losses", (pipeline.n_microbatches - 1) * loss_bytes, "output"
    yield "saved_by_loss", (pipeline.n_in_flight - 1) * _saved_by_loss_bytes(graph), "output"
    state = graph.tensor_by_name.get(RANDOM_STATE)
    if state is not None:
        yield "random_states", (pipeline.n_in_flight - 1) * state.size_bytes, "buffer"
    n_others = pipeline.n_in_flight - 1
    n_gradients = min(1, n_runs - 1) if pipeline.schedule == "1f1b" else n_runs - 1
    if not _runs_in_turn(graph, pipeline):  # otherwise `others_bytes` of the graph counts them
        yield "sent_gradients", n_gradients * output_bytes["backward", "gradient"], "gradient"
    if not pipeline.is_last:
        n_outputs = {"1f1b": min(1, n_others), "gpipe": 0, "interleaved": n_runs - 1 - n_others}
        yield (
            "sent_outputs",
            n_outputs[pipeline.schedule] * output_bytes["forward", "output"],
            "output",
        )
    if pipeline.schedule == "interleaved":
        for kind in STAGE_KINDS:
            others_bytes = (pipeline.stages_per_rank - 1) * resident_bytes[kind]
            yield f"{_OTHER_STAGES}{kind}", others_bytes, kind
