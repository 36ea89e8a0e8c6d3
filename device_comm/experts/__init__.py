"""What an expert-parallel exchange on a device is to `all2all.py`, whatever implements it."""
