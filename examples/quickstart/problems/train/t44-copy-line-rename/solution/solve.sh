#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cp menu.txt list.txt
sed -n 3p quote.txt > index.txt
mv notes.txt sketch.txt
