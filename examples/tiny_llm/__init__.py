"""A small tensor- and pipeline-parallel Llama; all its communication uses this project's groups."""
