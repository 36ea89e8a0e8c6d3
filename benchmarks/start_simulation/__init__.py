"""How long a world of thousands of ranks takes to start, simulated with costs that were measured here.

`requests` records what a rank asks the store, from the code that real ranks run. `costs` measures what an answer costs
the process that serves the store, and what asking costs a rank. `model` lets thousands of ranks ask one store by these.
"""
