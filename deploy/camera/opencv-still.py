"""Write one picture of the first camera into a file: `python3 opencv-still.py FILE`. Needs Debian's python3-opencv."""

import sys

import cv2

camera = cv2.VideoCapture(0)
for _ in range(10):  # the first pictures are dark: the camera measures the light
    whole, picture = camera.read()
if not (whole and cv2.imwrite(sys.argv[1], picture)):
    sys.exit("the camera gives no picture")
