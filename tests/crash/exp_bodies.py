import time, faulthandler, sys
from tests.worlds import *
def deadline(rank, world_size, directory, name):
    with world(rank, world_size, directory) as group:
        out = []
        if rank == 1: time.sleep(2.5)
        peer = 1 if rank == 0 else 0
        f=open(f"/tmp/exp/st{rank}","w")
        faulthandler.dump_traceback_later(2.0, file=f)
        out.append(outcome_of(lambda: WAITS[name](group, peer, 0.5)))
        faulthandler.cancel_dump_traceback_later()
        f.close()
        out.append(outcome_of(lambda: group.barrier()))
    return out
