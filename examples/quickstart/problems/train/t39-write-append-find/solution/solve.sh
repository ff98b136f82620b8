#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
echo metal > report.txt
echo apple >> sketch.txt
grep north letter.txt > score.txt
