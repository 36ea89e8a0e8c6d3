"""The host plane of a group: barriers, objects and CPU memory, over shared memory or over Gloo."""
