"""One ring in shared memory: its writing end, its reading end, and how each waits."""
