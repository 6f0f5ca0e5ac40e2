"""Everything that only a machine with a GPU can tell: `python -m benchmarks.gpu --out DIR`."""
