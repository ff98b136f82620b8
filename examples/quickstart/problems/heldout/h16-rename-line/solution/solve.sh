#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
mv chart.txt essay.txt
sed -n 2p paper.txt > agenda.txt
