#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
wc -l < draft.txt > menu.txt
sed -n 2p letter.txt > index.txt
sort story.txt > items.txt
