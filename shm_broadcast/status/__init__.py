"""The status page: what a process does in its groups and queues, in shared memory that others can read."""
