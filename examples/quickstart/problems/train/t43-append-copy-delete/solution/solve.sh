#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
echo earth >> plan.txt
cp list.txt diary.txt
rm draft.txt
