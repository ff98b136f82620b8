#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sort diary.txt > notes.txt
tail -n 1 recipe.txt > plan.txt
cp score.txt names.txt
