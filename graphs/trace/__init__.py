"""`trace`: turns a PyTorch model and a batch into the Graph of one training step."""

from graphs.model_calls import TraceError
from graphs.trace.entry_point import trace, trace_variants
from graphs.trace.layers import Layer, StageOf, read_layers
from graphs.trace.mesh_of_absent_ranks import fake_mesh
from graphs.trace.module_step import CapturedStep, loss_index, rehearsed, trace_module
from graphs.trace.traced_device import refuse_meta_batch
