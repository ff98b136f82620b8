#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
mkdir safe
mv essay.txt safe
mv poem.txt paper.txt
