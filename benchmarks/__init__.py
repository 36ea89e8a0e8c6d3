"""Benchmarks: this package and installed alternatives, measured alternately in one run."""
