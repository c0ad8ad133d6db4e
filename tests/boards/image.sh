#!/usr/bin/env bash
# Makes FOLDER with a virtual board's Debian 12: root.img (ext4), vmlinuz, initrd.img and key (of root's ssh):
#   tests/boards/image.sh FOLDER arm64|amd64
# It holds what a board's image holds before it is used: systemd, Python, cloud-init, and nothing of fedvit.
# Root runs it. It takes a minute for this machine's own architecture; for another one, a quarter of an hour and Linux 6.7
# or newer, as the packages' scripts are emulated.
set -euo pipefail
folder=$(realpath -m "$1") architecture=$2
root=$folder/root
# the archives that this machine's own apt uses
list_archives() { apt-get indextargets --format '$(REPO_URI)' | sort -u; }
mirror=${MIRROR:-$(list_archives | grep -v security | head -n 1)}
security=${SECURITY:-$(list_archives | grep security | head -n 1 || true)} # not every machine has one
packages=systemd-sysv,systemd-timesyncd,udev,dbus,kmod,linux-image-cloud-$architecture,initramfs-tools,zstd,iproute2,procps,e2fsprogs
packages+=,openssh-server,python3,libstdc++6,ca-certificates,cloud-init
[ "$(id -u)" = 0 ] || { echo "image.sh needs root: files of the image belong to many users" >&2; exit 1; }

# run_emulated COMMAND...: run it as root of a user namespace in which programs for aarch64 run. A user namespace has a
# binfmt_misc of its own, so nothing is registered for the rest of this machine. All ids are the same inside.
# Where programs for the architecture run anyway, it only runs the command.
run_emulated() {
  local gate parent child
  [ "$architecture" != "$(dpkg --print-architecture)" ] || { "$@"; return; }
  gate=$(mktemp -u); mkfifo "$gate"
  unshare --user --mount --pid --fork sh -c 'read -r _ < "$0"
    mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
    cat /usr/lib/binfmt.d/qemu-aarch64.conf > /proc/sys/fs/binfmt_misc/register
    exec "$@"' "$gate" "$@" &
  parent=$!
  until child=$(cat "/proc/$parent/task/$parent/children") && [ -n "$child" ]; do sleep 0.05; done
  echo "0 0 65536" > "/proc/${child% }/uid_map"
  echo "0 0 65536" > "/proc/${child% }/gid_map"
  echo > "$gate"; rm "$gate"
  wait "$parent"
}

rm -rf "$folder" && mkdir -p "$folder"
ssh-keygen -q -t ed25519 -N '' -f "$folder/key" -C board

# the initial memory disk holds only what the emulator's disk needs: else it takes minutes to make, and to unpack
cat > "$folder/before-packages" <<'END'
#!/bin/sh
mkdir -p "$1/etc/initramfs-tools/conf.d"
echo MODULES=list > "$1/etc/initramfs-tools/conf.d/board"
printf '%s\n' virtio_pci virtio_blk ext4 > "$1/etc/initramfs-tools/modules"
END
chmod +x "$folder/before-packages"
run_emulated mmdebstrap --quiet --mode=root --architectures="$architecture" --variant=minbase --skip=check/qemu \
  --format=directory --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt=force-unsafe-io --include="$packages" \
  --essential-hook="$folder/before-packages" \
  bookworm "$root" "deb $mirror bookworm main" ${security:+"deb $security bookworm-security main"}

echo board > "$root/etc/hostname"
mkdir -p "$root/boot/firmware" "$root/srv/fedvit/images" "$root/root/.ssh" "$root/var/log/journal"
cat > "$root/etc/fstab" <<'END'
/dev/vda       /                  ext4 defaults,noatime,errors=remount-ro 0 1
LABEL=bootfs   /boot/firmware     vfat ro,x-systemd.device-timeout=1h 0 0
LABEL=pictures /srv/fedvit/images ext4 ro,x-systemd.device-timeout=1h 0 0
END
# an emulated board takes minutes for what a board does in seconds
mkdir -p "$root/etc/systemd/system.conf.d"
printf '[Manager]\nDefaultTimeoutStartSec=1h\nDefaultTimeoutStopSec=10min\n' > "$root/etc/systemd/system.conf.d/patience.conf"
printf '[Match]\nName=en* eth*\n[Network]\nDHCP=ipv4\n' > "$root/etc/systemd/network/80-dhcp.network"
cp "$folder/key.pub" "$root/root/.ssh/authorized_keys" && chmod 700 "$root/root/.ssh"
wants=$root/etc/systemd/system/multi-user.target.wants
ln -sf /lib/systemd/system/systemd-networkd.service "$wants/"
mkdir -p "$root/etc/systemd/system/network-online.target.wants"
ln -sf /lib/systemd/system/systemd-networkd-wait-online.service "$root/etc/systemd/system/network-online.target.wants/"
# what nothing here uses, and takes an emulated board seconds
for unit in apt-daily.timer apt-daily-upgrade.timer e2scrub_reap.service e2scrub_all.timer systemd-binfmt.service \
    modprobe@{configfs,dm_mod,drm,efi_pstore,fuse,loop}.service sys-kernel-{config,debug,tracing}.mount \
    dev-{hugepages,mqueue}.mount systemd-{pstore,update-utmp}.service kmod-static-nodes.service getty.target; do
  ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
# a board speaks with this machine alone: no archive, no time server
: > "$root/etc/apt/sources.list"
mkdir -p "$root/etc/systemd/timesyncd.conf.d"
printf '[Time]\nNTP=\nFallbackNTP=\n' > "$root/etc/systemd/timesyncd.conf.d/none.conf"
# user data lies on the boot partition, as on Raspberry Pi OS; keys of ssh are made above, as that takes a minute there
cat > "$root/etc/cloud/cloud.cfg.d/99_board.cfg" <<'END'
datasource_list: [NoCloud, None]
datasource: {NoCloud: {fs_label: bootfs}}
network: {config: disabled}
locale: false
disable_root: false
ssh_deletekeys: false
ssh_genkeytypes: [ed25519]
apt: {preserve_sources_list: true}
growpart: {mode: "off"}
resize_rootfs: false
END

cp -L "$root/vmlinuz" "$root/initrd.img" "$folder/"
mke2fs -q -t ext4 -L board -d "$root" "$folder/root.img" 3G
rm -rf "$root" "$folder/before-packages"
