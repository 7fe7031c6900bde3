#!/bin/sh
# Trains the runs of own-runs.yaml on two GPUs: sh kernels/calibrate/studies/train_runs.sh OUT_FOLDER [SECONDS [--dry]]
# torchtitan 0.2.2 must be importable; nothing else that it asks for is needed. Multicast of NVLink stays off.
export OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
exec python3 -m torch.distributed.run --standalone --nproc-per-node 2 kernels/calibrate/studies/train_runs.py \
  --out "$1/train_runs.json" --seconds "${2:-150}" $3
