#!/bin/sh
# Installs what the test bed needs from Debian, where this is root; elsewhere its tests skip.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
OFF=/etc/ssh/sshd_not_to_be_run

packages=
needs() { command -v "$1" >/dev/null || case " $packages " in *" $2 "*) ;; *) packages="$packages $2" ;; esac; }
needs sshd openssh-server
needs ssh openssh-client
needs ip iproute2
needs tc iproute2
[ -n "$packages" ] || exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0

install() {
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends \
        -o Dpkg::Use-Pty=0 $packages </dev/null >"$log" 2>&1
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "Installing$packages for the test bed (no service is started, see $OFF)"
case "$packages" in *openssh-server*)
    # Debian's own switch: neither this installation nor a later boot starts the service.
    mkdir -p /etc/ssh
    [ -e "$OFF" ] || echo "Made for the Parallax test bed; remove it to run sshd." >"$OFF" ;;
esac
install || { apt-get update --quiet=2 >"$log" 2>&1 && install; } || {
    echo "That failed, so tests of several hosts will skip: $(tail -n 1 "$log")"
    exit 0
}
