"""How ranks become a group: rendezvous, agreement on facts, creation, and the status store."""
