"""The secret of a job: how it is read, the keys derived from it, and the encrypted store in which its ranks meet."""
