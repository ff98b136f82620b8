#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
rm poem.txt
grep dance paper.txt > memo.txt
