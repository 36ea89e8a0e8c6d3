"""Write this process's Python stacks when another process asks, and ask others for theirs; see `DESIGN.md`."""
