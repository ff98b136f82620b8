#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
mkdir store
mv guide.txt store
