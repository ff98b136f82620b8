#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
grep onion agenda.txt > essay.txt
tail -n 1 poem.txt > paper.txt
sed -i s/salad/actor/ chart.txt
