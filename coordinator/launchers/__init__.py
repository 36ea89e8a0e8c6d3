"""What the launchers Slurm, mpiexec and Kubernetes' LeaderWorkerSet tell each process that they start."""
