#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -i s/night/paint/ list.txt
echo light >> items.txt
