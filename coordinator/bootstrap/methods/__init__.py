"""Ways to meet that need no launcher's store: in a directory of one host, and at an address where rank 0 serves."""
