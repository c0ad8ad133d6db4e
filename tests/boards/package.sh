#!/usr/bin/env bash
# Builds the device's package for the virtual boards from this folder as it is, and the same as a newer version:
#   tests/boards/package.sh FOLDER PYTHON arm64|amd64 NEWER
# `make dist` does the same for a commit, and for more systems.
set -euo pipefail
folder=$(realpath -m "$1") python=$2 architecture=$3 newer=$4
rm -rf "$folder" && mkdir -p "$folder/now" "$folder/newer" "$folder/tree"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --target-directory "$folder/tree"
build() {
  "$python" -m build --quiet --wheel --installer uv --outdir "$folder/$1" "$folder/tree" > /dev/null
  deploy/debian/build.sh "$folder/$1"/fedvit-[0-9]*.whl "$folder/$1" "$python" "$architecture:3.11" > /dev/null
}
build now
sed -i "s/^version = .*/version = \"$newer\"/" "$folder/tree/pyproject.toml"
build newer
rm -rf "$folder/tree"
