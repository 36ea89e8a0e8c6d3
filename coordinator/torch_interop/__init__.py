"""A group as torch sees it: operations of a compiled graph, a process group, a device mesh."""
