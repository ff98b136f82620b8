#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
echo metal > report.txt
mv story.txt sketch.txt
tail -n 1 letter.txt > diary.txt
