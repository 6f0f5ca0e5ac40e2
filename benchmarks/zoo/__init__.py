"""All models of the benchmarks: those of `examples/` at other sizes, libraries', and some written.

Needs torch alone until a model of a library is built. `benchmarks.zoo.graphs` has what
`benchmarks.plan_quality` plans.
"""

from benchmarks.zoo.matrix import LOSS_INSIDE, ZOO, Entry
from benchmarks.zoo.on_gpu import LARGE, QUICK, SMALL, TINY, Subject, fitted, subjects, tiny
