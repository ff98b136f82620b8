#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
echo onion >> guide.txt
sort memo.txt > poem.txt
tail -n 1 text.txt > essay.txt
