#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -i s/stone/table/ plan.txt
tail -n 1 sketch.txt > report.txt
