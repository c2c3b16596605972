#!/bin/sh
# Make a virtual environment at $1 with the first Python that is 3.11 or newer. $PYTHON overrides the search.
set -eu
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    # Run it, because a name on PATH may be a shim without a Python.
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$python cannot make virtual environments: on Debian, sudo apt-get install -y python3-venv" >&2
        exit 1
    fi
    exec "$python" -m venv --clear "$1"
done
echo "No Python 3.11 or newer was found (tried: ${PYTHON:-python3 python3.13 python3.12 python3.11})." \
    "Install one (Debian: sudo apt-get install -y python3 python3-venv; macOS: brew install python@3.13)" \
    "or name one: make PYTHON=/path/to/python3" >&2
exit 1
