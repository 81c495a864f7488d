#!/bin/sh
# Run a command in an unpacked image as Kubernetes would: user 10001 without capabilities, a process 1, a root
# that is read-only but for a few directories in memory.
#
#     run.sh ROOT WORKDIR COMMAND…
#
# The network is the machine's, and no seccomp filter is set.
set -eu
root=$1 directory=$2
shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,ro,bind "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for place in home/cog run/cog; do
    mount -t tmpfs -o uid=10001,gid=10001 tmpfs "$root/$place"
done
exec setpriv --no-new-privs chroot --userspec=10001:10001 --groups= "$root" \
    /usr/bin/env --chdir="$directory" "$@"
