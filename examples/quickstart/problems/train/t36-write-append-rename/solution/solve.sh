#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
echo chair > names.txt
echo zebra >> report.txt
mv notes.txt draft.txt
