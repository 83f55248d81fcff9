#!/bin/bash
# One training run on a Slurm GPU node; arguments are those of launch/train.py:
#
#   sbatch launch/slurm.sh --config=configs/mistral7b.py --config.seed=1
#
# At its time limit and when it is preempted, the run saves, is queued again and goes on. docs/jobs.md says more.
#SBATCH --job-name=dcache
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=dcache-%j.log

trap true TERM # for this shell; the run gets a SIGTERM of its own
status=0
srun --kill-on-bad-exit=1 .venv/bin/python launch/train.py "$@" --resume || status=$?
if [ "$status" -eq 75 ] || [ "$status" -eq 143 ]; then # stopped by SIGTERM: saved, or before it began
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
