"""Adjustments to tracing, so that a trace records the operators that eager mode runs."""

from graphs.capture.as_eager.attention_fast_path import refuse_fast_path
from graphs.capture.as_eager.autocast import casts_once
from graphs.capture.as_eager.checked_values import CheckError, record_checks
from graphs.capture.as_eager.drawn_values import generator_states
from graphs.capture.as_eager.gradients import autograd_keys_included
from graphs.capture.as_eager.kernels import eager_kernels
from graphs.capture.as_eager.known_values import (
    Guard,
    KnowingMode,
    Leaf,
    ReadsRandomNumbers,
    Recipe,
    evaluate,
)
from graphs.capture.as_eager.transformers_branches import (
    caching_configs,
    eager_branches,
    no_cache,
    refuse_caches,
)
