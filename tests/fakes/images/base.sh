#!/bin/sh
# An image in the place of NVIDIA's: Debian's Python and pip; tritonserver, of the wheel, at /opt/tritonserver, with the
# stand-in for TensorRT-LLM's backend; the fake of TensorRT-LLM's package, and what it is installed with; an entrypoint.
#
#     base.sh IMAGE WHEEL LIBRARY tensorrt_llm==VERSION torch==VERSION transformers==VERSION
#
# WHEEL is the directory of pytriton's package, LIBRARY the stand-in. It exits with 75 where Debian or the package index
# cannot be had.
set -eu
image=$1 wheel=$2 library=$3
shift 3
fakes=$(dirname "$0")/..
python=3.11 # Debian's

container=$(buildah from scratch)
root=$(buildah mount "$container")
mmdebstrap --quiet --mode=root --variant=essential \
    --include=passwd,python3-pip,libpython$python,libstdc++6 \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$root" || exit 75

triton=$root/opt/tritonserver
mkdir -p "$triton/backends/tensorrtllm"
cp -RL "$wheel/tritonserver/bin" "$wheel/tritonserver/backends" "$wheel/tritonserver/caches" "$triton"
cp -RL "$wheel/../nvidia_pytriton.libs" "$triton/lib"
cp -L "$wheel/tritonserver/python_backend_stubs/$python/"* "$triton/backends/python"
cp -L "$library" "$triton/backends/tensorrtllm"
chmod +x "$triton/bin/tritonserver" "$triton/backends/python/triton_python_backend_stub"

packages=$root/usr/local/lib/python$python/dist-packages
cp -R "$fakes/tensorrt_llm" "$packages"
for package in "$1" "$2"; do
    about=$packages/$(echo "$package" | sed s/==/-/).dist-info
    mkdir "$about"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "${package%==*}" "${package#*==}" >"$about/METADATA"
    touch "$about/RECORD"
done
printf 'Requires-Dist: %s\n' torch "$3" 'numpy<2' 'pydantic>=2' >>"$packages/$(echo "$1" | sed s/==/-/).dist-info/METADATA"

mkdir "$root/opt/nvidia"
printf '#!/bin/bash\nexec "$@"\n' >"$root/opt/nvidia/nvidia_entrypoint.sh"
chmod +x "$root/opt/nvidia/nvidia_entrypoint.sh"

# The machine's certificates, which its package index may need.
mkdir -p "$root/etc/ssl/certs"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs"
buildah run "$container" -- env PIP_BREAK_SYSTEM_PACKAGES=1 \
    python3 -m pip install --quiet --no-cache-dir "$3" 'numpy<2' pydantic >&2 || exit 75

buildah config --entrypoint '["/opt/nvidia/nvidia_entrypoint.sh"]' --cmd /bin/bash \
    --env LD_LIBRARY_PATH=/opt/tritonserver/lib "$container"
buildah umount "$container" >&2
buildah commit --quiet --format docker --rm "$container" "$image" >&2
