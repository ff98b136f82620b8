#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cat log.txt
echo ivory > list.txt
echo pearl > quote.txt
