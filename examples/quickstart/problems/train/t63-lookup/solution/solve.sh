#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cat log.txt
echo north > list.txt
echo night > items.txt
