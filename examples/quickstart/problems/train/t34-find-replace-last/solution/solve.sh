#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
grep urban names.txt > story.txt
sed -i s/lemon/image/ quote.txt
tail -n 1 sketch.txt > list.txt
