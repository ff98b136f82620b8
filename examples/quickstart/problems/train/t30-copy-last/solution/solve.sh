#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cp recipe.txt notes.txt
tail -n 1 report.txt > sketch.txt
