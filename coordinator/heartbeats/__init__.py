"""Heartbeats between the hosts of a group, so that a host that vanishes is named.

Ranks on different hosts hold TCP connections (`links`), chosen by `partners` and opened by `handshake` and `joining`.
`watching` beats on them while somebody waits, and reports the ranks of a host that acknowledges nothing any more.
The handshake opens the connections of leaders too (`coordinator/bootstrap/group_connections.py`).
"""
