#!/bin/sh
# Installs, upgrades or removes fedvit on systems without Debian packages (JetPack 6, Fedora, Arch, ...):
#   sudo sh deploy/install.sh edge fedvit-0.1.0-py3-none-any.whl        # a device; the same line upgrades it
#   sudo sh deploy/install.sh edge fedvit-0.1.0-py3-none-any.whl --gpu  # with onnxruntime for NVIDIA's GPUs
#   sudo sh deploy/install.sh server fedvit-0.1.0-py3-none-any.whl      # a server, with torch
#   sudo sh deploy/install.sh edge --remove                             # keeps settings and state; --purge removes them, too
# Without root it installs below ~/.local, without a service. Without Python 3.11 to 3.13 it fetches one with uv.
set -eu
umask 022  # services have users of their own, who read what root installs
here=$(cd "$(dirname "$0")" && pwd)
kind=${1:-} what=${2:-} option=${3:-}
case $kind in
  edge) unit=fedvit-edge.service more="fedvit-update.service fedvit-update.timer" name=fedvit programs=edge-client extras=prometheus,discovery state="fedvit-edge" files="edge.env token" ;;
  server) unit=fedvit-coordinator.service more="" name=fedvit-server programs="coordinator fleet" \
    extras=server,dashboard,discovery,postgresql,prometheus,s3 state="fedvit" files="service.toml coordinator.env" ;;
  *) echo "usage: install.sh edge|server WHEEL|--remove|--purge; the first word is '$kind'" >&2; exit 2 ;;
esac
if [ "$(id -u)" = 0 ]; then
  root=${FEDVIT_ROOT:-}  # another root folder, as for an image that is being made
  to=$root/opt/$name bin=$root/usr/local/bin units=$root/etc/systemd/system settings=$root/etc/fedvit
else
  root="" to=$HOME/.local/share/$name bin=$HOME/.local/bin units="" settings=""
fi
case $kind$option in
  edge | server | edge--gpu) ;;
  *) echo "install.sh $kind knows no option '$option'" >&2; exit 2 ;;
esac
systemd() { [ -z "$units$root" ] || [ -n "$root" ] || [ ! -d /run/systemd/system ] || systemctl "$@"; }

if [ "$what" = --remove ] || [ "$what" = --purge ]; then
  [ -z "$units" ] || systemd disable --now "$unit" ${more##* } 2> /dev/null || true
  for program in $programs; do rm -f "$bin/$program"; done
  rm -rf "$to" "$to.new" "$to.old" "$to.uv" "$to.python" "$to.log"
  [ -z "$units" ] || for each in $unit $more; do rm -f "$units/$each"; done
  if [ "$what" = --purge ] && [ -z "$settings" ]; then  # a device's state, or a server's exported graphs
    if [ "$kind" = edge ]; then own=${XDG_STATE_HOME:-$HOME/.local/state}; else own=${XDG_CACHE_HOME:-$HOME/.cache}; fi
    rm -rf "$own/fedvit"
  elif [ "$what" = --purge ]; then
    for file in $files; do rm -f "$settings/$file"; done
    rmdir "$settings" 2> /dev/null || true  # the other program's settings stay
    rm -rf "$root/var/lib/$state" "$root/var/lib/private/$state" "$root/var/cache/$state" "$root/var/cache/private/$state"
  fi
  systemd daemon-reload
  echo "removed"
  exit 0
fi
[ -f "$what" ] || { echo "no such wheel: '$what'; make dist builds it, a release has it" >&2; exit 2; }

python=""
for each in python3.13 python3.12 python3.11 python3; do
  if command -v "$each" > /dev/null && "$each" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null; then
    python=$(command -v "$each"); break
  fi
done
mkdir -p "$(dirname "$to")" "$bin"
if [ -z "$python" ]; then
  old=$(python3 -c 'import platform; print(platform.python_version())' 2> /dev/null || echo none)
  echo "no Python 3.11 to 3.13 here (python3: $old): fetching one with uv into $to.python"
  export UV_PYTHON_INSTALL_DIR="$to.python"
  if { python3 -m venv "$to.uv" && "$to.uv/bin/pip" install --quiet uv && "$to.uv/bin/uv" python install --quiet 3.12; } \
    > "$to.log" 2>&1; then
    python=$("$to.uv/bin/uv" python find --managed-python 3.12)
    rm -f "$to.log"
  else
    echo "no Python could be fetched (its log: $to.log); install Python 3.11 to 3.13, and repeat this line" >&2
    exit 1
  fi
fi

# a new environment beside the former one: until it is complete the former one is used
rm -rf "$to.new"
"$python" -m venv "$to.new"
constraints=$here/../constraints.txt
echo "installing $what into $to"
if [ -f "$constraints" ]; then set -- -c "$constraints"; else set --; fi
pip() { "$to.new/bin/pip" "$@" --quiet --disable-pip-version-check; }
pip install "$@" "$what[$extras]"
if [ "$option" = --gpu ]; then  # both packages have the same files, so one leaves before the other comes
  pip uninstall --yes onnxruntime
  pip install "onnxruntime-gpu>=1.25"
fi
for script in "$to.new"/bin/* "$to.new/pyvenv.cfg"; do  # programs and `activate` name their folder
  [ -L "$script" ] || ! grep -Iq . "$script" || sed -i "s#$to.new#${to#"$root"}#g" "$script"
done
if [ "$kind" = edge ]; then  # with it edge-client update can install versions beside this one
  install -m 0755 "$here/debian/edge/program" "$to.new/bin/edge-client"
  [ ! -f "$to/update.json" ] || cp -p "$to/update.json" "$to.new/"
fi
rm -rf "$to.old"
[ ! -e "$to" ] || mv "$to" "$to.old"
mv "$to.new" "$to" && rm -rf "$to.old"
for program in $programs; do ln -sf "${to#"$root"}/bin/$program" "$bin/$program"; done

if [ -n "$units" ]; then
  mkdir -p "$units" "$settings"
  for each in $unit $more; do sed "s#/opt/fedvit/#/opt/$name/#" "$here/systemd/$each" > "$units/$each"; done
  if [ "$kind" = edge ]; then source=$here/debian/edge/edge.env; else source=$here/debian/server/service.toml; fi
  [ -e "$settings/$(basename "$source")" ] || install -m 0600 "$source" "$settings/"
  systemd daemon-reload
  systemd try-restart "$unit"
fi
case $kind in
  edge) echo "next: ${units:+sudo }edge-client join TOKEN${units:+ --state /var/lib/fedvit-edge; images into /srv/fedvit/images/CLASS/; sudo systemctl enable --now fedvit-edge}" ;;
  server) echo "next: ${units:+sudo }coordinator init ${units:+/var/lib/fedvit/}deployment --host SERVER${units:+; sudo systemctl enable --now fedvit-coordinator}" ;;
esac
