#!/bin/sh
# Install Debian packages, as root; wait up to five minutes for another apt, such as the nightly upgrade.
set -e
tries=60
# no option of apt makes an update wait for the lock of the lists
until said=$(LC_ALL=C apt-get update -qq 2>&1); do
  case $said in *"Could not get lock"*) tries=$((tries - 1)) ;; *) tries=0 ;; esac
  [ "$tries" -gt 0 ] || { echo "$said" >&2; exit 1; }
  sleep 5
done
apt-get -o DPkg::Lock::Timeout=300 install -y -qq "$@" > /dev/null
