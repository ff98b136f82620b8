#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sort essay.txt > poem.txt
sed -n 3p memo.txt > text.txt
