#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -i s/pearl/tiger/ menu.txt
echo beach > plan.txt
