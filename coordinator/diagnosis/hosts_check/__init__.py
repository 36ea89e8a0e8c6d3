"""`python -m coordinator check --hosts`: find out where a start on several hosts stops, and what it would use.

The steps, each with a deadline: what the launcher says (`launched`), what this host is like (`facts`, `interfaces`,
`reaching`), the meeting of all ranks in their store (`gathering`), and each pair of hosts (`rounds`, `links`). Rank 0
judges what was found (`judging`, `pairs`) and prints it (`report`). `checking` is the order of all that.
"""
