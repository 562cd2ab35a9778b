#!/usr/bin/env bash
# Make .venv-peers/torchrec: TorchRec for CPUs.
set -euo pipefail

cd "$(dirname "$0")/../../.."
venv=.venv-peers/torchrec
if [[ -e $venv/installed ]]; then
  echo "$venv is installed"
  exit
fi

echo "Installing TorchRec 1.8.0 into $venv"
"${PYTHON:-python3}" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
# First and alone: else a build for CUDA comes.
"${pip[@]}" install torch==2.13.0
# TorchRec asks for fbgemm-gpu, which is for CUDA; this is the same for CPUs.
"${pip[@]}" install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
# With all they need, so that --no-deps leaves the versions to nobody else.
"${pip[@]}" install --no-deps \
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

"$venv/bin/python" -W ignore -c "import torchrec.distributed"
touch "$venv/installed"
echo "Done"
