#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sort guide.txt > agenda.txt
sed -n 2p text.txt > paper.txt
wc -l < chart.txt > essay.txt
