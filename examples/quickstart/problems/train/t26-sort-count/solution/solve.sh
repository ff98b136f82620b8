#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sort list.txt > items.txt
wc -l < index.txt > sketch.txt
