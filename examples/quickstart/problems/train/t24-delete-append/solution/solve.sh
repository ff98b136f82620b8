#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
rm notes.txt
echo uncle >> index.txt
