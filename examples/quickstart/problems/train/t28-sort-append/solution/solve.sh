#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sort report.txt > sketch.txt
echo water >> index.txt
