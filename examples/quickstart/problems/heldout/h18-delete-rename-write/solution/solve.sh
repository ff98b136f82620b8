#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
rm text.txt
mv poem.txt memo.txt
echo tulip > guide.txt
