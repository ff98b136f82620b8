#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cp list.txt notes.txt
sort names.txt > diary.txt
