"""Replicas of the tiny LLM that lose a worker, go on, and take new ones in. Starts with `make demo-elastic`."""
