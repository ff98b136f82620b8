#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
wc -l < story.txt > notes.txt
cp items.txt list.txt
