"""Write to and read from one ring in shared memory."""
