"""All models of the benchmarks: the `examples/` at other sizes, models of libraries, and our own.

Needs only torch until a model of a library is built. `benchmarks.zoo.graphs` has the graphs that
`benchmarks.plan_quality` plans.
"""

from benchmarks.zoo.matrix import LOSS_INSIDE, ZOO, Entry
from benchmarks.zoo.on_gpu import (
    LARGE,
    QUICK,
    SMALL,
    TINY,
    Subject,
    subjects,
    tiny,
    with_fitting_layers,
)
