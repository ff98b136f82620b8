#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cp menu.txt items.txt
echo horse >> quote.txt
