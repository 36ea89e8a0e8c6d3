"""The bottom layer: errors, settings, the object codec and liveness. Needs neither torch nor CUDA."""
