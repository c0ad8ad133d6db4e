#!/usr/bin/env bash
# Builds the commit's sdist and wheels into FOLDER/files, with the commit's date in place of today's.
# Usage: build_dist.sh FOLDER PYTHON
set -euo pipefail
folder=$1 python=$2
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH TZ=UTC PYTHONHASHSEED=0 VIRTUAL_ENV="${python%/bin/python}" PATH="${python%/python}:$PATH"
umask 022
mkdir -p "$folder/source" "$folder/files" "$folder/sdist"
git archive HEAD | tar -x -C "$folder/source"
"$python" -m build --quiet --installer uv --outdir "$folder/files" "$folder/source" > /dev/null
for processor in x86_64 aarch64; do
  CXX=$processor-linux-gnu-g++ "$python" -m build --quiet --installer uv --wheel --outdir "$folder/files" \
    "$folder/source/kernels" > /dev/null
  rm -rf "$folder/source/kernels/build"
done

# setuptools writes today's dates and this user's name into an sdist
for sdist in "$folder"/files/*.tar.gz; do
  tar -x -C "$folder/sdist" -f "$sdist"
  tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u+rwX,go+rX,go-w \
    -C "$folder/sdist" -c "$(basename "$sdist" .tar.gz)" | gzip -n9 > "$sdist.new"
  mv "$sdist.new" "$sdist"
done
