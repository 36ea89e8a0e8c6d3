"""Readers on other hosts: encrypted connections, and what each reader has acknowledged."""
