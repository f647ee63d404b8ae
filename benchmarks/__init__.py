"""Measurements of the package, each a module: ``python -m benchmarks.NAME``; results are in ``results/``."""
