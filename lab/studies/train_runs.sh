#!/bin/sh
# Trains the runs of own-runs.yaml on two GPUs: sh lab/studies/train_runs.sh OUT_FOLDER [SECONDS [--dry]]
# Run it in the root of the repository. torchtitan 0.2.2 must be importable. Multicast of NVLink stays off.
export OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
exec python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m lab.studies.train_runs \
  --out "$1/train_runs.json" --seconds "${2:-150}" $3
