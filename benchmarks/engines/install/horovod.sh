#!/usr/bin/env bash
# Makes .venv-peers/horovod: torch, and Horovod built against it. Needs a C++20 compiler and make.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
VERSION=0.28.1
begin horovod "Horovod $VERSION"

sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
# Later releases of CMake refuse Horovod's gloo, later ones of setuptools lack pkg_resources.
pip install cmake==3.31.10 setuptools==80.10.2 wheel==0.45.1 \
    cffi==2.0.0 cloudpickle==3.1.2 numpy==2.4.6 packaging==26.3 psutil==7.2.2 pyyaml==6.0.3
pip download --no-deps --no-build-isolation --dest "$sources" "horovod==$VERSION"
tar -xzf "$sources/horovod-$VERSION.tar.gz" -C "$sources" --strip-components=1
# It asks for C++14, but torch's headers need C++20.
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' \
    "$sources/CMakeLists.txt" "$sources/horovod/torch/CMakeLists.txt"

echo "Building it with gloo (several minutes)"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
# Its own choice, eight compilers at once, may take more memory than there is.
export MAKEFLAGS="-j$(nproc)" HOROVOD_CMAKE="$VENV/bin/cmake"
PATH="$VENV/bin:$PATH" pip install --no-build-isolation --no-deps "$sources"

"$VENV/bin/python" -c "import horovod.torch as hvd; assert hvd.gloo_built()"
finish
