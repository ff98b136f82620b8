#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
mkdir work
mv list.txt work
tail -n 1 names.txt > letter.txt
