"""Collectives on CPU tensors for ranks on several hosts: shared memory inside a host, Gloo between the hosts."""
