#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -i s/robot/elbow/ paper.txt
cp poem.txt essay.txt
