#!/usr/bin/env bash
# Builds the device's package for the virtual boards from this folder as it is: tests/boards/package.sh FOLDER PYTHON
# `make dist` does the same for a commit, and for more systems.
set -euo pipefail
folder=$(realpath -m "$1") python=$2
rm -rf "$folder" && mkdir -p "$folder"
"$python" -m build --quiet --wheel --installer uv --outdir "$folder" . > /dev/null
deploy/debian/build.sh "$folder"/fedvit-[0-9]*.whl "$folder" "$python" arm64:3.11 > /dev/null
