#!/bin/sh
# Everything that waits for a real GPU, on one in under eight minutes: FOLDER/gpu.json and FOLDER/gpu.md,
# which say pass or fail for each line.  In rehearsal (a pretend GPU; seconds are not judged there):
#     REHEARSAL_GPUS=1 PY="python -m tests.rehearsal.module" PYTHONPATH=.:src bench/gpu/all.sh FOLDER --small
set -e
exec ${PY:-python -m} bench.gpu.all "$@"
