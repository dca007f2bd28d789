#!/bin/sh
# Puts the libraries that Mooncake's wheel expects of the system at the folder given,
# build/peers/lib: Debian's packages, unpacked and not installed. Only Mooncake's own processes are
# told of them (LD_LIBRARY_PATH); `kvpool bench` does that. Where apt's lists are empty only root can
# fill them.
set -eu
to=$1
mkdir -p "$to"
to=$(cd "$to" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages="libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1"
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
    echo "no Debian here: install $packages, as your system calls them" >&2
    exit 1
}
cd "$work"
# shellcheck disable=SC2086
apt-get -q download $packages >&2 || { apt-get -q update >&2 && apt-get -q download $packages >&2; }
for package in ./*.deb; do dpkg-deb -x "$package" out; done
find out -name '*.so.*' -exec cp -a {} "$to" \;
ls "$to" >&2
