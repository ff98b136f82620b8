#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sed -n 3p plan.txt > recipe.txt
mv notes.txt quote.txt
