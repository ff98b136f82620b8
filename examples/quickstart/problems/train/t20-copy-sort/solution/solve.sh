#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cp index.txt score.txt
sort quote.txt > names.txt
