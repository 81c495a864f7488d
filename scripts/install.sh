#!/bin/sh
# Make a virtual environment of this checkout: PYTHON=python3 scripts/install.sh .venv --editable .[local]
#
# uv installs in a third of pip's time, and is given pip's indexes, links and certificates, which it does not
# read by itself. On a machine without an NVIDIA GPU it takes PyTorch's build for CPUs from PyTorch's index, and
# where that cannot be reached, what pip would find.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} venv=$1
shift

# Standard output is `make predict`'s.
say() { echo "setup: $*" >&2; }
uv_pip() { "$venv/bin/python" -m uv pip install --python "$venv/bin/python" "$@"; }

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
2.* | 3.[0-9])
    say "Python 3.10 or later is needed, not $version: make setup PYTHON=python3.12"
    exit 1
    ;;
esac
say "creating the environment $venv; the first time, this takes up to a few minutes"
if ! "$python" -m venv "$venv"; then
    say "Python has no venv module; on Debian and Ubuntu, install python3-venv"
    exit 1
fi
# An old pip does not find what PIP_CONFIG_FILE says when it is asked.
"$venv/bin/python" -m pip install -q --upgrade pip "uv>=0.13,<0.14"

# pip's settings as uv's, but those that uv has already; a value of several lines is printed with \n.
configuration=$("$venv/bin/python" -m pip config list)
for option in index-url=UV_DEFAULT_INDEX extra-index-url=UV_INDEX find-links=UV_FIND_LINKS cert=SSL_CERT_FILE; do
    variable=${option#*=}
    for section in :env: install global; do # the first counts
        value=$(printf '%s\n' "$configuration" | sed -n "s/^$section\.${option%=*}=.\(.*\).\$/\1/p" |
            sed 's/\\n/ /g; s/  */ /g; s/^ //; s/ $//')
        if [ -n "$value" ] && ! printenv "$variable" >/dev/null; then
            [ "$variable" != UV_FIND_LINKS ] || value=$(echo "$value" | tr ' ' ',')
            export "$variable=$value" UV_INDEX_STRATEGY=unsafe-best-match # as pip, the best of all indexes
        fi
    done
done

if ! command -v nvidia-smi >/dev/null && [ ! -e /dev/nvidiactl ]; then
    say "installing PyTorch for CPUs"
    torch=$(sed -n 's/.*"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)
    (export UV_HTTP_RETRIES=0 UV_HTTP_CONNECT_TIMEOUT=5
        uv_pip --quiet --torch-backend cpu --no-deps "$torch" 2>/dev/null) ||
        say "the index of PyTorch's CPU builds cannot be reached; installing the default build"
fi
say "installing the other packages"
uv_pip "$@"
