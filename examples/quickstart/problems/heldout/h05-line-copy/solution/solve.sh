#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -n 2p guide.txt > text.txt
cp agenda.txt paper.txt
