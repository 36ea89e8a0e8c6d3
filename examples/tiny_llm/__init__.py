"""A small tensor- and pipeline-parallel Llama that talks through this project's groups only."""
