#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
mv items.txt letter.txt
sed -n 2p diary.txt > sketch.txt
