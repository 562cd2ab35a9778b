#!/usr/bin/env bash
# Makes .venv-peers/tensorflow: TensorFlow, the Keras that its parameter servers need, and torch,
# of which the coordinator takes the layers' first values.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
begin tensorflow "TensorFlow 2.21.0"

pip install tensorflow-cpu==2.21.0 keras==3.15.1 numpy==2.4.6 grpcio==1.85.1 protobuf==7.36.2
pip install --no-deps tf-keras==2.21.0  # It asks for `tensorflow`, which is here by another name.

TF_CPP_MIN_LOG_LEVEL=2 "$VENV/bin/python" -c "import tensorflow, tf_keras, torch"
finish
