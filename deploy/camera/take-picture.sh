#!/bin/sh
# Takes one picture into a folder, by default with a Raspberry Pi's camera:
#
#   take-picture.sh /srv/fedvit/images/unlabelled
#
# FEDVIT_CAMERA is the command that writes a picture into the file that follows it. A USB camera by OpenCV:
#
#   FEDVIT_CAMERA="python3 /opt/fedvit/camera/opencv-still.py" take-picture.sh /srv/fedvit/images/unlabelled
#
# The picture gets its name when it is whole: until then its name begins with a dot, and such files are ignored.
set -eu
folder=${1:?the folder for the picture is missing}
name=$(date -u +%Y%m%d-%H%M%S)-$$.jpg
mkdir -p "$folder"
partial=$folder/.$name
trap 'rm -f "$partial"' EXIT
# not quoted: the command's arguments are words of their own
${FEDVIT_CAMERA:-rpicam-still --nopreview --timeout 1000 --width 1280 --height 960 --output} "$partial"
sync "$partial"
mv "$partial" "$folder/$name"
