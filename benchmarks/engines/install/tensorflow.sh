#!/usr/bin/env bash
# Makes .venv-peers/tensorflow: TensorFlow, the Keras that its parameter servers need, and torch,
# of which the coordinator takes the layers' first values.
set -euo pipefail
cd "$(dirname "$0")/../../.."
home=.venv-peers/tensorflow
[ -e "$home/installed" ] && { echo "TensorFlow is installed in $home"; exit 0; }

echo "Installing TensorFlow 2.21.0 into $home (2 GB, some minutes)"
"${PYTHON:-python3}" -m venv --clear "$home"
pip="$home/bin/pip --quiet --disable-pip-version-check"
$pip install torch==2.13.0  # By itself: else it brings CUDA.
$pip install tensorflow-cpu==2.21.0 keras==3.15.1 numpy==2.4.6 grpcio==1.85.1 protobuf==7.36.2
$pip install --no-deps tf-keras==2.21.0  # It asks for `tensorflow`, which is here by another name.

TF_CPP_MIN_LOG_LEVEL=2 "$home/bin/python" -c "import tensorflow, tf_keras, torch"
touch "$home/installed"
echo "TensorFlow is installed in $home"
