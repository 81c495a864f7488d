#!/bin/sh
# An image in the place of one of NVIDIA's, on that of debian.sh: an engine's packages by name only, and what they need.
#
#     engine.sh IMAGE DEBIAN LIBRARY ENGINE==VERSION torch==VERSION REQUIREMENT…
#
# The engine says that it needs the requirements, which are installed. TensorRT-LLM's package is the fake, and LIBRARY
# the stand-in for its backend. It exits with 75 where the package index cannot be had.
set -eu
image=$1 library=$3 engine=$4 torch=$5
container=$(buildah from "$2")
root=$(buildah mount "$container")
shift 5

packages=$(echo "$root"/usr/local/lib/python3.*/dist-packages)
for package in "$engine" "$torch"; do
    about=$packages/$(echo "$package" | sed s/==/-/).dist-info
    mkdir "$about"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "${package%==*}" "${package#*==}" >"$about/METADATA"
    touch "$about/RECORD"
done
printf 'Requires-Dist: %s\n' torch "$@" >>"$packages/$(echo "$engine" | sed s/==/-/).dist-info/METADATA"
if [ "${engine%==*}" = tensorrt_llm ]; then
    cp -R "$(dirname "$0")/../tensorrt_llm" "$packages"
    mkdir "$root/opt/tritonserver/backends/tensorrtllm"
    cp -L "$library" "$root/opt/tritonserver/backends/tensorrtllm"
fi
buildah run "$container" -- env PIP_BREAK_SYSTEM_PACKAGES=1 \
    python3 -m pip install --quiet --no-cache-dir "$@" >&2 || exit 75
buildah umount "$container" >&2
buildah commit --quiet --format docker --rm "$container" "$image" >&2
