"""The bottom layer: errors, settings, liveness, the object codec and the queue. Needs neither torch nor CUDA."""
