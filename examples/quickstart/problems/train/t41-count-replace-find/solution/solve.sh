#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
wc -l < menu.txt > names.txt
sed -i s/voice/north/ sketch.txt
grep pearl recipe.txt > draft.txt
