#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cat log.txt
echo salad > paper.txt
echo magic > memo.txt
