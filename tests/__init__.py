"""The tests, and the helpers that they share, such as `harness`, `rank_processes`, `leaks` and `probes`."""
