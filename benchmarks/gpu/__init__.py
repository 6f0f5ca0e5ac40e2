"""Everything that must be checked or measured on a GPU: `python -m benchmarks.gpu --out DIR`."""
