#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
tail -n 1 plan.txt > index.txt
grep giant diary.txt > report.txt
