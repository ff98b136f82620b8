#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
tail -n 1 diary.txt > report.txt
sed -n 2p score.txt > notes.txt
