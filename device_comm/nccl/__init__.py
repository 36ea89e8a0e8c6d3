"""NCCL: its library, its communicators, and the collectives on top."""
