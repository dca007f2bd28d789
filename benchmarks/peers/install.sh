#!/bin/sh
# Makes the environments of the engines that `kvpool bench peers` measures against: all, or those named.
#   benchmarks/peers/install.sh [nixl|mooncake|ucxx ...]
# Each goes into build/peers/NAME with the newest release of its package. Mooncake's engine is linked
# with RDMA's libraries, which no wheel has: Debian's packages are unpacked beside it, not installed.
set -eu
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || set -- nixl mooncake ucxx

package_of() {
    case $1 in
        nixl) echo nixl ;;
        mooncake) echo mooncake-transfer-engine-non-cuda ;;
        ucxx) echo ucxx-cu12 ;;
        *) echo "no peer is called $1: nixl, mooncake or ucxx" >&2; return 1 ;;
    esac
}

# Puts the libraries of Debian's packages into a folder, unless the machine has them.
rdma_into() {
    ldconfig -p 2>/dev/null | grep -q libibverbs.so.1 && return
    work=$(mktemp -d)
    home=$(pwd)
    cd "$work"
    for name in libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200; do
        apt-get -q download "$name" || { apt-get -q update && apt-get -q download "$name"; }
    done
    for file in *.deb; do dpkg-deb -x "$file" out; done
    cd "$home"
    mkdir -p "$1"
    find "$work/out" -name '*.so.*' -exec cp -P {} "$1" \;
    rm -rf "$work"
}

for name in "$@"; do
    package=$(package_of "$name")
    home=build/peers/$name
    echo "Installing $package into $home"
    "${PYTHON:-python3}" -m venv "$home"
    "$home/bin/pip" --disable-pip-version-check install -q "$package" numpy
    [ "$name" != mooncake ] || rdma_into "$home/debian"
done
