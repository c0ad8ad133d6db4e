#!/usr/bin/env bash
# Builds Debian packages from a wheel of fedvit, for each of the given pairs of architecture and Python:
#   deploy/debian/build.sh WHEEL OUT PYTHON [arm64:3.11 amd64:3.13 ...]
# fedvit-edge-VERSION-pyXY-MACHINE.zip has the same for `edge-client update` (coordinator release publishes it).
# fedvit-edge holds a whole environment below /opt/fedvit, so a device needs no package index; fedvit-server (for all
# machines) holds the wheel, and installs torch and what else it needs when it is installed itself.
# PYTHON is an interpreter with uv, click-man and this wheel's dependencies. Two builds are equal bit by bit.
set -euo pipefail
wheel=$(realpath "$1") out=$(realpath -m "$2") python=$3 here=$(cd "$(dirname "$0")" && pwd)
shift 3
root=$(cd "$here/../.." && pwd)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct)} PYTHONDONTWRITEBYTECODE=1
umask 022
version=$(basename "$wheel" | cut -d- -f2)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

# pages PROGRAM FOLDER: manual pages and completion of a program
pages() {
  mkdir -p "$2/usr/share/man/man1" "$2/usr/share/bash-completion/completions"
  "${python%/*}/click-man" --target "$2/usr/share/man/man1" --man-date "$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%d)" "$1" > /dev/null
  gzip -9n "$2/usr/share/man/man1/$1"*.1
  variable=_$(tr a-z- A-Z_ <<< "$1")_COMPLETE
  env "$variable=bash_source" "${python%/*}/$1" > "$2/usr/share/bash-completion/completions/$1"
}

# pack FOLDER NAME ARCHITECTURE VERSION: a package of a folder
pack() {
  mkdir -p "$1/usr/share/doc/$2"
  cp "$root/LICENSE" "$1/usr/share/doc/$2/copyright"
  gzip -9nc "$root/CHANGELOG.md" > "$1/usr/share/doc/$2/changelog.gz"
  printf 'Installed-Size: %s\n' "$(du -sk --apparent-size "$1" | cut -f1)" >> "$1/DEBIAN/control"
  (cd "$1" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum > DEBIAN/md5sums)
  chmod 0755 "$1"/DEBIAN/{postinst,prerm,postrm}
  find "$1" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
  dpkg-deb --root-owner-group -Zzstd --build "$1" "$out/$2_$4_$3.deb" > /dev/null
  echo "$out/$2_$4_$3.deb"
}

# edge ARCHITECTURE PYTHON: the device's package for Debian's Python of this version
edge() {
  case $1 in arm64) machine=aarch64 ;; amd64) machine=x86_64 ;; *) echo "unknown architecture $1: arm64 or amd64" >&2; exit 2 ;; esac
  local to=$work/edge-$1-$2 packages
  packages=$to/opt/fedvit/lib/python$2/site-packages
  mkdir -p "$to"/{DEBIAN,etc/fedvit,usr/bin,usr/lib/systemd/system,srv/fedvit/images,opt/fedvit/bin} "$packages"
  # copies: a file with a link in the cache changes while another process links it, and tar gives up
  "${python%/*}/uv" pip install --quiet --link-mode copy --target "$packages" --python-version "$2" --python-platform "$machine-manylinux_2_28" \
    --only-binary :all: --no-compile-bytecode -c "$root/constraints.txt" "$wheel" prometheus-client zeroconf
  rm -rf "$packages"/{bin,.lock} "$packages"/fleet "$packages"/coordinator
  # half of all files, for tools of onnxruntime that devices do not use
  rm -rf "$packages"/{sympy,mpmath,isympy.py} "$packages"/{sympy,mpmath}-*.dist-info
  find "$packages" -name direct_url.json -delete
  "$python" -P -m fedvit.releases "$packages" "$out/fedvit-edge-$version-py${2/./}-$machine.zip"
  echo "$out/fedvit-edge-$version-py${2/./}-$machine.zip"
  # compiled here where this Python is at hand, since a board takes a minute for it; else its postinst does it
  if interpreter=$("${python%/*}/uv" python find --no-project --no-python-downloads "$2" 2> /dev/null); then
    find "$packages" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
    PYTHONHASHSEED=0 "$interpreter" -m compileall -q -s "$to" -p / "$packages" || true
  fi
  ln -s /usr/bin/python3 "$to/opt/fedvit/bin/python"
  printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = %s\n' "$2" > "$to/opt/fedvit/pyvenv.cfg"
  install -m 0755 "$here/edge/program" "$to/opt/fedvit/bin/edge-client"
  install -m 0755 "$here/edge/edge-client" "$to/usr/bin/edge-client"
  install -m 0644 "$root"/deploy/systemd/fedvit-{{edge,join,serve,update}.service,update.timer} "$to/usr/lib/systemd/system/"
  install -m 0600 "$here/edge/edge.env" "$to/etc/fedvit/edge.env"
  cp "$here"/edge/{postinst,prerm,postrm} "$to/DEBIAN/"
  echo /etc/fedvit/edge.env > "$to/DEBIAN/conffiles"
  pages edge-client "$to"
  local next=3.$((${2#3.} + 1))
  sed "s/@VERSION@/$version+py${2/./}/; s/@ARCHITECTURE@/$1/; s/@PYTHON@/$2/; s/@NEXT@/$next/" "$here/edge/control" > "$to/DEBIAN/control"
  pack "$to" fedvit-edge "$1" "$version+py${2/./}"
}

server() {
  local to=$work/server
  mkdir -p "$to"/{DEBIAN,etc/fedvit,usr/bin,usr/lib/systemd/system,usr/share/fedvit-server}
  cp "$wheel" "$root/constraints.txt" "$to/usr/share/fedvit-server/"
  sed 's#/opt/fedvit/#/opt/fedvit-server/#' "$root/deploy/systemd/fedvit-coordinator.service" > "$to/usr/lib/systemd/system/fedvit-coordinator.service"
  install -m 0600 "$here/server/service.toml" "$to/etc/fedvit/service.toml"
  for program in coordinator fleet; do
    ln -s "/opt/fedvit-server/bin/$program" "$to/usr/bin/$program"
    pages "$program" "$to"
  done
  cp "$here"/server/{postinst,prerm,postrm} "$to/DEBIAN/"
  echo /etc/fedvit/service.toml > "$to/DEBIAN/conffiles"
  sed "s/@VERSION@/$version/" "$here/server/control" > "$to/DEBIAN/control"
  pack "$to" fedvit-server all "$version"
}

[ $# -gt 0 ] || set -- arm64:3.11 arm64:3.13 amd64:3.11 amd64:3.13
for pair in "$@"; do edge "${pair%:*}" "${pair#*:}"; done
server
