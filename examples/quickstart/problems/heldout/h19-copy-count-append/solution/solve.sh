#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cp essay.txt agenda.txt
wc -l < paper.txt > chart.txt
echo robot >> poem.txt
