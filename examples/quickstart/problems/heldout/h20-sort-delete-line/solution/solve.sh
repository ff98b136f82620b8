#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sort poem.txt > chart.txt
rm text.txt
sed -n 2p paper.txt > guide.txt
