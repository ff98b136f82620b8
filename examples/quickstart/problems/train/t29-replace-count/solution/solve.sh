#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -i s/beach/flame/ sketch.txt
wc -l < list.txt > notes.txt
