#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
mkdir archive
mv names.txt archive
echo image > letter.txt
