#!/usr/bin/env bash
# A job for Slurm: sbatch examples/slurm_job.sh. MODEL is a checkpoint directory that all nodes see.
#SBATCH --job-name=tiny-llm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=00:10:00
set -euo pipefail
model=${MODEL:?a checkpoint directory that all nodes see}

# --resv-ports reserves a port for the store, if slurm.conf has MpiParams=ports=FIRST-LAST. Elsewhere set PORT to one that
# is free on the first node. With --kill-on-bad-exit all tasks end when one has failed.
if [[ -n ${PORT:-} ]]; then
    ports=() method="slurm://:$PORT"
else
    ports=(--resv-ports=1) method=slurm://
fi
exec srun --kill-on-bad-exit=1 "${ports[@]}" \
    "${PYTHON:-python3}" -m examples.tiny_llm --model "$model" --init-method "$method" "$@"
