"""All ranks agree on the facts of a group through a store, before anything is built."""
