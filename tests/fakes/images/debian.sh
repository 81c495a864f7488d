#!/bin/sh
# What NVIDIA's images have in common, for one in their place: Debian's Python and pip; tritonserver, of the wheel, at
# /opt/tritonserver; an entrypoint.
#
#     debian.sh IMAGE WHEEL
#
# WHEEL is the directory of pytriton's package. It exits with 75 where Debian cannot be had.
set -eu
image=$1 wheel=$2
python=3.11 # Debian's

container=$(buildah from scratch)
root=$(buildah mount "$container")
mmdebstrap --quiet --mode=root --variant=essential \
    --include=passwd,python3-pip,libpython$python,libstdc++6 \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$root" || exit 75

triton=$root/opt/tritonserver
mkdir -p "$triton"
cp -RL "$wheel/tritonserver/bin" "$wheel/tritonserver/backends" "$wheel/tritonserver/caches" "$triton"
cp -RL "$wheel/../nvidia_pytriton.libs" "$triton/lib"
cp -L "$wheel/tritonserver/python_backend_stubs/$python/"* "$triton/backends/python"
chmod +x "$triton/bin/tritonserver" "$triton/backends/python/triton_python_backend_stub"

mkdir "$root/opt/nvidia"
printf '#!/bin/bash\nexec "$@"\n' >"$root/opt/nvidia/nvidia_entrypoint.sh"
chmod +x "$root/opt/nvidia/nvidia_entrypoint.sh"

# The machine's certificates, which its package index may need.
mkdir -p "$root/etc/ssl/certs"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs"

buildah config --entrypoint '["/opt/nvidia/nvidia_entrypoint.sh"]' --cmd /bin/bash \
    --env LD_LIBRARY_PATH=/opt/tritonserver/lib "$container"
buildah umount "$container" >&2
buildah commit --quiet --format docker --rm "$container" "$image" >&2
