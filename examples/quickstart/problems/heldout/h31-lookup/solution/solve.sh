#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cat log.txt
echo robot > memo.txt
echo cabin > essay.txt
