"""What operators are told: the statistics of a queue, and the fields of log records."""
