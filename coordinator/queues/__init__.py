"""The queues of a group: what the scheduler broadcasts, and single-reader queues."""
