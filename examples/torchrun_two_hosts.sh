#!/usr/bin/env bash
# Runs a script of this folder on two hosts. On the first host run examples/torchrun_two_hosts.sh 0 ADDRESS, on the
# second the same with 1. ADDRESS is an address of the first host that the second can reach. RANKS is the number of ranks
# per host.
set -euo pipefail
host=${1:?which host this is: 0 or 1}
address=${2:?an address of host 0, not 127.0.0.1}
here=$(dirname "$0")

# Groups listen on the interface that routes to ADDRESS; GROUP_COORDINATOR_INTERFACE selects another. A firewall between
# the hosts must allow Gloo's ports and those of the queues, which GROUP_COORDINATOR_REMOTE_PORTS limits.
# torchrun's store listens on every interface of host 0: make sure that its port is reachable only in your network.
exec "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes 2 --nproc-per-node "${RANKS:-1}" --node-rank "$host" \
    --master-addr "$address" --master-port "${PORT:-29500}" \
    "$here/${SCRIPT:-vllm_style_worker.py}"
