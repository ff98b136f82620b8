#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -i s/north/mango/ recipe.txt
mkdir work
mv index.txt work
