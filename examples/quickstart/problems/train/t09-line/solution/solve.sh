#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -n 3p notes.txt > sketch.txt
