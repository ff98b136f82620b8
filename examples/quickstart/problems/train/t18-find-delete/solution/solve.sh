#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
grep water items.txt > menu.txt
rm letter.txt
