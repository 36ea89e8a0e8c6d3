"""Collectives on CPU tensors: over shared memory on one host, in two levels over several."""
