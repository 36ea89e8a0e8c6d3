"""Parallel groups for LLM serving."""
