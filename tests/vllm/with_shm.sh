#!/bin/sh
# Runs a command where /dev/shm has the room that vLLM's workers demand. A container often has
# 64 MiB there: then the command gets a mount namespace with a larger one, if the kernel allows it.
set -eu
free_kib=$(df -k --output=avail /dev/shm | tail -n 1)
if [ "$free_kib" -ge 1048576 ] || ! unshare --map-root-user --mount true 2>/dev/null; then
    exec "$@"
fi
echo "/dev/shm has $free_kib KiB: the tests get one of 2 GiB of their own" >&2
exec unshare --map-root-user --mount sh -euc \
    'mount -t tmpfs -o size=2g tmpfs /dev/shm; exec "$@"' sh "$@"
