"""Tests, and the helpers that they share: `harness`, `rank_main`, `leaks`, `probes`."""
