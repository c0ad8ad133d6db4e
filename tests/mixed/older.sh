#!/usr/bin/env bash
# Installs another version of fedvit, a tag or a commit of this repository, into FOLDER/VERSION: tests/mixed/older.sh VERSION FOLDER UV
set -euo pipefail
version=$1 folder=$2/$1 uv=$3
[ -n "$version" ] || { echo "there is no tag yet; name a version: make test-mixed FROM=COMMIT" >&2; exit 2; }
commit=$(git rev-parse --verify --quiet "$version^{commit}") || { echo "no version $version in this clone: name a tag or a commit" >&2; exit 2; }
[ "$(cat "$folder/commit" 2> /dev/null)" != "$commit" ] || exit 0
echo "installing fedvit as of $version into $folder (a minute, once)"
rm -rf "$folder" && mkdir -p "$folder/source"
git archive "$commit" | tar -x -C "$folder/source"
python3 -m venv --without-pip "$folder/env"
VIRTUAL_ENV=$folder/env "$uv" pip install --quiet -c "$folder/source/constraints.txt" "$folder/source[server]"
echo "$commit" > "$folder/commit"
