"""Collectives on CUDA tensors: our kernels and NCCL, the driver, the topology of the devices."""
