#!/usr/bin/env bash
# Make .venv-peers/torchrec: TorchRec for CPUs.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
begin torchrec "TorchRec 1.8.0"

# TorchRec asks for fbgemm-gpu, which is for CUDA; this is the same for CPUs.
pip install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
# With all they need, so that --no-deps leaves the versions to nobody else.
pip install --no-deps \
  cloudpickle==3.1.2 \
  iopath==0.1.10 \
  lightning-utilities==0.15.3 \
  mypy-extensions==1.2.0 \
  numpy==2.4.6 \
  packaging==26.3 \
  portalocker==4.4.2 \
  pyre-extensions==0.0.32 \
  pyvers==0.2.3 \
  tensordict==0.15.3 \
  torchmetrics==1.0.3 \
  tqdm==4.70.1 \
  typing-inspect==0.9.0

"$VENV/bin/python" -W ignore -c "import torchrec.distributed"
finish
