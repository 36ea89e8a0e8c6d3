"""Suites of other projects, run against this one."""
