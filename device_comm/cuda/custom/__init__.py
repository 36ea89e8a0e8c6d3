"""The custom all-reduce: kernel launches, the peer memory that they write, captured graphs."""
