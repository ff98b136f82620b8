#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
grep urban names.txt > recipe.txt
sed -n 2p notes.txt > sketch.txt
