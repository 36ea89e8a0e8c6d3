"""Authenticated ZeroMQ to readers on other hosts: the leg of a queue that shared memory cannot reach.

    keys = RemoteKeys.generate()                                        # in each reader's process
    writer = QueueWriter.create(
        "steps", readers=[0, 1], remote_readers={8: public_key_of_8}, bind_address="10.0.0.1"
    )
    reader = QueueReader.open(handle, key, rank=8, remote_keys=keys)    # on the other host

A page of names: importing it loads zmq, so whoever needs no remote reader imports it late.
"""

from shm_broadcast.endpoint import RemoteEndpoint, RemoteKeys, RemoteSettings
from shm_broadcast.remote_reader import RemoteReader
from shm_broadcast.remote_writer import RemoteWriter

__all__ = ["RemoteEndpoint", "RemoteKeys", "RemoteReader", "RemoteSettings", "RemoteWriter"]
