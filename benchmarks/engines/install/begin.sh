# What every peer's script begins with: `begin NAME "TITLE"` makes .venv-peers/NAME with torch in it,
# or ends the script if the peer is installed; `finish` marks it as installed.

begin() {
    cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
    VENV=$PWD/.venv-peers/$1
    TITLE=$2
    if [ -e "$VENV/installed" ]; then
        echo "$TITLE is installed in .venv-peers/$1"
        exit 0
    fi
    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        echo "$TITLE's pinned packages are for Python 3.11, and $python is" \
            "$("$python" --version 2>&1): run \`make peer-$1 PYTHON=python3.11\`" >&2
        exit 1
    fi
    echo "Installing $TITLE in .venv-peers/$1, PyTorch (about 200 MB) first"
    "$python" -m venv --clear "$VENV"
    # First and alone: other versions bring gigabytes of GPU libraries.
    pip install torch==2.13.0
}

pip() { "$VENV/bin/pip" "$@" --quiet --disable-pip-version-check; }

finish() {
    touch "$VENV/installed"
    echo "$TITLE is installed in ${VENV#"$PWD/"}"
}
