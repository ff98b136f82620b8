#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
wc -l < menu.txt > plan.txt
echo ocean > names.txt
