"""Which algorithm carries a CUDA call: a pure decision, its table, and a file that replaces it."""
