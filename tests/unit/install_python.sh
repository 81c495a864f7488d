#!/bin/sh
# Python for scripts/install.sh, and that of the environment which it makes: notes how it is called.
echo "$*" >> "$CALLS"
case "$*" in
    -c*) echo "$VERSION" ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip config"*) [ -z "$REAL_PYTHON" ] || exec "$REAL_PYTHON" "$@" ;;
    *"pip install -q"*) exit "$PIP" ;;
    *torch-backend*) exit "$INDEX" ;;
    *) env | grep ^UV_ || true ;;
esac
