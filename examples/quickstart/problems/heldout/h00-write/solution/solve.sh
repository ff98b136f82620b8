#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
echo green > text.txt
