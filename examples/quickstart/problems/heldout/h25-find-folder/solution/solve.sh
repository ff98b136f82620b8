#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
grep magic paper.txt > poem.txt
mkdir safe
mv text.txt safe
