#!/usr/bin/env bash
# Makes .venv-peers/deepspeed: torch, and DeepSpeed for CPUs. Needs a C++ compiler.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
begin deepspeed "DeepSpeed 0.19.8"

echo "Building it"
pip install setuptools==80.10.2 wheel==0.45.1 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 \
    ninja==1.13.2 numpy==2.4.6 packaging==26.3 psutil==7.2.2 py-cpuinfo==9.0.0 \
    pydantic==2.14.3 tqdm==4.70.1
# Workers load one extension where they meet, and would compile it then. A wheel that pip made
# before and kept may lack it.
PATH="$VENV/bin:$PATH" DS_ACCELERATOR=cpu DS_BUILD_OPS=0 DS_BUILD_SHM_COMM=1 \
    pip install --no-cache-dir --no-build-isolation --no-deps deepspeed==0.19.8

DS_ACCELERATOR=cpu "$VENV/bin/python" - >/dev/null <<EOF
import deepspeed
import deepspeed.ops.comm.deepspeed_shm_comm_op
EOF
finish
