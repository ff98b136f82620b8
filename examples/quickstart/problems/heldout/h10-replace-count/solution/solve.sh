#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -i s/nurse/salad/ paper.txt
wc -l < text.txt > poem.txt
