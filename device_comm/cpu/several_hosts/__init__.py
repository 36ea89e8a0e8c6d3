"""Collectives on CPU tensors for ranks on several hosts: shared memory inside a host, our TCP connections between."""
