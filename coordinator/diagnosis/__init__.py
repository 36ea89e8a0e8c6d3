"""See from outside what the ranks of a host do: everything here reads status pages, and asks no process for help."""
