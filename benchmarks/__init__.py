"""Benchmarks: ours and what else is installed, in turn and in one run."""
