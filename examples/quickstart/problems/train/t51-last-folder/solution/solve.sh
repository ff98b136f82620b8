#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
tail -n 1 notes.txt > quote.txt
mkdir archive
mv names.txt archive
