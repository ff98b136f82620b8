#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
mkdir backup
mv plan.txt backup
