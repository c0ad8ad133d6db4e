#!/usr/bin/env bash
# Makes FOLDER, in which FOLDER/PROCESSOR/bin/python is Debian's Python for aarch64 on an emulated processor, with all that
# a device installs: tests/arm/root.sh FOLDER UV
# On x86-64, FOLDER/haswell/bin/python is this environment's Python on a processor that has AVX2 and nothing newer.
# Debian's packages are unpacked there, not installed; the system stays as it is.
set -euo pipefail
folder=$(realpath -m "$1") uv=$2 here=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$folder" && mkdir -p "$folder"/apt/{state,lists/partial,archives/partial} "$folder/debian"

# lists and archives of apt's own, in which nothing is installed
touch "$folder/apt/status"
private=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= -o Debug::NoLocking=true
  -o Dir::State="$folder/apt/state" -o Dir::State::Lists="$folder/apt/lists" -o Dir::State::status="$folder/apt/status"
  -o Dir::Cache="$folder/apt")
apt-get "${private[@]}" update
apt-get "${private[@]}" --yes --download-only --no-install-recommends install python3 libstdc++6 > /dev/null
for package in "$folder"/apt/archives/*.deb; do dpkg-deb --extract "$package" "$folder/debian"; done
rm -rf "$folder/apt"
libraries=$folder/debian/lib
[ -d "$libraries" ] || libraries=$folder/debian/usr/lib
python=$(realpath "$folder/debian/usr/bin/python3")

# processor PART FEATURES: onnxruntime reads which processor it is on, and dies of the answers of an x86 machine
processor() {
  local own=$folder/$1
  mkdir -p "$own"/{bin,system/proc}
  ln -s "$folder/debian/usr" "$own/system/usr"
  ln -s "$libraries" "$own/system/lib"
  for number in $(seq 0 $(($(nproc) - 1))); do
    printf 'processor\t: %s\nFeatures\t: %s\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\n' "$number" "$3"
    printf 'CPU part\t: %s\nCPU revision\t: 3\n\n' "$2"
  done > "$own/system/proc/cpuinfo"
  # a Python environment, whose interpreter is this script: so the processes that a program starts are emulated as well
  printf 'home = %s\nversion = %s\n' "$folder/debian/usr/bin" "${python##*python}" > "$own/pyvenv.cfg"
  printf '#!/bin/sh\nexec qemu-aarch64 -cpu %s -L %q -0 "$0" %q "$@"\n' "$1" "$own/system" "$python" > "$own/bin/python"
  chmod +x "$own/bin/python"
}
processor cortex-a72 0xd08 "fp asimd evtstrm crc32 cpuid"  # as a Raspberry Pi 4
processor cortex-a76 0xd0b \
  "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"  # as a Raspberry Pi 5
mkdir -p "$folder/cortex-a72/lib/${python##*/}/site-packages"
ln -s ../cortex-a72/lib "$folder/cortex-a76/lib"

if [ "$(uname -m)" = x86_64 ]; then
  environment=$(realpath -s "$(dirname "$uv")/python")
  mkdir -p "$folder/haswell/bin"
  # without what QEMU lacks of a Haswell, so that it does not warn of it
  printf '#!/bin/sh\nexec qemu-x86_64 -cpu Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid -0 %q %q "$@"\n' \
    "$environment" "$(realpath "$environment")" > "$folder/haswell/bin/python"
  chmod +x "$folder/haswell/bin/python"
fi

# what a device installs (pyproject.toml), and what its tests need besides
"$uv" pip install --quiet --python "$folder/cortex-a72/bin/python" --only-binary :all: -c "$here/constraints.txt" \
  -r "$here/pyproject.toml" pytest pytest-timeout hypothesis onnx prometheus-client
cc -O2 -shared -fPIC -o "$folder/instructions.so" "$here/tests/arm/instructions.c"
