#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
grep tiger items.txt > notes.txt
echo apple >> plan.txt
